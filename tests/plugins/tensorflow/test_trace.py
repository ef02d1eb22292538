"""The trace shows communication of one step beside the forward of the next."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

from commsched import Session
from commsched.plugins.tensorflow import ScheduledOptimizer
from commsched.session.trace import TraceObserver

from .test_order import train_holding_the_last_average
from .training import made, mlp, numbers, on_ranks, share, train

STEPS = 3


class Bar(NamedTuple):
    """Of the picture, in microseconds."""

    track: str
    name: str
    start: float
    stop: float
    step: int | None


def bars(path: Path) -> list[Bar]:
    events = json.loads(path.read_text())["traceEvents"]
    return [
        Bar(event["cat"], event["name"], event["ts"], event["ts"] + event["dur"], event["args"].get("step"))
        for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    ]


def trace(session: Session, directory: Path) -> None:
    session.observer = TraceObserver(directory, session.rank)
    session.observe(session.observer)


@pytest.mark.parametrize("way", ["graph", "eager"])
def test_communication_of_a_step_beside_the_forward_of_the_next(way: str, tmp_path: Path) -> None:
    """The last layer's average is held back until the next forward has run the first layer."""
    train_holding_the_last_average(way, STEPS, lambda session: trace(session, tmp_path))
    for rank in range(2):
        shown = bars(tmp_path / f"trace.rank{rank}.json")
        first, last = (
            [bar for bar in shown if bar.track == "forward" and bar.name.endswith(name)] for name in ("first", "last")
        )
        queue, reply = (
            [bar for bar in shown if bar.track == track and bar.name.endswith("last/kernel")] for track in ("queue", "reply")
        )
        assert [len(first), len(last), len(queue)] == [STEPS, STEPS, STEPS]
        assert [bar.step for bar in reply] == [bar.step for bar in queue] == list(range(STEPS))
        for step in range(1, STEPS):
            ready, done = queue[step - 1].start, reply[step - 1].stop
            assert ready < first[step].start < first[step].stop < done < last[step].stop
            assert first[step].stop <= last[step].start


def test_a_bar_of_backward_for_all_that_was_handed_over(tmp_path: Path) -> None:
    models = [made(mlp, 0) for _ in range(2)]

    def body(session: Session) -> None:
        trace(session, tmp_path)
        model = models[session.rank]
        optimizer = ScheduledOptimizer(keras.optimizers.SGD(0.1), model, session=session)
        train(model, optimizer, *share(session, *numbers(STEPS)), "graph")
        assert "call" in vars(model.layers[0])
        optimizer.detach()
        assert "call" not in vars(model.layers[0])

    on_ranks(body)
    backward = [bar for bar in bars(tmp_path / "trace.rank0.json") if bar.track == "backward"]
    names = sorted(["sequential/dense/kernel and 1 more", "sequential/dense_1/kernel and 1 more"])
    of_steps = [[bar.name for bar in backward[2 * step : 2 * step + 2]] for step in range(STEPS)]
    assert [sorted(shown) for shown in of_steps] == [names] * STEPS  # the order in a step is the executor's
    assert all(before.stop <= after.start for before, after in pairwise(backward))


def test_masks_pass_layers_that_are_watched(tmp_path: Path) -> None:
    """Keras notes them with tensors; a layer that has variables of its own takes them on to those within."""

    class Scaled(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.supports_masking = True
            self.within = keras.layers.GlobalAveragePooling1D()

        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(1,), initializer="ones")
            self.built = True

        def call(self, inputs: Any) -> Any:
            return self.within(inputs) * self.scale

    def make_model() -> Any:
        reshape, masking = keras.layers.Reshape((3, 2)), keras.layers.Masking(0.0)
        return keras.Sequential([keras.Input((6,)), reshape, masking, Scaled(), keras.layers.Dense(3)])

    inputs, targets = numbers(STEPS)
    inputs[:, :, 2:] = 0
    plain = train(made(make_model, 0), keras.optimizers.SGD(0.5), inputs, targets, "graph")
    models = [made(make_model, 0) for _ in range(2)]

    def body(session: Session) -> Any:
        trace(session, tmp_path)
        optimizer = ScheduledOptimizer(keras.optimizers.SGD(0.5), models[session.rank], session=session)
        return train(models[session.rank], optimizer, *share(session, inputs, targets), "graph")

    for ours, expected in zip(on_ranks(body)[0], plain):
        np.testing.assert_allclose(ours, expected, rtol=1e-9)


def test_without_a_trace_layers_are_left_alone() -> None:
    models = [made(mlp, 0) for _ in range(2)]

    def body(session: Session) -> None:
        ScheduledOptimizer(keras.optimizers.SGD(0.1), models[session.rank], session=session)
        assert not any("call" in vars(layer) for layer in models[session.rank].layers)

    on_ranks(body)
