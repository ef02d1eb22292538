"""on_host: operations that call a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import tensorflow as tf

from ...core.errors import ClosedError


def on_host(
    method: Callable[..., Any], inputs: Sequence[Any], types: Sequence[tf.DType] = (), *, first: tuple[Any, ...] = ()
) -> Any:
    """``method(*first, *inputs)`` with NumPy's arrays, as an operation that returns what it returns, of ``types``.

    TensorFlow keeps what an operation calls until the process ends: so not the object that ``method`` is of, with its model.

    Raises:
        ClosedError: when it runs and the object is no more, as TensorFlow's ``UnknownError``.
    """
    known = WeakMethod(method)

    def call(*arrays: Any) -> Any:
        alive = known()
        if alive is None:
            raise ClosedError("the ScheduledOptimizer that this function was traced with is no more")
        return alive(*first, *arrays)

    return tf.numpy_function(call, list(inputs), list(types))
