"""Changes of configuration, a tuner's among them, change no weight: real processes, real transports."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from commsched.session import local_sessions
from commsched.testing.world import run_world
from tests.jobs.job import run_job

from . import tuned_rank
from .training import Weights

pytestmark = pytest.mark.timeout(120)

STEPS = 200


def train(out: Path, how: str, *arguments: str, environ: Mapping[str, str] = {}) -> tuple[list[Any], str]:
    """What each of two ranks saved, and what they said."""
    command = [sys.executable, "-m", "tests.plugins.torch.tuned_rank", how, str(STEPS), str(out)]
    code, _, err = run_job("-n", "2", *arguments, "--", *command, environ=environ, timeout_seconds=100)
    assert code == 0, err
    return [torch.load(f"{out}.{rank}") for rank in range(2)], err


@pytest.fixture(scope="module")
def steady() -> Weights:
    """Of ranks that are threads and keep one configuration."""
    models = [tuned_rank.make_model(rank) for rank in range(2)]  # here: the random state of torch is that of the process
    sessions = local_sessions(2)

    def train_one(rank: int) -> Weights:
        with sessions[rank] as session:
            return tuned_rank.train(session, models[rank], "steady", STEPS)["weights"]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks of jobs
    try:
        return run_world(2, train_one, timeout_seconds=50)[0]
    finally:
        torch.set_num_threads(threads)


def require_bits(saved: list[Any], expected: Weights) -> None:
    for rank, each in enumerate(saved):
        for name, weights in expected.items():
            assert torch.equal(each["weights"][name], weights), f"'{name}' of rank {rank}"


def test_changes_while_training_change_no_weight(steady: Weights, tmp_path: Path) -> None:
    """The sum of two has one order only, so that collectives too give the bits of the parameter server."""
    saved, _ = train(tmp_path / "w", "policies", "--transport", "gloo")
    require_bits(saved, steady)
    assert saved[0]["configs"] == saved[1]["configs"] > 5


@pytest.mark.parametrize(
    ("transport", "environ"),
    [
        ("ps", {"COMMSCHED_TUNE": "20trials", "COMMSCHED_TUNE_BY": "random"}),
        ("gloo", {"COMMSCHED_TUNE": "1", "COMMSCHED_ORDER": "static"}),
    ],
)
def test_tuned_training_has_the_weights_of_training_that_is_not(
    transport: str, environ: Mapping[str, str], steady: Weights, tmp_path: Path
) -> None:
    """How far it comes depends on how busy the machine is."""
    saved, err = train(tmp_path / "w", "steady", "--transport", transport, environ=environ)
    require_bits(saved, steady)
    assert "commsched: tuning: trial 0: partition" in err, err
    assert re.search(r"commsched: tuning: \d+ trials, .*kept\n$", err), err
    assert "Traceback" not in err
    assert saved[0]["configs"] > 1
