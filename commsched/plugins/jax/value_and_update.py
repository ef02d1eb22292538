"""value_and_update: one training step as one traceable function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ...core.errors import UnsupportedError
from .exchange import GradientExchange
from .host_call import NUMBER, host_call
from .initial import named_leaves
from .pending import Pending
from .program import Lazy, Operation, Program, TrainingProgram, after, has_token
from .specs import require_same_form
from .state import TrainState
from .transforms import require_plain


def value_and_update(loss: Callable[..., Any], has_aux: bool = False) -> Callable[..., tuple[Any, TrainState]]:
    """A function that makes one step: ``value, state = value_and_update(loss)(state, batch)``.

    It takes the place of ``jax.value_and_grad``, ``tx.update`` and ``optax.apply_updates``, and is to be called within
    ``jit``, as they are. ``loss(params, *arguments)`` gives a number, or with ``has_aux`` a pair of a number and anything else;
    ``value`` is what it gives, of this rank's arguments.

    The averages of a step are applied by the next one, each parameter's where the loss first uses it. Tracing it for the first
    time is collective, as the ranks agree on the order of the layers.

    Raises:
        UnsupportedError: from tracing, if it is mapped, differentiated, or spread over several devices. From running, if
            ``state`` was stepped from before.
        ManifestMismatch: from tracing.
        CommschedError: from running, if the session failed; see ``cs.jit``.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=has_aux)

    @functools.wraps(loss)
    def step(state: TrainState, /, *arguments: Any, **keywords: Any) -> tuple[Any, TrainState]:
        if not isinstance(state, TrainState):
            raise UnsupportedError(f"a step begins from what cs.create() made, not from a {type(state).__name__}")
        training = state._training
        if training.exchange is None:
            value, gradients = value_and_grad(state._params, *arguments, **keywords)
            params, opt_state = training.update(gradients, state._opt_state, state._params)
            return value, TrainState(params, opt_state, state._outstanding, training)
        return _step(value_and_grad, state, training.exchange, arguments, keywords)

    return step


def _step(
    value_and_grad: Callable[..., tuple[Any, Any]],
    state: TrainState,
    exchange: GradientExchange,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> tuple[Any, TrainState]:
    training = state._training
    begin = state.latest()
    require_same_form(exchange.specs, named_leaves(begin._params))
    leaves, structure = jax.tree.flatten((begin._params, begin._opt_state, begin._outstanding))
    params, opt_state, outstanding = jax.tree.unflatten(structure, require_plain(leaves))
    given, form = jax.tree.flatten((arguments, keywords))
    is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in given]  # others stay what they are
    arrays = require_plain([leaf for leaf, array in zip(given, is_array) if array])

    def value_and_gradients(params: Any, arrays: Sequence[Any]) -> Any:
        remaining = iter(arrays)
        leaves = [next(remaining) if array else leaf for array, leaf in zip(is_array, given)]
        arguments, keywords = jax.tree.unflatten(form, leaves)
        return value_and_grad(params, *arguments, **keywords)

    closed, shapes = jax.make_jaxpr(value_and_gradients, return_shape=True)(params, arrays)
    program = Program(closed)
    program.constants |= zip(program.captured, require_plain([program.constants[number] for number in program.captured]))
    traced = TrainingProgram(program, parameters=len(exchange.specs))
    exchange.register(traced.first_use())

    pending = Pending(exchange, training.update, params, opt_state, outstanding)
    values = traced.values(pending.leaf, arrays)
    handover = _HandOver(exchange, pending, outstanding)
    for operation in traced.steps:
        handover.hold_back(operation, values, traced.activations)
        results = values.run(operation)
        fresh = [result for result in results if has_token(result)]
        if fresh and not traced.activations.isdisjoint(operation.results):
            pending.after = fresh
        for number, result in zip(operation.results, results):
            for place in traced.gradients.get(number, ()):
                handover.give(place, result)
    for number, places in traced.gradients.items():  # what was not made of data: of parameters that the loss does not use, say
        for place in places:
            if place not in handover.given:
                handover.give(place, values[number])
    value, _ = jax.tree.unflatten(jax.tree.structure(shapes), [values[number] for number in program.outputs])
    params, opt_state, passed = pending.finish()
    state.remember(TrainState(params, opt_state, passed, training))  # for who reads it after the step
    return value, TrainState(params, opt_state, handover.number(), training)


class _HandOver:
    """Gradients go to the exchange where they are produced. The first begins the round, once all averages of the one before are
    taken."""

    def __init__(self, exchange: GradientExchange, pending: Pending, outstanding: Any) -> None:
        self.given: dict[int, Any] = {}  # place -> a zero, once it is handed over
        self._exchange = exchange
        self._pending = pending
        self._outstanding = outstanding
        self._number: Any = None
        self._last: Any = None  # of those given, if nothing was held back for it yet

    def give(self, place: int, gradient: Any) -> None:
        exchange = self._exchange

        def begin(number: NDArray[Any], outstanding: NDArray[Any]) -> None:
            number[...] = exchange.begin(int(outstanding))

        def hand_over(given: NDArray[Any], number: NDArray[Any], gradient: NDArray[Any]) -> None:
            exchange.hand_over(place, int(number), gradient)
            given[...] = 0

        if self._number is None:
            _, _, passed = self._pending.finish()
            (self._number,) = host_call(begin, [NUMBER], self._outstanding + passed)
        (self._last,) = host_call(hand_over, [NUMBER], self._number, gradient)
        self.given[place] = self._last

    def hold_back(self, operation: Operation, values: Lazy, activations: Container[int]) -> None:
        """Let ``operation`` of backward begin once what was given so far is handed over: nothing else keeps the compiler from
        putting that off."""
        if self._last is None:
            return
        able = [number for number in operation.operands if number in activations and has_token(values[number])]
        if able:
            least = min(able, key=lambda number: int(values[number].size))
            values[least] = after(values[least], self._last)
            self._last = None

    def number(self) -> Any:
        """Of the round, once every gradient is handed over."""
        return self._number + sum(self.given.values())
