"""Errors of callbacks by their own class: the engine makes one text of whatever they raise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from .exchange import take_failure


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """As ``jax.jit``, but an error of commsched within it is raised by its own class, such as ``PeerLost``, from JAX's.

    With ``jax.jit`` itself it is a ``JaxRuntimeError`` whose text ends with class and message of the error. So it is here too
    if the call has returned before its program is over: then whoever reads a value of it gets the error.
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
    """What a callback raised is raised in place of what the engine made of it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (failure := take_failure(str(error))) is not None:
            raise failure from error
        raise
