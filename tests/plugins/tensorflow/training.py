"""The same small training with and without commsched, to be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from numpy.typing import NDArray

from commsched import SchedulerConfig, Session
from commsched.core.interfaces import Transport
from commsched.plugins.tensorflow import ScheduledOptimizer
from commsched.session.local import local_sessions
from commsched.testing.check_plugin import Delayed
from commsched.testing.world import run_world

STEPS = 5
ROWS = 3  # per rank and step
RANKS = 2
SMALL = SchedulerConfig(partition_bytes=600, credit_bytes=1200)  # so that tensors are split, merged and queued

Weights = list[NDArray[Any]]
MakeModel = Callable[[], Any]
MakeOptimizer = Callable[[], Any]


def mlp() -> Any:
    return keras.Sequential([keras.Input((6,)), layers.Dense(10, activation="tanh"), layers.Dense(3)])


def one_layer() -> Any:
    return keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="tanh")])


def numbers(steps: int = STEPS, ranks: int = RANKS, seed: int = 7) -> tuple[NDArray[Any], NDArray[Any]]:
    """Inputs and targets, [steps, ranks * ROWS, ...]."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((steps, ranks * ROWS, 6)), rng.standard_normal((steps, ranks * ROWS, 3))


def made(make_model: MakeModel, seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    return make_model()


def step_of(model: Any, optimizer: Any, compiled: bool) -> Callable[[Any, Any], Any]:
    """A user's own training step."""

    def step(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return tf.function(step) if compiled else step


def train(model: Any, optimizer: Any, inputs: NDArray[Any], targets: NDArray[Any], way: str, **compile_with: Any) -> Weights:
    """By ``way``: a step of one's own, ``eager`` or in a ``graph``, or Keras's ``fit``."""
    if way == "fit":
        model.compile(optimizer, **{"loss": "mse", **compile_with})
        model.fit(tf.data.Dataset.from_tensor_slices((inputs, targets)), shuffle=False, verbose=0)
    else:
        step = step_of(model, optimizer, way == "graph")
        for batch, target in zip(inputs, targets):
            step(batch, target)
    return [np.array(weights) for weights in model.get_weights()]


def delayed(transport: Transport) -> Transport:
    return Delayed(transport, transport.rank, 0.002)


def on_ranks(
    body: Callable[[Session], Any],
    *,
    ranks: int = RANKS,
    wrap: Callable[[Transport], Transport] | None = delayed,
    config: SchedulerConfig = SMALL,
    timeout_seconds: float = 300.0,
    check_weights: int = 2,
) -> list[Any]:
    """``body`` on every rank, a thread, in a session of its own."""
    sessions = local_sessions(ranks, config, wrap_transport=wrap, check_weights=check_weights)

    def run(rank: int) -> Any:
        with sessions[rank] as session:
            return body(session)

    try:
        return run_world(ranks, run, timeout_seconds=timeout_seconds)
    finally:
        for session in sessions:
            session.abort("the test is over")


def share(session: Session, *arrays: NDArray[Any]) -> Sequence[NDArray[Any]]:
    rows = slice(session.rank * ROWS, (session.rank + 1) * ROWS)
    return [array[:, rows] for array in arrays]


def require_same_as_alone(
    make_model: MakeModel,
    make_optimizer: MakeOptimizer,
    way: str,
    *,
    data: tuple[NDArray[Any], NDArray[Any]] | None = None,
    tolerance: float = 1e-9,
    alone: MakeOptimizer | None = None,
    **compile_with: Any,
) -> None:
    """Ranks, which begin with different weights, train what one process trains with the joint batch."""
    inputs, targets = data or numbers()
    expected = train(made(make_model, 0), (alone or make_optimizer)(), inputs, targets, way, **compile_with)
    models = [made(make_model, rank) for rank in range(RANKS)]

    def body(session: Session) -> Weights:
        model = models[session.rank]
        optimizer = ScheduledOptimizer(make_optimizer(), model, session=session)
        return train(model, optimizer, *share(session, inputs, targets), way, **compile_with)

    by_rank = on_ranks(body)
    for path, ours, others, plain in zip([w.path for w in models[0].weights], *by_rank, expected, strict=True):
        assert ours.tobytes() == others.tobytes(), f"{path} differs between ranks"
        difference = np.abs(ours - plain).max() / max(np.abs(plain).max(), 1e-30)
        assert difference <= tolerance, f"{path} differs from plain training by {difference:.2e} of its largest"
