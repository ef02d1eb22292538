"""The leaves of a step's pytrees: their names, the checks of their dtypes and forms while the step is traced, and the values of
rank 0, with which all ranks begin."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from numpy.typing import NDArray

import commsched

from ...core.comparison import require_same
from ...core.errors import UnsupportedError
from ...core.manifest import TensorSpec
from ..common.collectives import broadcast_arrays, format_spec
from .memory import place_of, session_for


def named_leaves(tree: Any, what: str = "") -> list[tuple[str, Any]]:
    """The leaves of a pytree, each with ``what`` and its path as its name: ``Dense_0.kernel``."""
    return [
        (what + jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def broadcast(tree: Any, session: commsched.Session | None = None) -> Any:
    """``tree``, a pytree of arrays, with rank 0's values, bit for bit. Collective; do not call it within ``jit``.

    Args:
        session: a session other than the one that ``commsched.init()`` returns.

    Raises:
        UnsupportedError: a leaf is not an array, or not on a single CPU or CUDA device; names it.
        ManifestMismatch: ranks have other leaves, shapes or dtypes; names the first.
        CommschedError: from ``commsched.init()``, or the session failed.
    """
    session = session_for(named_leaves(tree)) if session is None else session
    if session.world_size == 1:
        return tree
    return broadcast_all(session, {"": tree})[0]


def broadcast_all(session: commsched.Session, trees: dict[str, Any]) -> list[Any]:
    """Broadcast several trees as :func:`broadcast` does. The keys of ``trees`` are prefixes of their leaves' names."""
    named = [pair for what, tree in trees.items() for pair in named_leaves(tree, what)]
    arrays = [_array(name, leaf) for name, leaf in named]
    records = session.gather([[name, list(array.shape), array.dtype.name] for (name, _), array in zip(named, arrays)])
    require_same(records, lambda different: f"there is {different.text(format_spec)}")
    received = broadcast_arrays(session, "initial values", arrays)
    leaves = iter(_like(leaf, array) for (_, leaf), array in zip(named, received))
    return [jax.tree.map(lambda _: next(leaves), tree) for tree in trees.values()]


def require_equal_values(session: commsched.Session, named: Sequence[tuple[str, Any]], advice: str) -> None:
    """Require equal leaves on all ranks. Collective. Raises ManifestMismatch if ranks have different leaves or values; the
    error names the first."""
    digests = [[name, hashlib.sha256(_array(name, leaf).tobytes()).hexdigest()] for name, leaf in named]
    require_same(
        session.gather(digests),
        lambda different: (
            f"'{(different.on_rank_0 or different.there)[0]}' differs between rank 0 and rank {different.rank}; {advice}"
        ),
    )


def require_concrete(named: Sequence[tuple[str, Any]], call: str) -> None:
    """Require leaves that are not traced. Raises UnsupportedError if a leaf is traced, so ``call`` is within ``jit`` or a
    similar transformation."""
    for name, leaf in named:
        if isinstance(leaf, jax.core.Tracer):
            raise UnsupportedError(
                f"'{name}' is traced: {call} needs all ranks, so call it outside jit, eval_shape and the like"
            )


def _array(name: str, leaf: Any) -> NDArray[Any]:
    """A leaf's values as a contiguous array."""
    require_concrete([(name, leaf)], "this")
    if isinstance(leaf, jax.Array):
        place_of([(name, leaf)])
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
    array = np.ascontiguousarray(leaf).reshape(np.shape(leaf))
    if array.dtype.hasobject or array.dtype.kind in "SU":
        raise UnsupportedError(f"'{name}' is a {type(leaf).__name__}, not an array")
    return array


def _like(leaf: Any, array: NDArray[Any]) -> Any:
    """``array`` in the form of ``leaf``: on its device if ``leaf`` is committed to it, and a random key if ``leaf`` is one."""
    device = next(iter(leaf.devices())) if isinstance(leaf, jax.Array) and leaf.committed else None
    fresh = jax.device_put(array.copy(), device)
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        fresh = jax.random.wrap_key_data(fresh, impl=jax.random.key_impl(leaf))
    return fresh


_AVERAGED = ("float32", "float64", "float16", "bfloat16")


def specs_of(named: Sequence[tuple[str, Any]]) -> list[TensorSpec]:
    """The specifications of the leaves, in their order. Raises UnsupportedError if there are no leaves, or one is not of a
    floating-point type that is averaged; the error names it."""
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
    """Require parameters of the form that the training began with. Raises UnsupportedError if a name or shape is no longer the
    one in ``specs``, or a parameter has a dtype whose bits would be lost in the dtype in ``specs``; the error names the
    first such parameter."""
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
    """Return ``values`` of a step in a form that refuses such transformations. Use the result in their place. Raises
    UnsupportedError if they are mapped, differentiated, or spread over several devices, or if JAX is set to look for values
    that are not finite. For mapping and differentiation it may be raised later, where they are traced."""
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
