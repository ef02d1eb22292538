"""Functions that were traced before the variables that they use were guarded.

Such a function holds the handles of its variables, and asks no Keras variable for them again. TensorFlow lets a function take
what it has captured from a callable, each time it is called: from now on that settles the variable first.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

_searching = threading.Lock()


def settle_at_calls(uses: Iterable[tuple[tf.Variable, Callable[[], None]]]) -> None:
    """Have every traced function that there is settle each variable of ``uses`` that it uses before it runs, or where another
    function that is being traced calls it. What that raises, the call raises."""
    takes = {id(variable.handle): _taking(variable, settle) for variable, settle in uses}
    kinds = _kinds(tf.types.experimental.ConcreteFunction)
    for function in _instances(kinds):
        captures = getattr(function, "_captured_inputs", [])  # the public property has called the callables
        if any(id(capture) in takes for capture in captures):
            function.set_external_captures([takes.get(id(capture), capture) for capture in captures])


def thaw() -> None:
    """What was frozen, as programs do before they fork, could not be looked at. To freeze it again would freeze more."""
    gc.unfreeze()


def _instances(kinds: set[type]) -> list[Any]:
    # What TensorFlow's objects say they refer to, they make on the way, which may start a collection. That moves objects
    # between the very lists that are being gone through: the process then crashed.
    with _searching:
        collects = gc.isenabled()
        gc.disable()
        try:
            thaw()
            # Not gc.get_objects(), which holds all: another thread that is filling a tuple in C, with a shape say, then fails.
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
