"""Raises errors of callbacks by their own class, where the engine reduces them to text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from .exchange import take_failure


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
