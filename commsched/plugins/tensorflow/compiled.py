"""Compiled functions, for threads that call them often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class Compiled:
    """``function``, traced. It takes tensors of ``signature`` and returns nothing.

    An eager call does the same as a call of a ``tf.function``, in a fifth of the time. The time is spent in Python.
    """

    def __init__(self, function: Callable[..., None], *signature: tf.TensorSpec) -> None:
        with tf.init_scope():
            self._function = tf.function(function, autograph=False).get_concrete_function(*signature)
        self._captures = list(self._function.captured_inputs)

    def __call__(self, *args: Any) -> None:
        tf.raw_ops.StatefulPartitionedCall(args=[*args, *self._captures], Tout=[], f=self._function)
