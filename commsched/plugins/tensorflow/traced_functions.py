"""Settles variables in functions that were traced before the variables were guarded.

Such a function holds the handles of its variables, and does not read the Keras variables again. TensorFlow lets a function get
a captured value from a callable at each call. The callable that is set here settles the variable first.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

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
