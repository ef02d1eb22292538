"""Guarded variables: the Keras variable itself is the dependency proxy.

A guarded variable's object has a class whose ``value``, through which Keras and TensorFlow read it wherever they do, first
settles what is outstanding. Eagerly that waits; while a graph is traced it adds operations that will wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import tensorflow as tf

#: A guarded variable's attribute: its own class, and what settles it. Held by nothing else, so that a model can be collected.
_ATTRIBUTE = "_commsched_guard"
_local = threading.local()


def guard(variable: Any, settle: Callable[[], None]) -> None:
    """From now on whoever reads or assigns the Keras ``variable`` calls ``settle`` first, until :func:`release`."""
    own: type = type(variable)
    setattr(variable, _ATTRIBUTE, (own, settle))
    variable.__class__ = _guarded_class(own)


def release(variable: Any) -> None:
    """Give ``variable`` its own class back. No-op when it is not guarded."""
    known = getattr(variable, _ATTRIBUTE, None)
    if known is not None:
        variable.__class__ = known[0]
        delattr(variable, _ATTRIBUTE)


def is_guarded(variable: Any) -> bool:
    return hasattr(variable, _ATTRIBUTE)


@contextmanager
def unguarded() -> Iterator[None]:
    """Within, this thread takes variables as they are."""
    before = getattr(_local, "passes", False)
    _local.passes = True
    try:
        yield
    finally:
        _local.passes = before


def own_value(variable: Any) -> tf.Variable:
    """The variable of TensorFlow beneath that of Keras."""
    with unguarded():
        return variable.value


def settle(variable: Any) -> None:
    """What whoever reads or assigns ``variable`` calls. No-op when it is not guarded."""
    known = getattr(variable, _ATTRIBUTE, None)
    if known is not None and not getattr(_local, "passes", False):
        known[1]()


@cache
def _guarded_class(own: type) -> type:
    """Its methods do not ask for their class: another thread may release the variable while they settle it."""

    class Guarded(own):  # type: ignore[misc]
        __module__ = own.__module__

        @property
        def value(self) -> Any:
            settle(self)
            return own.value.fget(self)  # type: ignore[attr-defined]

        def assign(self, value: Any) -> Any:
            settle(self)
            return own.assign(self, value)  # type: ignore[attr-defined]

        def __deepcopy__(self, memo: Any) -> Any:
            with tf.init_scope():
                return own(self.numpy(), dtype=self.dtype, trainable=self.trainable, name=self.name)

    Guarded.__name__ = Guarded.__qualname__ = own.__name__
    return Guarded
