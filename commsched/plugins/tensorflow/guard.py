"""Guarded variables: the Keras variable itself is the dependency proxy.

A guarded variable's object gets a class whose ``value`` first settles the variable's outstanding update. Keras and TensorFlow
read a variable through ``value``, except for its ``repr``. To settle eagerly is to wait. While a graph is traced, settling adds
operations that will wait.

Functions that were traced before the variables were guarded hold the handles of their variables, and do not read the Keras
variables again. TensorFlow lets a function get a captured value from a callable at each call. The callable that is set here
settles the variable first.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import tensorflow as tf

from ...core.errors import CommschedError

#: The attribute of a guarded variable that holds its own class and its callbacks. Nothing else holds them, so that a model can
#: be collected.
_ATTRIBUTE = "_commsched_guard"
_local = threading.local()


def guard(variable: Any, settle: Callable[[], None], assigned: Callable[[], None]) -> None:
    """Guard the Keras ``variable`` until :func:`release`: a read or an assignment calls ``settle`` first, and an eager
    assignment calls ``assigned`` afterwards."""
    own: type = type(variable)
    setattr(variable, _ATTRIBUTE, (own, settle, assigned))
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
    """A context in which this thread reads and assigns guarded variables without settling them."""
    before = getattr(_local, "passes", False)
    _local.passes = True
    try:
        yield
    finally:
        _local.passes = before


def own_value(variable: Any) -> tf.Variable:
    """The TensorFlow variable of a Keras variable."""
    with unguarded():
        return variable.value


def settle(variable: Any) -> None:
    """Settle ``variable`` before it is read or assigned. No-op when it is not guarded."""
    known = getattr(variable, _ATTRIBUTE, None)
    if known is not None and not getattr(_local, "passes", False):
        known[1]()


def _assigned(variable: Any) -> None:
    known = getattr(variable, _ATTRIBUTE, None)
    if known is not None and not getattr(_local, "passes", False) and tf.executing_eagerly():
        known[2]()


@cache
def _guarded_class(own: type) -> type:
    """The guarded subclass of ``own``. Its methods do not look up the object's class, because another thread may release the
    variable while they settle it."""

    class Guarded(own):  # type: ignore[misc]
        __module__ = own.__module__

        @property
        def value(self) -> Any:
            settle(self)
            return own.value.fget(self)  # type: ignore[attr-defined]

        def assign(self, value: Any) -> Any:
            settle(self)
            result = own.assign(self, value)  # type: ignore[attr-defined]
            _assigned(self)
            return result

        def __repr__(self) -> str:  # Keras reads the value otherwise than through ``value`` here
            try:
                if tf.executing_eagerly():
                    settle(self)
            except CommschedError:  # a message of that error, or of another one, may show the variable
                return f"<Variable path={self.path}, shape={self.shape}, dtype={self.dtype}, not updated>"
            return own.__repr__(self)  # type: ignore[call-arg]

        def __deepcopy__(self, memo: Any) -> Any:
            with tf.init_scope():
                return own(self.numpy(), dtype=self.dtype, trainable=self.trainable, name=self.name)

    Guarded.__name__ = Guarded.__qualname__ = own.__name__
    return Guarded


_searching = threading.Lock()


def settle_at_calls(uses: Iterable[tuple[tf.Variable, Callable[[], None]]]) -> None:
    """Make every existing traced function settle the variables of ``uses`` that it uses. It settles them before it runs, or
    where another function that is being traced calls it. An error from settling is raised by the call."""
    takes = {id(variable.handle): _taking(variable, settle) for variable, settle in uses}
    kinds = _kinds(tf.types.experimental.ConcreteFunction)
    for function in _instances(kinds):
        captures = getattr(function, "_captured_inputs", [])  # the public property would call the callables
        if any(id(capture) in takes for capture in captures):
            function.set_external_captures([takes.get(id(capture), capture) for capture in captures])


def unfreeze_objects() -> None:
    """Unfreeze all objects of Python's garbage collector.

    Programs freeze objects before they fork, and frozen objects could not be searched. They are not frozen again, since that
    would freeze more objects.
    """
    gc.unfreeze()


def _instances(kinds: set[type]) -> list[Any]:
    # TensorFlow's objects create objects while they report their references, which may start a garbage collection. A collection
    # moves objects between the lists that the search goes through, which crashed the process.
    with _searching:
        collects = gc.isenabled()
        gc.disable()
        try:
            unfreeze_objects()
            # Not gc.get_objects(), whose result refers to every object: another thread that is filling a tuple in C, such as a
            # shape, would then fail.
            return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]
        finally:
            if collects:
                gc.enable()


def _kinds(base: type) -> set[type]:
    """``base`` and all classes below it."""
    return {base}.union(*map(_kinds, base.__subclasses__()))


def _taking(variable: tf.Variable, settle: Callable[[], None]) -> Callable[[], Any]:
    def take() -> Any:
        settle()
        return variable.handle

    return take
