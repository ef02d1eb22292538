"""Calls of Python from within a compiled program, and their errors, which the engine reduces to text."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from .exchange import take_failure
from .memory import arrays_of

#: A round's number, or a zero whose value the compiler does not know. An operation that needs it runs after the call.
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def host_call(function: Callable[..., None], results: Sequence[jax.ShapeDtypeStruct], *operands: Any) -> Sequence[Any]:
    """Have the program call ``function(*results, *operands)``, which writes ``results``; return them.

    The program makes the call once each time it gets there. Outside a program the call is made at once.

    The function gets numpy arrays that are the program's own memory, or ``DeviceArray`` if the program runs on a GPU. Results
    are uninitialized, operands must not be written to, and no array may be kept. ``io_callback`` would copy all arrays, at ten
    times the cost of the call.
    """
    if not any(isinstance(operand, jax.core.Tracer) for operand in operands):
        # Otherwise JAX would compile a program for this call alone, and keep it.
        made = [np.empty(result.shape, result.dtype) for result in results]
        function(*made, *map(np.asarray, operands))
        return [jax.device_put(result) for result in made]
    called: Sequence[Any] = buffer_callback(partial(_call, function), list(results), has_side_effect=True)(*operands)
    return called


def _call(function: Callable[..., None], context: Any, results: Sequence[Any], *operands: Any) -> None:
    try:
        function(*arrays_of(context, [*results, *operands]))
    except BaseException as error:
        # The error is kept, and with it the frames below. Their arrays may be shown later (for example by
        # pytest --showlocals), when the program's memory is freed.
        traceback.clear_frames(error.__traceback__)
        raise


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Like ``jax.jit``, but an error of commsched within it is raised by its own class, such as ``PeerLost``, from JAX's error.

    With ``jax.jit`` itself the error is a ``JaxRuntimeError`` whose text ends with the class and message of the commsched
    error. ``cs.jit`` raises that too if the call has returned before its program ends: then reading one of the program's
    values raises it.
    """
    if function is None:
        return functools.partial(jit, **options)
    compiled = jax.jit(function, **options)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with named_errors():
            return compiled(*arguments, **keywords)

    for name in ("clear_cache", "eval_shape", "lower", "trace"):
        setattr(call, name, getattr(compiled, name))
    return call


@contextmanager
def named_errors() -> Iterator[None]:
    """Raise a callback's own error in place of the engine's ``JaxRuntimeError``."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (failure := take_failure(str(error))) is not None:
            raise failure from error
        raise
