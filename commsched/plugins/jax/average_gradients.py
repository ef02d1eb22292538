"""average_gradients: the average over all ranks as an Optax transformation, for training loops that must not change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from numpy.typing import NDArray

import commsched

from ...core.errors import UnsupportedError
from ...core.manifest import TensorSpec
from .exchange import NOTHING, GradientExchange
from .host_call import NUMBER, host_call
from .leaves import named_leaves, require_concrete, require_equal_values, require_plain, specs_of
from .memory import device_at, place_of, session_for
from .registered import Alike, RegisteredGroups, form_of


class AveragingState(NamedTuple):
    """A pytree of one array. It may be copied, saved and restored like any other, in jobs of one rank or several.

    ``number`` counts the calls of ``init``; it identifies the training whose gradients an update averages. Each update computes
    it anew. The new value is available only once the update's averages are, which keeps updates in order.
    """

    number: Any


def average_gradients(session: commsched.Session | None = None) -> optax.GradientTransformation:
    """An Optax transformation that averages gradients over all ranks: ``optax.chain(average_gradients(), tx)``.

    Gradients are submitted while backward runs. The step ends when all averages are available, so nothing overlaps with the
    next forward, and front layers gain nothing from their priority. Put it before every other transformation, and outside
    wrappers that may revert an inner transformation.

    ``init`` is collective and must not run within ``jit``. It does not change parameters, so begin with
    ``params = cs.broadcast(params)``. With a saved state and without ``init``, tracing the first ``update`` is collective.

    Args:
        session: a session other than the one that ``commsched.init()`` returns.

    Raises:
        UnsupportedError: from ``init``, a dtype or device is not supported. From ``update``, the gradients are not like the
            parameters, are mapped or spread over devices, or ``init`` has not made the state.
        ManifestMismatch: from ``init``, ranks have different parameters.
        CommschedError: from ``init``, as ``commsched.init()``; when the program runs, if the session failed.
    """
    begun: list[Sequence[TensorSpec]] = []

    def init(params: Any) -> AveragingState:
        named = named_leaves(params)
        require_concrete(named, "tx.init()")
        own = session_for(named) if session is None else session
        exchange = None
        if own.world_size > 1:
            specs = specs_of(named)
            require_equal_values(own, named, "begin with params = cs.broadcast(params)")
            exchange = _begin(own, specs, place_of(named))
            begun.append(specs)
        return AveragingState(jax.device_put(np.int32(RegisteredGroups.of(own).add_training(exchange))))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        own = commsched.init() if session is None else session
        if own.world_size == 1:
            return updates, state
        if not isinstance(state, AveragingState):
            raise UnsupportedError(
                f"average_gradients() was given a {type(state).__name__} as its state, which its init did not make, so "
                "gradients would not be averaged. Restore into a state that tx.init(params) returned"
            )
        named = named_leaves(updates)
        specs = specs_of(named)
        _require_form(specs, begun)
        registered = RegisteredGroups.of(own)
        if (alike := registered.like(specs)) is None:  # the state was saved by another process
            alike = registered.add_restored(_begin(own, specs, place_of([])))
        number, *gradients = require_plain([state.number, *(leaf for _, leaf in named)])
        parameters = jax.tree.leaves(params)
        averages, number = _average(alike, number, gradients, parameters if len(parameters) == len(gradients) else ())
        return jax.tree.unflatten(jax.tree.structure(updates), averages), AveragingState(number)

    return optax.GradientTransformation(init, update)


def _begin(session: commsched.Session, specs: Sequence[TensorSpec], place: str) -> GradientExchange:
    exchange = GradientExchange(session, specs, device_at(place, session))
    exchange.register(range(len(specs)))
    return exchange


def _require_form(specs: Sequence[TensorSpec], begun: Sequence[Sequence[TensorSpec]]) -> None:
    """Require gradients that match the parameters of a training. Raises UnsupportedError if gradients of ``specs`` are not like
    the parameters that trainings were begun with."""
    if not begun or any(form_of(specs) == form_of(parameters) for parameters in begun):
        return
    for theirs, ours in zip_longest(specs, begun[-1]):
        if theirs is None or ours is None or form_of([theirs]) != form_of([ours]):
            raise UnsupportedError(
                f"the gradients have {theirs or 'nothing more'} where the parameters have {ours or 'nothing more'}"
            )


def _average(alike: Alike, number: Any, gradients: Sequence[Any], parameters: Sequence[Any]) -> tuple[list[Any], Any]:
    """The averages of the gradients, and ``number`` again, available once the averages are.

    ``parameters`` are compared between ranks, if given.
    """

    def begin(round_number: NDArray[Any], number: NDArray[Any]) -> None:
        round_number[...] = alike.find(int(number)).begin(NOTHING)

    def submit(place: int, given: NDArray[Any], round_number: NDArray[Any], *operands: NDArray[Any]) -> None:
        number, *gradient_and_parameter = operands
        alike.find(int(number)).submit(place, int(round_number), *gradient_and_parameter)
        given[...] = 0

    def wait(place: int, average: NDArray[Any], passed: NDArray[Any], round_number: NDArray[Any], number: NDArray[Any]) -> None:
        alike.find(int(number)).take_average(place, int(round_number), average)
        passed[...] = 0

    (round_number,) = host_call(begin, [NUMBER], number)
    given = [
        host_call(partial(submit, place), [NUMBER], round_number, number, gradient, *parameters[place : place + 1])[0]
        for place, gradient in enumerate(gradients)
    ]
    # All gradients are submitted before the first wait. Otherwise two ranks could wait for each other.
    round_number = round_number + sum(given)
    averages, passed = [], []
    for place, gradient in enumerate(gradients):
        shape = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
        average, zero = host_call(partial(wait, place), [shape, NUMBER], round_number, number)
        averages.append(average)
        passed.append(zero)
    return averages, number + sum(passed)
