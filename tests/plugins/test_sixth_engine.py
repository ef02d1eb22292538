"""The plugin that docs/plugins.md writes holds what every plugin must."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from commsched.session.session import Session
from commsched.testing.check_plugin import check_plugin
from tests.jobs.job import ROOT

WIDTH, ROWS = 6, 5


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    """What the page's code defines."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "plugins.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    return names


def batch(rank: int, step: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, rank, step])
    return rng.standard_normal((ROWS, WIDTH)), rng.uniform(-1, 1, (ROWS, WIDTH))


class Adapter:
    tolerance = 1e-9

    def __init__(self, written: dict[str, Any]) -> None:
        self.engine, self.scheduled, self.descend = written["Engine"], written["Scheduled"], written["descend"]

    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Mapping[str, np.ndarray]:
        engine = self.engine(seed + rank)
        scheduled = self.scheduled(engine, 0.5, session)
        for step in range(steps):
            engine.train(*batch(rank, step, seed))
            scheduled.step()
        scheduled.synchronize()
        return {str(i): weight.copy() for i, weight in enumerate(engine.weights)}

    def train_alone(self, world_size: int, steps: int, seed: int) -> Mapping[str, np.ndarray]:
        engine = self.engine(seed)
        gradients: dict[int, np.ndarray] = {}
        engine.wrote = gradients.__setitem__
        for step in range(steps):
            batches = [batch(rank, step, seed) for rank in range(world_size)]
            engine.train(*(np.concatenate(part) for part in zip(*batches)))
            for i, weight in enumerate(engine.weights):
                self.descend(weight, gradients[i], 0.5)
        return {str(i): weight for i, weight in enumerate(engine.weights)}


def test_it_trains_as_one_process_does(written: dict[str, Any]) -> None:
    check_plugin(Adapter(written))


def test_without_its_gate_it_does_not(written: dict[str, Any]) -> None:
    class Ungated(written["Scheduled"]):
        def read(self, i: int) -> None:
            if i in self.outstanding:
                written["descend"](self.engine.weights[i], self.gradients[i], self.outstanding.pop(i))

    # Which of the two is found first depends on how far the average has come when a rank reads it.
    with pytest.raises(AssertionError, match=r"is not finite; memory was read|is not bitwise equal on rank 0"):
        check_plugin(Adapter({**written, "Scheduled": Ungated}), world_sizes=[2])
