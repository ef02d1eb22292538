"""on_host: operations that call a Python method on the host."""

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
