"""The outstanding update of a state as part of a program, which makes it for each parameter where the parameter is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from numpy.typing import NDArray

from ...core.errors import UnsupportedError
from .exchange import NOTHING, GradientExchange
from .host_call import NUMBER, host_call
from .leaves import named_leaves
from .program import Lazy, Program, has_token, token_of
from .same_update import digest_of, operations


class Pending:
    """Parameters and optimizer state after ``update(averages, opt_state, params)``, leaf by leaf.

    Each leaf waits only for the averages that it is computed from. Optax's elementwise transformations need one average, a
    clip by the global norm needs all.

    ``after`` holds arrays that must be computed before a wait for an average may begin. Without them, the compiler may
    have the program wait for the last layer's average at its very beginning.

    Raises:
        UnsupportedError: ``update`` has side effects, which belong to no leaf, or returns a state of another form.
    """

    def __init__(
        self,
        exchange: GradientExchange,
        update: Callable[[Any, Any, Any], tuple[Any, Any]],
        params: Any,
        opt_state: Any,
        outstanding: Any,
    ) -> None:
        self.after: Sequence[Any] = ()
        self._exchange = exchange
        self._outstanding = outstanding
        self._leaves: dict[int, Any] = {}
        self._passed: list[Any] = []  # a zero from each wait
        self._before, self._structure = jax.tree.flatten((params, opt_state))
        averages = [jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)) for spec in exchange.specs]
        structure = jax.tree.structure(params)
        tree = jax.tree.unflatten(structure, averages)
        closed, updated = jax.make_jaxpr(update, return_shape=True)(tree, opt_state, params)
        if closed.effects:
            what = ", ".join(sorted(str(effect) for effect in closed.effects))
            raise UnsupportedError(
                f"the optimizer's update has side effects ({what}), such as jax.debug.print or io_callback have; with several "
                "ranks the update runs leaf by leaf, so do that outside the update, with the values of state.opt_state"
            )
        _require_alike((params, opt_state), updated)
        self.operations = operations(closed)
        self.digest = digest_of(self.operations)
        self._names = [name for name, _ in named_leaves(opt_state)]
        program = Program(closed)
        count = len(averages)
        known = [*self._before[count:], *self._before[:count]]
        give = {number: partial(self._average, place) for place, number in enumerate(program.inputs[:count])}
        self._outputs = program.outputs
        self._after_update = Lazy(program, dict(zip(program.inputs[count:], known)), give)

    def leaf(self, place: int) -> Any:
        """The leaf with the index ``place``; parameters come first, then the optimizer state."""
        if place not in self._leaves:
            updated = self._after_update[self._outputs[place]]
            self._leaves[place] = jnp.where(self._outstanding == NOTHING, self._before[place], updated)
        return self._leaves[place]

    def numbers(self) -> tuple[list[str], list[Any]]:
        """The names and values of the scalar numbers in the optimizer's state, such as rates and counts."""
        first = len(self._before) - len(self._names)
        leaves = {name: self.leaf(first + index) for index, name in enumerate(self._names)}
        numbers = {name: leaf for name, leaf in leaves.items() if leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.number)}
        return list(numbers), list(numbers.values())

    def finish(self) -> tuple[Any, Any, Any]:
        """Parameters, optimizer state, and a zero that is available once all waits are over."""
        leaves = [self.leaf(place) for place in range(len(self._before))]
        params, opt_state = jax.tree.unflatten(self._structure, leaves)
        return params, opt_state, sum(self._passed, jnp.int32(0))

    def _average(self, place: int) -> Any:
        exchange, spec = self._exchange, self._exchange.specs[place]

        def wait(average: NDArray[Any], passed: NDArray[Any], number: NDArray[Any], *_: Any) -> None:
            exchange.take_average(place, int(number), average)
            passed[...] = 0

        tokens = [token_of(value) for value in self.after if has_token(value)]
        shape = jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype))
        average, passed = host_call(wait, [shape, NUMBER], self._outstanding, *tokens)
        self._passed.append(passed)
        return average


def _require_alike(before: tuple[Any, Any], updated: tuple[Any, Any]) -> None:
    """Require a state of the same form after the update as before it.

    A program knows only when it runs whether there is an update to make. So both outcomes must have the same form.

    Raises:
        UnsupportedError: the forms differ; names the first difference.
    """
    for old, new in zip_longest(_named(*before), _named(*updated)):
        ours, theirs = (None if each is None else (each[0], jnp.shape(each[1])) for each in (old, new))
        if ours != theirs or jnp.result_type(old[1], new[1]) != new[1].dtype:
            _refuse(f"{_described(new)} of {_described(old)}")
    if (old := jax.tree.structure(before)) != (new := jax.tree.structure(updated)):
        _refuse(f"{new} of {old}")


def _named(params: Any, opt_state: Any) -> list[tuple[str, Any]]:
    return named_leaves(params) + named_leaves(opt_state, "optimizer state ")


def _refuse(change: str) -> NoReturn:
    raise UnsupportedError(f"the optimizer's update makes {change}; a state must keep the form that tx.init() gives it")


def _described(named: tuple[str, Any] | None) -> str:
    return "nothing" if named is None else f"'{named[0]}' {jnp.result_type(named[1])}{list(jnp.shape(named[1]))}"
