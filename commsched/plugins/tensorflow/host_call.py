"""Calls between graphs and Python: of methods on the host, and of compiled functions by threads that call them often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import tensorflow as tf

from ...core.errors import ClosedError


def on_host(
    method: Callable[..., Any], inputs: Sequence[Any], types: Sequence[tf.DType] = (), *, first: tuple[Any, ...] = ()
) -> Any:
    """Add an operation that calls ``method(*first, *inputs)`` with NumPy arrays, and returns its results, of ``types``.

    TensorFlow keeps an operation's Python function until the process ends. So the function refers only weakly to the object of
    ``method``, which holds the model.

    Raises:
        ClosedError: the operation runs after the object is gone. TensorFlow raises it as its ``UnknownError``.
    """
    known = WeakMethod(method)

    def call(*arrays: Any) -> Any:
        alive = known()
        if alive is None:
            raise ClosedError("the ScheduledOptimizer that this function was traced with no longer exists")
        return alive(*first, *arrays)

    return tf.numpy_function(call, list(inputs), list(types))


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
