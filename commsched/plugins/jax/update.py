"""The outstanding update of a state as part of a program, which makes it for each parameter where the parameter is used.

All ranks make the same update: its traced operations, with their rates and masks, are compared between ranks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import PurePath
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from numpy.typing import NDArray

import commsched

from ...core.comparison import Difference, first_difference
from ...core.errors import RanksDiverged, UnsupportedError
from ..common.collectives import gather_alike
from .exchange import NOTHING, TRAINING_ADVICE, GradientExchange
from .host_call import NUMBER, host_call
from .leaves import named_leaves
from .program import CALLS, Lazy, Program, has_token, token_of

_PIECES = 64  # a list is compared in at most this many pieces, and then the first piece that differs in the same way
_SHOWN = 200  # characters of an operation in an error
_JAX = PurePath(jax.__file__).parent
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


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

    A program knows only when it runs whether there is an update to make. So both outcomes must have the same form. Raises
    UnsupportedError if the forms differ; the error names the first difference.
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


def operations(closed: ClosedJaxpr) -> list[tuple[str, JaxprEqn | None]]:
    """Each operation as text, with its operands, literals and constants. Processes that trace the same function get the same
    text."""
    made: list[tuple[str, JaxprEqn | None]] = []
    _write(closed, "", made)
    return made


def digest_of(made: Sequence[tuple[str, JaxprEqn | None]]) -> str:
    return hashlib.blake2b("\n".join(text for text, _ in made).encode(), digest_size=8).hexdigest()


def require_same_update(session: commsched.Session, made: Sequence[tuple[str, JaxprEqn | None]]) -> None:
    """Require equal :func:`operations` on all ranks. Collective. Raises RanksDiverged if they differ; the error shows
    the first that does."""
    lengths_and_digests = gather_alike(session, "compares the update", [[len(made), digest_of(made)]], TRAINING_ADVICE)
    if first_difference(lengths_and_digests) is None:
        return
    start, stop = 0, max(length for [(length, _)] in lengths_and_digests)
    while stop - start > 1:
        size = -(-(stop - start) // _PIECES)
        pieces = session.gather([[at, digest_of(made[at : at + size])] for at in range(start, stop, size)])
        if (different := first_difference(pieces)) is None:
            break
        start += different.key * size
        stop = min(stop, start + size)
    shown = session.gather([[text[:_SHOWN], _maker(equation)] for text, equation in made[start : start + 1]])
    different = first_difference(shown) or Difference(1, start, None, None)
    raise RanksDiverged(
        f"the optimizer's update differs between ranks: {different.text(_quoted)}; give all ranks the same optimizer, with "
        "the same rates, lengths of schedules, norms to clip at, and masks"
    )


def _quoted(operation: Sequence[str] | None) -> str:
    return "nothing more" if operation is None else f"'{operation[0].strip()}' ({operation[1]})"


def _write(closed: ClosedJaxpr | Jaxpr, indent: str, made: list[tuple[str, JaxprEqn | None]]) -> None:
    jaxpr, consts = (closed.jaxpr, closed.consts) if isinstance(closed, ClosedJaxpr) else (closed, ())
    numbers: dict[Any, int] = {}  # variables are numbered in the order in which they appear

    def atom(atom: Any) -> str:
        return _value(atom.val) if isinstance(atom, Literal) else f"%{numbers.setdefault(atom, len(numbers))}"

    def typed(variable: Any) -> str:
        return f"{atom(variable)}:{variable.aval.str_short()}"

    inputs = [*map(_value, consts), *map(typed, [*jaxpr.constvars, *jaxpr.invars])]
    made.append((f"{indent}given {' '.join(inputs)}", None))
    for equation in jaxpr.eqns:
        inner: list[Any] = []
        is_call = equation.primitive in CALLS  # a call's other parameters, such as devices, do not change the results
        params = [
            f"{name}={_param(value, inner)}"
            for name, value in sorted(equation.params.items())
            if not is_call or name == CALLS[equation.primitive]
        ]
        operands = " ".join(map(atom, equation.invars))
        results = " ".join(map(typed, equation.outvars))
        made.append((f"{indent}{results} = {equation.primitive.name}[{' '.join(params)}] {operands}", equation))
        for each in inner:
            _write(each, indent + " ", made)
    made.append((f"{indent}gives {' '.join(map(atom, jaxpr.outvars))}", None))


def _value(value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        return f"traced {value.aval.str_short()}"
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    if array.ndim == 0:
        return f"{array[()]!s}:{array.dtype.name}"
    return f"{array.dtype.name}{list(array.shape)} {hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()}"


def _param(value: Any, inner: list[Any]) -> str:
    """A parameter of an operation as text. Functions among its values are appended to ``inner``."""
    if value is None or isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, ClosedJaxpr | Jaxpr):
        inner.append(value)
        return "{}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_param(value[key], inner)}' for key in sorted(value, key=str))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_param(each, inner) for each in value))}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join([_param(each, inner) for each in value])})"
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _value(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return _ADDRESS.sub("", str(value))


def _maker(equation: JaxprEqn | None) -> str:
    """The function of the optimizer that made ``equation``, for an error."""
    traceback = None if equation is None else equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        path = PurePath(frame.file_name)
        if not path.is_relative_to(_JAX):
            return f"of {frame.function_name} in {path.name}"
    return "of the optimizer"
