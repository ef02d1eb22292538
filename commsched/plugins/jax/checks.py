"""Checks of a step's values while it is traced: their dtypes and forms, and the transformations that are applied to them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ...core.errors import UnsupportedError
from ...core.manifest import TensorSpec

_AVERAGED = ("float32", "float64", "float16", "bfloat16")


def specs_of(named: Sequence[tuple[str, Any]]) -> list[TensorSpec]:
    """The specifications of the leaves, in their order.

    Raises:
        UnsupportedError: there are no leaves, or one is not of a floating-point type that is averaged; names it.
    """
    if not named:
        raise UnsupportedError("there are no parameters")
    specs = []
    for name, leaf in named:
        try:
            dtype = jnp.result_type(leaf)
        except TypeError as error:
            raise UnsupportedError(f"'{name}' is a {type(leaf).__name__}, not an array") from error
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise UnsupportedError(
                f"'{name}' is of {dtype.name}, so it has no gradient; pass it to the loss beside the parameters"
            )
        if dtype.name not in _AVERAGED:
            raise UnsupportedError(f"'{name}' is of {dtype.name}; the JAX plugin averages {', '.join(_AVERAGED)}")
        specs.append(TensorSpec(name, tuple(jnp.shape(leaf)), dtype.name))
    return specs


def require_same_form(specs: Sequence[TensorSpec], named: Sequence[tuple[str, Any]]) -> None:
    """Require parameters of the form that the training began with.

    Raises:
        UnsupportedError: a name or shape is no longer the one in ``specs``, or a parameter has a dtype whose bits would be lost
            in the dtype in ``specs``; names the first such parameter.
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
                f"'{name}' has become {jnp.result_type(leaf)}, but cs.create() was given {dtype}, the type of its averages; "
                "begin anew with cs.create()"
            )


def _same(*values: Any) -> tuple[Any, ...]:
    return values


def _refuse_map(size: int, is_mapped: Any, *values: Any) -> NoReturn:
    raise UnsupportedError("a step within jax.vmap: each of its gradients would be submitted several times")


def _refuse_derivative(values: Any, tangents: Any) -> NoReturn:
    raise UnsupportedError("a step cannot be differentiated: its averages are those of all ranks")


_not_mapped = custom_vmap(_same)
_not_mapped.def_vmap(_refuse_map)
_plain = jax.custom_jvp(_not_mapped)
_plain.defjvp(_refuse_derivative)


def require_plain(values: Sequence[Any]) -> list[Any]:
    """Return ``values`` of a step in a form that refuses such transformations. Use the result in their place.

    Raises:
        UnsupportedError: the values are mapped, differentiated, or spread over several devices; or JAX is set to look for
            values that are not finite. For mapping and differentiation it may be raised later, where they are traced.
    """
    for option in ("jax_debug_nans", "jax_debug_infs"):
        if getattr(jax.config, option):
            raise UnsupportedError(
                f"{option} would run a step a second time when it finds one, without the averages; "
                "use it with one rank, or with COMMSCHED_DISABLE=1"
            )
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes:
        raise UnsupportedError(f"a step within pmap or shard_map (over {', '.join(axes)}): one rank is one device")
    return list(_plain(*values)) if values else []
