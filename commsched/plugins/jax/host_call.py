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

#: A round's number, or a zero whose value the compiler does not know. An operation that needs it runs after the call.
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def host_call(function: Callable[..., None], results: Sequence[jax.ShapeDtypeStruct], *operands: Any) -> Sequence[Any]:
    """Have the program call ``function(*results, *operands)``, which writes ``results``; return them.

    The program makes the call once each time it gets there. Outside a program the call is made at once.

    The function gets numpy arrays that are the program's own memory. Results are uninitialized, operands must not be written
    to, and no array may be kept. ``io_callback`` would copy all arrays, at ten times the cost of the call.
    """
    if not any(isinstance(operand, jax.core.Tracer) for operand in operands):
        # Otherwise JAX would compile a program for this call alone, and keep it.
        made = [np.empty(result.shape, result.dtype) for result in results]
        function(*made, *map(np.asarray, operands))
        return [jax.device_put(result) for result in made]
    called: Sequence[Any] = buffer_callback(partial(_call, function), list(results), has_side_effect=True)(*operands)
    return called


def _call(function: Callable[..., None], _: Any, results: Sequence[Any], *operands: Any) -> None:
    try:
        function(*map(np.asarray, results), *map(np.asarray, operands))
    except BaseException as error:
        # The error is kept, and with it the frames below. Their arrays may be shown later (for example by
        # pytest --showlocals), when the program's memory is freed.
        traceback.clear_frames(error.__traceback__)
        raise
