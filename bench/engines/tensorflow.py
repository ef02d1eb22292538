"""TensorFlow: through commsched's plugin, with its own synchronous ``MultiWorkerMirroredStrategy``, and with its own
asynchronous ``ParameterServerStrategy``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from commsched.plugins.tensorflow import ScheduledOptimizer

from .emulated import batch_number, coefficients, make_layers
from .parameter_server import by_parameter_server_strategy
from .tensorflow_model import make_model, make_optimizer
from .turn import Train, Turn, free_addresses


def through_commsched(turn: Turn) -> Sequence[float]:
    layers = make_layers(turn.profile)
    model = make_model(layers)
    optimizer = ScheduledOptimizer(make_optimizer(), model, session=turn.session)

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model(batch)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    _train(turn, step)
    return coefficients(layers, model.get_weights())


def by_multi_worker_mirrored_strategy(turn: Turn) -> Sequence[float]:
    session, layers = turn.session, make_layers(turn.profile)
    workers = free_addresses(turn)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": session.rank}})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model(layers)
        optimizer = make_optimizer()
        optimizer.build(model.trainable_variables)

    def on_worker(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model(batch)
            share = loss / session.world_size  # Keras's optimizer sums the workers' gradients
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(share, variables), variables)
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: tf.Tensor) -> Any:
        return strategy.run(on_worker, args=(batch,))

    _train(turn, step)
    found = coefficients(layers, model.get_weights())
    session.gather("all have trained")  # before any of their servers ends
    return found


def _train(turn: Turn, step: Callable[[tf.Tensor], Any]) -> None:
    for index in range(turn.count):
        np.asarray(step(tf.constant(batch_number(index, turn.session.rank), tf.float32)))
        turn.steps.over()


SYSTEMS: Mapping[str, Train] = {
    "commsched": through_commsched,
    "multi_worker_mirrored": by_multi_worker_mirrored_strategy,
    "parameter_server": by_parameter_server_strategy,
}
