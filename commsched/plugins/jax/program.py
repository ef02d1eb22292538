"""A traced function as one flat list of operations, evaluated so that each parameter is requested as late as possible.

JAX gives a function's equations in the order in which the user's code made them. The equations of backward come after those of
forward, and each gradient is an output of the equation that produces it. Nested functions (``jit``, ``jax.checkpoint``, custom
derivatives) are flattened here, as the compiler does. Loops and branches stay single operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DebugInfo, DropVar, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.extend.core import primitives as known

#: Primitives that call one function, and for each the name of the parameter that holds the function.
CALLS = {
    known.jit_p: "jaxpr",
    known.closed_call_p: "call_jaxpr",
    known.call_p: "call_jaxpr",
    known.custom_jvp_call_p: "call_jaxpr",
    known.custom_vjp_call_p: "call_jaxpr",
    known.remat_p: "jaxpr",
}


@dataclass(frozen=True)
class TracedOperation:
    """``run`` computes the results from the operands. ``operands`` and ``results`` identify values by their numbers."""

    run: Callable[..., Sequence[Any]]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    has_effects: bool


class Program:
    """``closed`` as a flat list of operations.

    ``inputs`` and ``outputs`` are the numbers of its values. ``constants`` holds the values of its constants by number.
    """

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.operations: list[TracedOperation] = []
        self.constants: dict[int, Any] = {}
        self.captured: list[int] = []  # the constants that the function closes over
        self.maker: dict[int, TracedOperation] = {}  # by value: the operation that computes it
        self._count = 0
        self.inputs = tuple(self._number() for _ in closed.jaxpr.invars)
        consts = self._capture(closed.consts)
        self.outputs = tuple(self._lay_out(closed.jaxpr, consts, self.inputs))

    def _number(self) -> int:
        self._count += 1
        return self._count - 1

    def _constant(self, value: Any) -> int:
        number = self._number()
        self.constants[number] = value
        return number

    def _capture(self, values: Sequence[Any]) -> list[int]:
        numbers = [self._constant(value) for value in values]
        self.captured += numbers
        return numbers

    def _lay_out(self, jaxpr: Jaxpr, consts: Sequence[int], arguments: Sequence[int]) -> list[int]:
        place = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, arguments))

        def read(atom: Any) -> int:
            return self._constant(atom.val) if isinstance(atom, Literal) else place[atom]

        for equation in jaxpr.eqns:
            if (key := CALLS.get(equation.primitive)) is not None:
                operands = [read(atom) for atom in equation.invars]
                place |= zip(equation.outvars, self._lay_out_call(equation, equation.params[key], operands))
                continue
            operation = _operation(jaxpr, equation, place, self._number)
            place |= zip((variable for variable in equation.outvars if type(variable) is not DropVar), operation.results)
            self._add(operation)
        return [read(atom) for atom in jaxpr.outvars]

    def _lay_out_call(self, equation: JaxprEqn, inner: ClosedJaxpr | Jaxpr, operands: list[int]) -> list[int]:
        if equation.primitive is known.remat_p and equation.params["differentiated"]:
            # JAX adds the same barrier when it compiles the equation. Without it the compiler would keep the values that are to
            # be recomputed.
            kept = equation.params["prevent_cse"]
            kept = kept if isinstance(kept, tuple) else (kept,) * len(operands)
            behind = tuple(number for number, barrier in zip(operands, kept) if barrier)
            if behind:
                results = tuple(self._number() for _ in behind)
                self._add(TracedOperation(lambda *values: jax.lax.optimization_barrier(values), behind, results, False))
                fresh = iter(results)
                operands = [next(fresh) if barrier else number for number, barrier in zip(operands, kept)]
        if isinstance(inner, ClosedJaxpr):
            return self._lay_out(inner.jaxpr, self._capture(inner.consts), operands)
        return self._lay_out(inner, (), operands)

    def _add(self, operation: TracedOperation) -> None:
        self.operations.append(operation)
        self.maker |= dict.fromkeys(operation.results, operation)


def _operation(jaxpr: Jaxpr, equation: JaxprEqn, place: Mapping[Any, int], number: Callable[[], int]) -> TracedOperation:
    """``equation`` of ``jaxpr`` as a function of its variables; literals stay inside the function."""
    variables = list(dict.fromkeys(atom for atom in equation.invars if not isinstance(atom, Literal)))
    results = [variable for variable in equation.outvars if type(variable) is not DropVar]
    name = DebugInfo("commsched", str(equation.primitive), None, None)
    alone = jaxpr.replace(
        constvars=[], invars=variables, outvars=results, eqns=[equation], effects=equation.effects, debug_info=name
    )
    operands = tuple(place[variable] for variable in variables)
    return TracedOperation(
        jaxpr_as_fun(ClosedJaxpr(alone, [])), operands, tuple(number() for _ in results), bool(equation.effects)
    )


class Lazy:
    """Computes values of ``program`` when they are first requested, each once. ``values`` are known; ``give`` has, for each
    other input, a function that makes its value when it is first requested."""

    def __init__(self, program: Program, values: Mapping[int, Any], give: Mapping[int, Callable[[], Any]]) -> None:
        self._program = program
        self._values = {**program.constants, **values}
        self._give = give

    def __getitem__(self, number: int) -> Any:
        """The value with this number. Computed without recursion, since a chain may be thousands of operations long."""
        asked = [number]
        while asked:
            if (value := asked[-1]) in self._values:
                asked.pop()
            elif value in self._give:
                self._values[value] = self._give[value]()
            else:
                operation = self._program.maker[value]
                if missing := [operand for operand in operation.operands if operand not in self._values]:
                    asked += reversed(missing)
                else:
                    self.run(operation)
        return self._values[number]

    def __setitem__(self, number: int, value: Any) -> None:
        """Use ``value`` from now on."""
        self._values[number] = value

    def run(self, operation: TracedOperation) -> Sequence[Any]:
        """Compute the operands of ``operation``, then its results."""
        results = operation.run(*[self[operand] for operand in operation.operands])
        self._values |= zip(operation.results, results)
        return results


class TrainingProgram:
    """The program of a loss's value and gradients. Its first inputs are the ``parameters``, and as many of its last outputs
    are their gradients.

    *Data* are the arguments besides the parameters, and the values computed from them. Operations that use data run in their
    order. A value computed from parameters alone is computed where an operation with data first needs it; a cast of all
    parameters to 16 bits ahead of everything is an example. So each parameter is requested by its own layer.
    """

    def __init__(self, program: Program, parameters: int) -> None:
        self.program = program
        self.parameters = program.inputs[:parameters]
        self.gradients: dict[int, list[int]] = {}  # value's number -> places of the parameters whose gradient the value is
        for place, number in enumerate(program.outputs[len(program.outputs) - parameters :]):
            self.gradients.setdefault(number, []).append(place)
        data = set(program.inputs[parameters:])
        data |= {number for number in program.captured if isinstance(program.constants[number], jax.core.Tracer)}
        data = data or set(program.captured)  # the loss closes over its data
        trained = set(self.parameters)  # values that depend on a parameter
        self.steps: list[TracedOperation] = []  # operations that use data, in order
        for operation in program.operations:
            uses = set(operation.operands)
            if not uses.isdisjoint(trained):
                trained.update(operation.results)
            if operation.has_effects or not uses.isdisjoint(data):
                data.update(operation.results)
                self.steps.append(operation)
        self.activations = data & trained  # values that depend on data and on a parameter

    def values(self, parameter: Callable[[int], Any], others: Sequence[Any]) -> Lazy:
        """The program's values. ``parameter`` makes a parameter by its place, when first requested; ``others`` are the other
        inputs."""
        give = {number: partial(parameter, place) for place, number in enumerate(self.parameters)}
        return Lazy(self.program, dict(zip(self.program.inputs[len(self.parameters) :], others)), give)

    def first_use(self) -> list[int]:
        """The places of all ``parameters``, in the order in which forward first uses them. Parameters that it does not use
        come last."""
        place = {number: index for index, number in enumerate(self.parameters)}
        order: dict[int, None] = {}
        seen: set[int] = set()
        wanted = [operand for operation in self.steps for operand in operation.operands]
        for first in (*wanted, *self.program.outputs):
            asked = [first]
            while asked:
                if (number := asked.pop()) in seen:
                    continue
                seen.add(number)
                if number in place:
                    order[place[number]] = None
                elif (operation := self.program.maker.get(number)) is not None:
                    asked += reversed(operation.operands)
        return list(order | dict.fromkeys(range(len(self.parameters))))


def has_token(value: Any) -> bool:
    """Whether ``value`` has an element for :func:`token_of`."""
    return value.size > 0 and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)


def token_of(value: Any) -> Any:
    """One element of ``value``, available only once all of ``value`` is."""
    # The compiler must not see how the element is computed: an element of a padded array would be known at once.
    value = jax.lax.optimization_barrier(value)
    return value[(0,) * value.ndim]


def after(value: Any, zero: Any) -> Any:
    """``value``, available only once ``zero`` is computed. ``zero`` is an integer that is 0, which the compiler does not
    know."""
    if not value.ndim:
        return jnp.where(zero == 0, value, jnp.zeros_like(value))
    # One element is overwritten with itself, which happens in place. The compiler would remove a barrier before it decides the
    # order of operations.
    first = jax.lax.slice(value, (0,) * value.ndim, (1,) * value.ndim)
    return jax.lax.dynamic_update_slice(value, first, (zero,) * value.ndim)
