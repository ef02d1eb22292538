"""Changes of configuration, a tuner's among them, change no weight: real processes, real transports."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from commsched.session.local import local_sessions
from commsched.testing.world import run_world
from tests import warm
from tests.jobs.job import run_job

from . import tuned_rank
from .training import Weights

STEPS = 200


#: By name: what the ranks do, and settings of their session.
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "policies": ("policies", {"transport": "gloo"}),
    # Another process's answers, which ``bayes`` asks for first, may come too late on a busy machine.
    "tuned": ("steady", {"transport": "gloo", "tune": "1", "tune_by": "random", "order": "static"}),
}


@dataclass(frozen=True)
class Trained:
    """``saved``: by each of two ranks in each case; ``said``: by the ranks, on stderr."""

    saved: dict[str, list[Any]]
    said: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All cases, one after the other in the same processes."""
    out = tmp_path_factory.mktemp("tuned") / "w"
    cases = map(json.dumps, CASES.values())
    command = [sys.executable, "-m", "tests.plugins.torch.tuned_rank", str(STEPS), str(out), *cases]
    code, _, err = run_job("-n", "2", "--", *command, imports=warm.TORCH)
    assert code == 0, err
    saved = {name: [torch.load(f"{out}.{number}.{rank}") for rank in range(2)] for number, name in enumerate(CASES)}
    return Trained(saved, err)


@pytest.fixture(scope="module")
def steady() -> Weights:
    """Of ranks that are threads and keep one configuration."""
    models = [tuned_rank.make_model(rank) for rank in range(2)]  # here: the random state of torch is that of the process
    sessions = local_sessions(2)

    def train_one(rank: int) -> Weights:
        with sessions[rank] as session:
            return tuned_rank.train(session, models[rank], "steady", STEPS)["weights"]

    return run_world(2, train_one, timeout_seconds=300)[0]


def require_bits(saved: list[Any], expected: Weights) -> None:
    for rank, each in enumerate(saved):
        for name, weights in expected.items():
            assert torch.equal(each["weights"][name], weights), f"'{name}' of rank {rank}"


def test_changes_while_training_change_no_weight(steady: Weights, trained: Trained) -> None:
    """The sum of two has one order only, so that collectives too give the bits of the parameter server."""
    saved = trained.saved["policies"]
    require_bits(saved, steady)
    assert saved[0]["configs"] == saved[1]["configs"] > 5


def test_tuned_training_has_the_weights_of_training_that_is_not(steady: Weights, trained: Trained) -> None:
    """How far it comes depends on how busy the machine is. Over the parameter server: ``tests/jobs/test_tune.py``."""
    saved = trained.saved["tuned"]
    require_bits(saved, steady)
    assert saved[0]["configs"] > 1


def test_it_says_what_it_tries_and_what_it_keeps(trained: Trained) -> None:
    assert trained.said.count("commsched: tuning: trial 0: partition") == 1, trained.said
    assert len(re.findall(r"^commsched: tuning: \d+ trials, .*kept$", trained.said, re.MULTILINE)) == 1, trained.said
    assert trained.said.endswith("kept\n"), trained.said
    assert "Traceback" not in trained.said
