"""Errors of callbacks by their own class: the engine makes one text of whatever they raise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from .exchange import take_failure


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """As ``jax.jit``, but an error of commsched within it is raised by its own class, such as ``PeerLost``, from JAX's.

    With ``jax.jit`` itself it is a ``JaxRuntimeError`` whose text ends with class and message of the error.
    """
    compiled = jax.jit(function, **options)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return compiled(*arguments, **keywords)
        except jax.errors.JaxRuntimeError as error:
            if (failure := take_failure(str(error))) is not None:
                raise failure from error
            raise

    for name in ("clear_cache", "eval_shape", "lower", "trace"):
        setattr(call, name, getattr(compiled, name))
    return call
