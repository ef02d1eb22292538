"""Under launchers other than ``commsched run``, two ranks find each other without a setting, and train to the same bits. Under
torchrun on one host, and with PyTorch: ``tests/plugins/torch/test_launchers.py``."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from commsched.cli.launch import free_port
from tests.transports.backends.mpi.launch import BY_DEFAULT, OPEN_MPI, run

from .job import ROOT, clean_environ, run_job

SCRIPT = [str(ROOT / "tests" / "jobs" / "training.py"), "3"]


def weights(out: str) -> str:
    """Of both ranks, which are equal."""
    found = dict(re.findall(r"^rank (\d) weights (\w{64})$", out, re.MULTILINE))
    assert sorted(found) == ["0", "1"], out
    assert found["0"] == found["1"]
    return found["0"]


@pytest.fixture(scope="module")
def expected() -> str:
    """Under ``commsched run``."""
    code, out, err = run_job("-n", "2", "--", sys.executable, *SCRIPT)
    assert code == 0, err
    assert err.startswith("commsched: 2 ranks on 1 host, ps over tcp, 6 tensors of "), err
    return weights(out)


def test_mpiexec_of_open_mpi(expected: str) -> None:
    code, out, err = run(OPEN_MPI, 2, *SCRIPT, **BY_DEFAULT)
    assert code == 0, err
    assert "commsched: 2 ranks on 1 host, mpi, " in err
    assert weights(out) == expected


def test_torchrun_on_two_hosts(expected: str) -> None:
    """Both are this machine, by its loopback address; as far as the ranks know they are two."""
    port = free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    hosts = [
        subprocess.Popen(
            [*torchrun, f"--master-port={port}", f"--node-rank={host}", *SCRIPT],
            env=clean_environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    try:
        ends = [host.communicate(timeout=300) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    assert [host.returncode for host in hosts] == [0, 0], ends
    assert "rank 0 listens at 127.0.0.1, by MASTER_ADDR='127.0.0.1', which ranks on other machines cannot reach" in ends[0][1]
    assert "commsched: 2 ranks on 1 host, ps over tcp, 6 tensors of " in ends[0][1]
    assert weights("".join(out for out, _ in ends)) == expected


def test_srun(expected: str) -> None:
    """By the variables that it sets: Slurm is not installed here."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
    sizes = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *SCRIPT],
            env=clean_environ(**step, **sizes, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert ends[0][1].startswith("commsched: 2 ranks on 1 host, ps over tcp, ")
    assert "commsched: srun sets no RANK and WORLD_SIZE: a script that shares out its data by them reads the same" in ends[0][1]
    assert ends[1][1] == ""
    assert weights("".join(out for out, _ in ends)) == expected
