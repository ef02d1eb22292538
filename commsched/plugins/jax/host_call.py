"""Calls of Python from within a compiled program."""

from __future__ import annotations

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
    """``results``, into which the program has ``function(*results, *operands)`` write, once each time it comes by.

    The function gets numpy arrays that are the program's own memory: results hold anything before, operands are not to be
    written to, and none may be kept. ``io_callback`` would copy them all, at ten times the cost of the call.
    """
    called: Sequence[Any] = buffer_callback(partial(_call, function), list(results), has_side_effect=True)(*operands)
    return called


def _call(function: Callable[..., None], _: Any, results: Sequence[Any], *operands: Any) -> None:
    function(*map(np.asarray, results), *map(np.asarray, operands))
