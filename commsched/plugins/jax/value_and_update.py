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
from .leaves import named_leaves, require_plain, require_same_form
from .program import Lazy, Program, TracedOperation, TrainingProgram, after, has_token
from .state import TrainState
from .update import Pending, require_same_update

_TRACED = object()


def value_and_update(loss: Callable[..., Any], has_aux: bool = False) -> Callable[..., tuple[Any, TrainState]]:
    """A function that makes one step: ``value, state = value_and_update(loss)(state, batch)``.

    It replaces ``jax.value_and_grad``, ``tx.update`` and ``optax.apply_updates``. Call it within ``jit``, as you would call
    them. ``loss(params, *arguments)`` returns a number, or with ``has_aux`` a pair of a number and anything else. ``value`` is
    the loss's result for this rank's arguments.

    The next step applies the averages of a step, to each parameter where the loss first uses it. Tracing the first step is
    collective, because the ranks agree on the order of the layers.

    Raises:
        UnsupportedError: from tracing, if the step is mapped, differentiated, or spread over several devices. When the program
            runs, if ``state`` was stepped from before.
        ManifestMismatch: from tracing, if the ranks disagree about the tensors.
        RanksDiverged: from tracing, if the ranks' optimizers make different updates.
        CommschedError: when the program runs, if the session failed; see ``cs.jit``.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=has_aux)

    @functools.wraps(loss)
    def step(state: TrainState, /, *arguments: Any, **keywords: Any) -> tuple[Any, TrainState]:
        if not isinstance(state, TrainState):
            raise UnsupportedError(f"a step begins from a state that cs.create() made, not from a {type(state).__name__}")
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
    is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in given]  # other leaves are passed unchanged
    arrays = require_plain([leaf for leaf, array in zip(given, is_array) if array])

    seen: list[Any] = []  # leaves of value and auxiliary data: _TRACED for a program's output, others as the loss returned them

    def value_and_gradients(params: Any, arrays: Sequence[Any]) -> Any:
        remaining = iter(arrays)
        leaves = [next(remaining) if array else leaf for array, leaf in zip(is_array, given)]
        arguments, keywords = jax.tree.unflatten(form, leaves)
        value, gradients = value_and_grad(params, *arguments, **keywords)
        leaves, structure = jax.tree.flatten(value)
        seen[:] = [_TRACED if isinstance(leaf, jax.core.Tracer) else leaf for leaf in leaves], structure
        return [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)], gradients

    closed = jax.make_jaxpr(value_and_gradients)(params, arrays)
    program = Program(closed)
    program.constants |= zip(program.captured, require_plain([program.constants[number] for number in program.captured]))
    traced = TrainingProgram(program, parameters=len(exchange.specs))
    pending = Pending(exchange, training.update, params, opt_state, outstanding)
    if not exchange.is_registered:
        require_same_update(exchange.session, pending.operations)
        exchange.register(traced.first_use())
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
    for number, places in traced.gradients.items():  # gradients without data, such as of parameters that the loss does not use
        for place in places:
            if place not in handover.given:
                handover.give(place, values[number])
    outputs = iter(program.outputs)
    value = jax.tree.unflatten(seen[1], [values[next(outputs)] if leaf is _TRACED else leaf for leaf in seen[0]])
    params, opt_state, passed = pending.finish()
    state.remember(TrainState(params, opt_state, passed, training))  # for reads of ``state`` after the step
    return value, TrainState(params, opt_state, handover.number(), training)


class _HandOver:
    """Submits gradients to the exchange where they are produced. The first one begins the round, once all averages of the
    previous round are taken."""

    def __init__(self, exchange: GradientExchange, pending: Pending, outstanding: Any) -> None:
        self.given: dict[int, Any] = {}  # place -> a zero, available once the gradient is submitted
        self._exchange = exchange
        self._pending = pending
        self._outstanding = outstanding
        self._number: Any = None
        self._last: Any = None  # the zero given last, if no operation was held back for it yet

    def give(self, place: int, gradient: Any) -> None:
        exchange = self._exchange

        def begin(number: NDArray[Any], outstanding: NDArray[Any], *values: NDArray[Any]) -> None:
            number[...] = exchange.begin(
                int(outstanding),
                lambda: {"operations of the update": made, **{name: value.item() for name, value in zip(names, values)}},
            )

        def submit(given: NDArray[Any], number: NDArray[Any], *operands: NDArray[Any]) -> None:
            exchange.submit(place, int(number), *operands)
            given[...] = 0

        if self._number is None:
            _, _, passed = self._pending.finish()
            made = self._pending.digest
            names, values = self._pending.numbers() if exchange.compares else ([], [])
            (self._number,) = host_call(begin, [NUMBER], self._outstanding + passed, *values)
        parameter = [self._pending.leaf(place)] if exchange.compares else []
        (self._last,) = host_call(submit, [NUMBER], self._number, gradient, *parameter)
        self.given[place] = self._last

    def hold_back(self, operation: TracedOperation, values: Lazy, activations: Container[int]) -> None:
        """Delay ``operation`` of backward until the gradients given so far are submitted. Nothing else keeps the compiler from
        delaying the submission."""
        if self._last is None:
            return
        able = [number for number in operation.operands if number in activations and has_token(values[number])]
        if able:
            least = min(able, key=lambda number: int(values[number].size))
            values[least] = after(values[least], self._last)
            self._last = None

    def number(self) -> Any:
        """The round's number, available once every gradient is submitted."""
        return self._number + sum(self.given.values())
