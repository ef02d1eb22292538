"""TensorFlow: through commsched's plugin, and with ``MultiWorkerMirroredStrategy``, its own synchronous way.

EMULATED layers: an operation on the host sleeps for the layer's time, and what comes after it depends on it. Their gradients
are real float32 tensors: one number, which depends on the weights that forward read, in every element, so that a stale weight
changes all that follows. ``ParameterServerStrategy`` is not here: it trains asynchronously, to weights of its own.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commsched.plugins.tensorflow import ScheduledOptimizer
from commsched.simulator.profile import Layer, Profile

from .turn import Train, Trained, Turn

_INITIAL = 0.1
_LEARNING_RATE = 0.01
#: All layers together change what passes through them by at most a factor of exp(+-_FEEDBACK): nothing runs away.
_FEEDBACK = 1.5
#: Radians of a gain's phase for each unit that weights have moved: a single step counts.
_PHASE = 16.0


class EmulatedLayer(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Multiplies a number by one near 1 that depends on its weights; every element of a gradient is what flows back times what
    came in."""

    def __init__(self, layer: Layer, feedback: float) -> None:
        super().__init__(name=layer.name.replace("/", "_"), dtype="float32")
        self._layer = layer
        self._feedback = feedback

    def build(self, _: Any) -> None:
        initial = keras.initializers.Constant(_INITIAL)
        self.own = [
            self.add_weight(shape=shape, initializer=initial, name=f"w{i}") for i, shape in enumerate(self._layer.shapes)
        ]

    def call(self, number: tf.Tensor) -> tf.Tensor:
        weights = [tf.convert_to_tensor(variable) for variable in self.own]
        firsts = [tf.reshape(weight, [-1])[0] for weight in weights]
        moved = tf.add_n(firsts) / len(firsts) - _INITIAL if firsts else tf.zeros(())
        gain = tf.exp(self._feedback * tf.sin(_PHASE * moved))

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def layer(number: tf.Tensor, *weights: tf.Tensor) -> Any:
            def backward(upstream: tf.Tensor) -> list[tf.Tensor]:
                upstream = _slept(upstream, self._layer.backward_seconds)
                # For the first element alone the gain's own derivative would be right; this is made up, and the same for all.
                return [upstream * gain, *(tf.fill(tf.shape(weight), upstream * number) for weight in weights)]

            return _slept(number * gain, self._layer.forward_seconds), backward

        return layer(number, *weights)


def _slept(number: tf.Tensor, seconds: float) -> tf.Tensor:
    """``number``, after ``seconds`` in which the device is busy, as is this operation's thread, but not Python."""

    def sleep(value: Any) -> Any:
        time.sleep(seconds)
        return value

    return tf.ensure_shape(tf.numpy_function(sleep, [number], tf.float32), [])


def through_commsched(turn: Turn) -> Trained:
    model = _model(turn.profile)
    optimizer = ScheduledOptimizer(keras.optimizers.SGD(_LEARNING_RATE), model, session=turn.session)

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model(batch)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return _train(turn, step, model)


def by_multi_worker_mirrored_strategy(turn: Turn) -> Trained:
    session = turn.session
    ports = session.gather(_free_port(turn.hosts[session.rank]))
    workers = [f"{host}:{port}" for host, port in zip(turn.hosts, ports)]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": session.rank}})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = _model(turn.profile)
        optimizer = keras.optimizers.SGD(_LEARNING_RATE)
        optimizer.build(model.trainable_variables)

    def on_worker(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model(batch)
            share = loss / session.world_size  # Keras's optimizer adds up what the workers have
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(share, variables), variables)
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: tf.Tensor) -> Any:
        return strategy.run(on_worker, args=(batch,))

    trained = _train(turn, step, model)
    session.gather("all have trained")  # before any of their servers ends
    return trained


def _model(profile: Profile) -> Any:
    number = keras.Input(batch_shape=(), dtype="float32")
    output = number
    for index, layer in enumerate(profile.layers):
        feedback = (1, 1, -1)[index % 3] * _FEEDBACK / len(profile.layers)
        output = EmulatedLayer(layer, feedback)(output)
    return keras.Model(number, output)


def _train(turn: Turn, step: Callable[[tf.Tensor], Any], model: Any) -> Trained:
    ended = []
    for index in range(turn.steps):
        np.asarray(step(tf.constant(_batch(index, turn.session.rank), tf.float32)))
        ended.append(time.monotonic())
    return Trained(ended, _means(model, turn.profile))


def _batch(step: int, rank: int) -> float:
    """It changes sign over steps, so that weights stay bounded, and no rank's is the average."""
    return (1 + 0.5 * math.cos(2.9 * rank + 0.3 * step)) * math.cos(1.7 * step)


def _means(model: Any, profile: Profile) -> Sequence[float]:
    """Of each layer that has weights."""
    weights = iter(model.get_weights())
    means = []
    for layer in profile.layers:
        own = [next(weights) for _ in layer.shapes]
        if own:
            means.append(sum(float(each.sum(dtype=np.float64)) for each in own) / sum(each.size for each in own))
    return means


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
    return port


SYSTEMS: Mapping[str, Train] = {
    "commsched": through_commsched,
    "multi_worker_mirrored": by_multi_worker_mirrored_strategy,
}
