"""A PyTorch script under every launcher: two ranks find each other without a setting, and train to the same bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.jobs.job import clean_environ, run_job
from tests.transports.mpi.launch import BOTH, MPICH, Mpi, run

pytestmark = pytest.mark.timeout(120)
SCRIPT = str(Path(__file__).with_name("launched.py"))
#: What is set by default in tests of MPI, and here is not.
BY_DEFAULT = {"COMMSCHED_TRANSPORT": "", "COMMSCHED_HIERARCHY": "", "COMMSCHED_RENDEZVOUS": ""}


def weights(out: str) -> str:
    """Of both ranks, which are equal."""
    found = dict(re.findall(r"^rank (\d) of 2 (\w{64})$", out, re.MULTILINE))
    assert sorted(found) == ["0", "1"], out
    assert found["0"] == found["1"]
    return found["0"]


@pytest.fixture(scope="module")
def expected() -> str:
    """Under ``commsched run``."""
    code, out, err = run_job("-n", "2", "--", sys.executable, SCRIPT)
    assert code == 0, err
    assert err.startswith("commsched: 2 ranks on 1 host, ps over tcp, 4 tensors of 644 bytes per step, "), err
    return weights(out)


def test_torchrun(expected: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "commsched: 2 ranks on 1 host, ps over tcp, " in done.stderr
    assert weights(done.stdout) == expected


@BOTH
def test_mpiexec(mpi: Mpi, expected: str) -> None:
    script = [SCRIPT]
    if mpi is not MPICH:  # PyTorch is not installed beside it
        append = f"import runpy, sys; sys.path.append({sysconfig.get_path('purelib')!r}); "
        script = ["-c", f"{append}runpy.run_path({SCRIPT!r}, run_name='__main__')"]
    code, out, err = run(mpi, 2, *script, **BY_DEFAULT)
    assert code == 0, err
    assert "commsched: 2 ranks on 1 host, mpi, " in err
    assert weights(out) == expected


def test_srun(expected: str) -> None:
    """By the variables that it sets: Slurm is not installed here."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
    sizes = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT],
            env=clean_environ(**step, **sizes, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert ends[0][1].startswith("commsched: 2 ranks on 1 host, ps over tcp, ")
    assert ends[1][1] == ""
    assert weights("".join(out for out, _ in ends)) == expected
