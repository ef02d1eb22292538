"""average_gradients: the average over all ranks as one of Optax's transformations, for loops that are not to be changed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from numpy.typing import NDArray

import commsched

from ...core.errors import UnsupportedError
from .exchange import NOTHING, GradientExchange
from .host_call import NUMBER, host_call
from .initial import named_leaves, require_concrete, require_equal_values
from .specs import specs_of
from .transforms import require_plain


def average_gradients(session: commsched.Session | None = None) -> optax.GradientTransformation:
    """A transformation that gives the average of its gradients over all ranks: ``optax.chain(average_gradients(), tx)``.

    Gradients are handed over while backward runs; the step ends when all averages are there, so nothing overlaps with the next
    forward, and front layers gain nothing from being first. Let it be the first of everything, outside of wrappers that may
    take back what an inner transformation did.

    ``init`` is collective and not for ``jit``; it does not change parameters, so begin with ``params = cs.broadcast(params)``.

    Args:
        session: a session other than that of ``commsched.init()``.

    Raises:
        UnsupportedError: from ``init``, a dtype or device is not supported. From ``update``, the gradients are not like the
            parameters, are mapped or spread over devices, or two updates of one program began from one state.
        ManifestMismatch: from ``init``, ranks have different parameters.
        CommschedError: from ``init``, as ``commsched.init()``; from running, if the session failed.
    """

    def init(params: Any) -> Any:
        own = commsched.init() if session is None else session
        named = named_leaves(params)
        require_concrete(named, "tx.init()")
        if own.world_size == 1:
            return optax.EmptyState()
        specs = specs_of(named)
        require_equal_values(own, named, "begin with params = cs.broadcast(params)")
        exchange = GradientExchange(own, specs)
        exchange.register(range(len(specs)))
        return _Averaging(jnp.int32(0), exchange)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not isinstance(state, _Averaging):
            return updates, state
        named = named_leaves(updates)
        specs = specs_of(named)
        for ours, theirs in zip([*state.exchange.specs, None], [*specs, None]):
            if ours != theirs:
                raise UnsupportedError(
                    f"the gradients have {theirs or 'nothing more'} where the parameters have {ours or 'nothing more'}"
                )
        after, *gradients = require_plain([state.after, *(leaf for _, leaf in named)])
        averages, after = _average(state.exchange, after, gradients)
        return jax.tree.unflatten(jax.tree.structure(updates), averages), _Averaging(after, state.exchange)

    return optax.GradientTransformation(init, update)


@jax.tree_util.register_pytree_node_class
class _Averaging:
    """``after`` is a zero that is there once the averages of the last update are: it puts updates in order."""

    def __init__(self, after: Any, exchange: GradientExchange) -> None:
        self.after = after
        self.exchange = exchange

    def tree_flatten(self) -> tuple[tuple[Any], GradientExchange]:
        return (self.after,), self.exchange

    @classmethod
    def tree_unflatten(cls, exchange: GradientExchange, children: Sequence[Any]) -> _Averaging:
        return cls(children[0], exchange)


def _average(exchange: GradientExchange, after: Any, gradients: Sequence[Any]) -> tuple[list[Any], Any]:
    """Averages of the gradients, and a zero that is there when they are."""

    def begin(number: NDArray[Any], _: NDArray[Any]) -> None:
        number[...] = exchange.begin(NOTHING)

    def hand_over(place: int, given: NDArray[Any], number: NDArray[Any], gradient: NDArray[Any]) -> None:
        exchange.hand_over(place, int(number), gradient)
        given[...] = 0

    def wait(place: int, average: NDArray[Any], passed: NDArray[Any], number: NDArray[Any]) -> None:
        exchange.take_average(place, int(number), average)
        passed[...] = 0

    (number,) = host_call(begin, [NUMBER], after)
    given = [host_call(partial(hand_over, place), [NUMBER], number, gradient)[0] for place, gradient in enumerate(gradients)]
    number = number + sum(given)  # a wait before the last handover could be one for a rank that waits for this one
    averages, passed = [], []
    for place, gradient in enumerate(gradients):
        shape = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
        average, zero = host_call(partial(wait, place), [shape, NUMBER], number)
        averages.append(average)
        passed.append(zero)
    return averages, after + sum(passed)
