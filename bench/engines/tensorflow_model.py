"""The model of all TensorFlow systems: the network of ``emulated.py`` as a Keras model.

Its layers sleep in an operation of TensorFlow's own, which needs no Python, so that other processes can run them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from .emulated import INITIAL, LEARNING_RATE, MOMENTUM, PHASE, Array, EmulatedLayer


def make_model(layers: Sequence[EmulatedLayer]) -> Any:
    number = keras.Input(batch_shape=(), dtype="float32")
    output = number
    for layer in layers:
        output = _Layer(layer)(output)
    return keras.Model(number, output)


def make_optimizer() -> Any:
    return keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)


class _Layer(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """A layer of ``emulated.py`` as a Keras layer."""

    def __init__(self, layer: EmulatedLayer) -> None:
        super().__init__(dtype="float32")
        self._layer = layer

    def build(self, _: Any) -> None:
        self.own = [
            self.add_weight(shape=pattern.shape, initializer=partial(_initial, pattern), name=f"w{place}")
            for place, pattern in enumerate(self._layer.patterns)
        ]

    def call(self, number: tf.Tensor) -> tf.Tensor:
        return _run(self._layer, number, [tf.convert_to_tensor(variable) for variable in self.own])


def _initial(pattern: Array, *_: Any, **__: Any) -> tf.Tensor:
    return tf.constant(INITIAL * pattern)


def _run(layer: EmulatedLayer, number: tf.Tensor, weights: Sequence[tf.Tensor]) -> tf.Tensor:
    gain = tf.constant(1.0)
    if weights:
        found = [tf.reshape(weight, [-1])[0] / first - INITIAL for weight, first in zip(weights, layer.firsts)]
        gain = tf.exp(layer.feedback * tf.sin(PHASE * tf.add_n(found) / len(found)))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def emulated(number: tf.Tensor, *weights: tf.Tensor) -> Any:
        result = _slept(number * gain, layer.forward_seconds)

        def backward(upstream: tf.Tensor) -> list[tf.Tensor]:
            with tf.control_dependencies([result]):  # the last layer's upstream is a constant
                upstream = _slept(upstream, layer.backward_seconds)
            return [upstream * gain, *(upstream * number * tf.constant(pattern) for pattern in layer.patterns)]

        return result, backward

    return emulated(number, *weights)


def _slept(number: tf.Tensor, seconds: float) -> tf.Tensor:
    """Return ``number`` after ``seconds`` during which no Python thread is needed. The number passes through a data set that
    sleeps."""
    of_one = {"output_types": [number.dtype], "output_shapes": [number.shape]}
    source = tf.raw_ops.TensorDataset(components=[number], output_shapes=[number.shape])
    slow = tf.raw_ops.SleepDataset(input_dataset=source, sleep_microseconds=round(1e6 * seconds), **of_one)
    once = tf.raw_ops.TakeDataset(input_dataset=slow, count=1, **of_one)  # asking for a second element would sleep again
    return tf.raw_ops.DatasetToSingleElement(dataset=once, **of_one)[0]
