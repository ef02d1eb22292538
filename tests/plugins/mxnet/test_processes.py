"""Training in real processes, which end without closing anything, and fork meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from mxnet import gluon

from tests.jobs.job import run_job

from .training import mlp, require_equal, train_alone

pytestmark = pytest.mark.timeout(120)


def run(out: Path, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.plugins.mxnet.rank", str(out), *arguments]
    sizes = ("--partition", "200", "--credit", "400")
    return run_job(
        "-n", "2", "--transport", "ps", *sizes, "--", *command, environ={"OMP_NUM_THREADS": "1"}, timeout_seconds=100
    )


def test_the_parameter_server_equals_plain_training_also_when_workers_of_a_loader_are_forked(tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "weights")
    assert code == 0, err
    by_rank = [dict(np.load(tmp_path / f"weights.{rank}.npz")) for rank in range(2)]
    alone = train_alone(
        lambda: mlp(0, deferred=True),
        lambda net: gluon.Trainer(net.collect_params(), "nag", {"learning_rate": 0.1, "momentum": 0.9}),
        world_size=2,
    )
    require_equal(by_rank, alone)


def test_a_killed_rank_ends_the_other_with_an_error_that_names_it(tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "weights", "3")
    assert code != 0
    assert "PeerLost: rank 1" in err
    assert not (tmp_path / "weights.0.npz").exists()
