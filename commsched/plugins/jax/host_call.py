"""Calls of Python from within a compiled program."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

#: The number of a round, or a zero of which the compiler does not know: whatever needs it comes after the call.
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def host_call(function: Callable[..., None], results: Sequence[jax.ShapeDtypeStruct], *operands: Any) -> Sequence[Any]:
    """``results``, into which the program has ``function(*results, *operands)`` write, once each time it comes by; outside of
    programs, at once.

    The function gets numpy arrays that are the program's own memory: results hold anything before, operands are not to be
    written to, and none may be kept. ``io_callback`` would copy them all, at ten times the cost of the call.
    """
    if not any(isinstance(operand, jax.core.Tracer) for operand in operands):
        # JAX would compile a program for this call alone, and keep it.
        made = [np.empty(result.shape, result.dtype) for result in results]
        function(*made, *map(np.asarray, operands))
        return [jnp.asarray(result) for result in made]
    called: Sequence[Any] = buffer_callback(partial(_call, function), list(results), has_side_effect=True)(*operands)
    return called


def _call(function: Callable[..., None], _: Any, results: Sequence[Any], *operands: Any) -> None:
    try:
        function(*map(np.asarray, results), *map(np.asarray, operands))
    except BaseException as error:
        # The error is kept, and the frames below with it, whose arrays may be shown later (by pytest --showlocals, say), when
        # the program's memory is no more.
        traceback.clear_frames(error.__traceback__)
        raise
