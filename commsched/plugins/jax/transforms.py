"""Refuses, while they are traced, transformations under which a step's callbacks would not run exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.custom_batching import custom_vmap

from ...core.errors import UnsupportedError


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
