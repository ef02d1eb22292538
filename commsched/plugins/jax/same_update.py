"""All ranks make the same update: its traced operations, with their rates and masks, are compared between ranks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

import commsched

from ...core.comparison import Difference, first_difference
from ...core.errors import RanksDiverged
from .program import CALLS

_PIECES = 64  # a list is compared in at most this many pieces, and then the first piece that differs in the same way
_SHOWN = 200  # characters of an operation in an error
_JAX = PurePath(jax.__file__).parent
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def operations(closed: ClosedJaxpr) -> list[tuple[str, JaxprEqn | None]]:
    """Each operation as text, with its operands, literals and constants. Processes that trace the same function get the same
    text."""
    made: list[tuple[str, JaxprEqn | None]] = []
    _write(closed, "", made)
    return made


def digest_of(made: Sequence[tuple[str, JaxprEqn | None]]) -> str:
    return hashlib.blake2b("\n".join(text for text, _ in made).encode(), digest_size=8).hexdigest()


def require_same_update(session: commsched.Session, made: Sequence[tuple[str, JaxprEqn | None]]) -> None:
    """Require equal :func:`operations` on all ranks. Collective.

    Raises:
        RanksDiverged: the operations differ; shows the first that does.
    """
    lengths_and_digests = session.gather([[len(made), digest_of(made)]])
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
        f"the optimizer's update differs between ranks: {different.text(_described)}; give all ranks the same optimizer, with "
        "the same rates, lengths of schedules, norms to clip at, and masks"
    )


def _described(operation: Sequence[str] | None) -> str:
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
