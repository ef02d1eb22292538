"""The TensorFlow plugin under the public conformance suite."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from commsched import Session
from commsched.plugins.tensorflow import ScheduledOptimizer
from commsched.plugins.tensorflow.gate import Gate
from commsched.testing import check_plugin
from commsched.testing.check_plugin import Weights

from .training import mlp, numbers, share, train


class Adapter:
    tolerance = 1e-9

    def __init__(self, way: str) -> None:
        self.way = way
        self._alone: dict[tuple[int, int, int], Weights] = {}

    def _train(self, model: Any, optimizer: Any, *data: Any) -> Weights:
        weights = train(model, optimizer, *data, self.way)
        return {f"{index} {weight.name}": array for index, (weight, array) in enumerate(zip(model.weights, weights))}

    def _model(self, seed: int) -> Any:
        rng = np.random.default_rng(seed)  # Keras draws random numbers for the whole process, and ranks are threads
        model = mlp()
        model.set_weights([rng.standard_normal(weights.shape) / 2 for weights in model.get_weights()])
        return model

    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        model = self._model(seed + rank)
        optimizer = ScheduledOptimizer(keras.optimizers.Adam(0.01), model, session=session)
        return self._train(model, optimizer, *share(session, *numbers(steps, world_size, seed)))

    def train_alone(self, world_size: int, steps: int, seed: int) -> Weights:
        asked = world_size, steps, seed
        if asked not in self._alone:  # for each configuration
            self._alone[asked] = self._train(self._model(seed), keras.optimizers.Adam(0.01), *numbers(steps, world_size, seed))
        return self._alone[asked]


@pytest.mark.parametrize("way", ["graph", "eager"])
def test_check_plugin(way: str) -> None:
    check_plugin(Adapter(way), steps=4, world_sizes=(1, 2) if way == "graph" else (4,))


@pytest.mark.parametrize("way", ["graph", "eager"])
def test_check_plugin_sees_a_gate_that_is_missing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "settle", lambda self: None)
    with pytest.raises(AssertionError, match=r"differs from training alone|is not bitwise equal"):
        check_plugin(Adapter(way), steps=4, world_sizes=(2,), most_delay_seconds=0.02)
