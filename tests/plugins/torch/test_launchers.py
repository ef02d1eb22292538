"""A PyTorch script under torchrun: two ranks find each other without a setting, and train to the same bits. What depends on the
launcher alone is in ``tests/jobs/test_launchers.py``; under mpiexec: ``tests/examples/test_engines.py``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.jobs.job import clean_environ

SCRIPT = str(Path(__file__).with_name("launched.py"))


def test_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT]
    ended = warm.run(command, imports=warm.TORCH, nested=True, env=clean_environ(), timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "commsched: 2 ranks on 1 host, ps over tcp, 4 tensors of 644 bytes per step, " in ended.stderr
    weights = dict(re.findall(r"^rank (\d) of 2 (\w{64})$", ended.stdout, re.MULTILINE))
    assert sorted(weights) == ["0", "1"], ended.stdout
    assert weights["0"] == weights["1"]


@pytest.mark.parametrize("module", ["commsched run -n2 --", "torch.distributed.run --standalone --nproc-per-node=2"])
def test_a_rank_that_exits_with_an_error_keeps_no_barrier_of_another_waiting(module: str) -> None:
    python = [sys.executable] if module.startswith("commsched") else []
    command = [sys.executable, "-m", *module.split(), *python, str(Path(SCRIPT).with_name("barrier_rank.py"))]
    ended = warm.run(command, imports=warm.TORCH, nested=True, env=clean_environ(), timeout=300)
    assert ended.returncode == 1, ended.stderr
    if python:
        # Rank 0 learns of it from the barrier, whose connection is closed, or from the session.
        assert re.search(r"rank 0: .*TransportError: rank 1 ended: exit code 1", ended.stderr), ended.stderr
    else:  # torchrun calls the error with the earliest time the root cause: rank 1's exit code, or the barrier of rank 0
        assert re.search(r"rank +: 1 \(local_rank: 1\)\s+exitcode +: 1 ", ended.stderr), ended.stderr
