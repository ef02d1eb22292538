"""What is averaged: the floating-point leaves of a pytree, as the core knows tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import jax.numpy as jnp

from ...core.errors import UnsupportedError
from ...core.manifest import TensorSpec


def specs_of(named: Sequence[tuple[str, Any]]) -> list[TensorSpec]:
    """
    Raises:
        UnsupportedError: there is none, or one is not of a floating-point type that can be averaged; names it.
    """
    if not named:
        raise UnsupportedError("there are no parameters")
    specs = []
    for name, leaf in named:
        try:
            spec = TensorSpec(name, tuple(jnp.shape(leaf)), str(jnp.result_type(leaf).name))
        except TypeError as error:
            raise UnsupportedError(f"'{name}' is a {type(leaf).__name__}, not an array") from error
        if spec.dtype == "uint8":
            raise UnsupportedError(
                f"'{spec.name}' is of uint8, so it has no gradient; pass it to the loss beside the parameters"
            )
        specs.append(spec)
    return specs


def require_same_form(specs: Sequence[TensorSpec], named: Sequence[tuple[str, Any]]) -> None:
    """
    Raises:
        UnsupportedError: parameters are no longer those of ``specs``, or of dtypes to which theirs would lose bits; names the
            first.
    """
    for spec, other in zip_longest(specs, named):
        before = "nothing more" if spec is None else f"'{spec.name}' {list(spec.shape)}"
        now = "nothing more" if other is None else f"'{other[0]}' {list(jnp.shape(other[1]))}"
        if before != now:
            raise UnsupportedError(f"the state has {now} where cs.create() was given {before}; begin anew with cs.create()")
    for spec, (name, leaf) in zip(specs, named):
        dtype = jnp.dtype(spec.dtype)
        if jnp.result_type(dtype, leaf) != dtype:
            raise UnsupportedError(
                f"'{name}' has become {jnp.result_type(leaf)}, but cs.create() was given {dtype}, and so its averages are; "
                "begin anew with cs.create()"
            )
