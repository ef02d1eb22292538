"""Changes of configuration, a tuner's among them, change no weight: real processes, real transports."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs.job import run_job

from .training import Weights

pytestmark = pytest.mark.timeout(120)

STEPS = 300


def train(out: Path, how: str, transport: str, environ: Mapping[str, str] = {}, steps: int = STEPS) -> tuple[list[Any], str]:
    """What each of two ranks saved, and what they said."""
    command = [sys.executable, "-m", "tests.plugins.torch.tuned_rank", how, str(steps), str(out)]
    code, _, err = run_job("-n", "2", "--transport", transport, "--", *command, environ=environ, timeout_seconds=100)
    assert code == 0, err
    return [torch.load(f"{out}.{rank}") for rank in range(2)], err


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    saved, _ = train(tmp_path_factory.mktemp("steady") / "w", "steady", "ps")
    return saved[0]["weights"]


def require_bits(saved: list[Any], expected: Weights) -> None:
    for rank, each in enumerate(saved):
        for name, weights in expected.items():
            assert torch.equal(each["weights"][name], weights), f"'{name}' of rank {rank}"


@pytest.mark.parametrize(("transport", "how"), [("ps", "changes"), ("gloo", "policies")])
def test_changes_while_training_change_no_weight(transport: str, how: str, steady: Weights, tmp_path: Path) -> None:
    """The sum of two has one order only, so that collectives too give the bits of the parameter server."""
    saved, _ = train(tmp_path / "w", how, transport)
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
    saved, err = train(tmp_path / "w", "steady", transport, environ)
    require_bits(saved, steady)
    assert "commsched: tuning: trial 0: partition" in err, err
    assert re.search(r"commsched: tuning: \d+ trials, .*kept\n$", err), err
    assert "Traceback" not in err
    assert saved[0]["configs"] > 1
