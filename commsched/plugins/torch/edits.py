"""Edits: operations in place on gradients whose averages are on the way, to be done when the averages have come.

``clip_grad_value_`` and the like multiply or clamp all gradients between backward and ``step()``. To do that at once would wait
for all averages. So the operation is recorded, and done by the update of each parameter, or for an earlier reader of its
gradient. All ranks must record the same: what they have recorded is compared at the end of the round.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import ref

import torch

from ...core.errors import ClosedError, UnsupportedError
from ..common.step_flags import digest_of_record
from .deferred import Deferred, Value, describe, is_number, value_of, weight
from .guard import LATER, resolver_of, unguarded
from .slot import GradientState, Slot

if TYPE_CHECKING:
    from .norms import Measures

_HAVE_PLACES = (GradientState.SUBMITTED, GradientState.ZEROS)


class _Places(Protocol):
    all: list[Slot]


class Owner(Protocol):
    """The exchange of some gradients, as this module uses it."""

    places: _Places

    @property
    def edits(self) -> Edits: ...

    @property
    def measures(self) -> Measures: ...

    def await_gradient(self, slot: Slot) -> None: ...

    def prepare_to_edit(self) -> bool: ...


class AwaitedGradient:
    """The guard of a gradient calls this before the gradient is read. It does not keep the exchange alive."""

    __slots__ = ("flag", "is_there", "name", "owner")

    def __init__(self, owner: ref[Any], flag: int, name: str) -> None:
        self.owner: Callable[[], Owner | None] = owner
        self.flag = flag
        self.name = name
        self.is_there = False  # the average was read in the open round; the gradient stays guarded, to see edits of it

    def __call__(self) -> None:
        owner = self.owner()
        if owner is not None:
            owner.await_gradient(owner.places.all[self.flag])
        elif not self.is_there:
            raise ClosedError(f"the gradient of '{self.name}' is read, but its model is gone, and its average with it")


class Recorded(NamedTuple):
    """A number in an edit, and how ranks compare it: what they must have in common exactly, and up to rounding."""

    value: Any  # a number, a tensor without dimensions, or a deferred one
    kind: str
    size: float


class Edit:
    """One operation in place on some gradients. ``arguments`` and ``keywords`` are those after the gradients."""

    __slots__ = ("_arguments", "_function", "_is_foreach", "_keywords")

    def __init__(self, function: Any, is_foreach: bool, arguments: Sequence[Any], keywords: dict[str, Any]) -> None:
        self._function = function
        self._is_foreach = is_foreach
        self._arguments = tuple(arguments)
        self._keywords = keywords

    @property
    def is_ready(self) -> bool:
        """Whether its numbers are there."""
        return all(value.is_there for value in (*self._arguments, *self._keywords.values()) if isinstance(value, Value))

    def wait(self) -> None:
        """Wait for its numbers."""
        for value in (*self._arguments, *self._keywords.values()):
            _got(value)

    def apply(self, gradients: list[torch.Tensor]) -> None:
        """Do it to ``gradients``. It waits for its numbers. The calling thread must be within ``unguarded()`` and
        ``no_grad()``."""
        arguments = [_got(value) for value in self._arguments]
        keywords = {name: _got(value) for name, value in self._keywords.items()}
        if self._is_foreach:
            self._function(gradients, *arguments, **keywords)
        else:
            for gradient in gradients:
                self._function(gradient, *arguments, **keywords)

    @property
    def is_scaling(self) -> bool:
        """Whether it multiplies all gradients by the same number."""
        return self._function in SCALING and len(self._arguments) == 1 and not self._keywords

    def factor(self) -> float:
        """By how much it changes the norm of a gradient, if it :attr:`is_scaling`. Waits for the number."""
        factor = abs(float(_got(self._arguments[0])))
        if not SCALING[self._function]:
            return factor
        return 1 / factor if factor else math.inf


def _got(value: Any) -> Any:
    return value.get() if isinstance(value, Value) else value


class Edits:
    """The edits of one exchange in one round. Any thread may record or apply them."""

    def __init__(self) -> None:
        self.are_compared = True  # False: compiled code may edit gradients, which is not recorded
        self._lock = threading.RLock()
        self._applies = False
        self._edits: dict[int, list[Edit]] = {}  # by flag, in the order in which they were made
        self._outstanding: set[int] = set()  # the flags of gradients whose edits are not done yet
        self._log: list[Any] = []  # what all ranks must have in common exactly, as JSON values
        self._sizes = 0.0  # and up to rounding: the sum of the logarithms of all numbers, with different weights
        self._rounding = 0.0  # how much that may differ
        self.use_norms = False  # an edit depends on a norm, whose bits other ranks have only if they have recorded the same
        self._unready: list[Edit] = []  # may have to wait for their numbers
        self._digest: tuple[list[Any], float] = [], 0.0  # of the last log that was not empty

    def begin_round(self) -> None:
        """Forget the edits of the last round, which are done."""
        if self._log:
            self._digest = self._log, self.digest()
            self._log, self._edits, self._outstanding = [], {}, set()
            self._sizes = self._rounding = 0.0
            self._unready, self.use_norms = [], False

    @property
    def flags(self) -> Iterable[int]:
        """The flags of gradients that were edited in this round."""
        return self._edits

    @property
    def are_ready(self) -> bool:
        """Whether :meth:`apply` would not wait."""
        while self._unready and self._unready[-1].is_ready:
            self._unready.pop()
        return not self._unready

    def of(self, slot: Slot) -> list[Edit]:
        """Return the edits that were recorded for the gradient of ``slot`` in this round so far."""
        return self._edits.get(slot.flag, [])

    def record(self, edit: Edit, name: str, slots: Sequence[Slot], numbers: Sequence[Recorded]) -> None:
        """Note ``edit`` of the gradients of ``slots``. It is done now for gradients that were read, as other tensors in their
        memory may be read at any time, without a guard."""
        with self._lock:
            if any(slot.was_read for slot in slots):
                edit.wait()  # an interrupted wait (Ctrl-C) leaves nothing half recorded
            self._log.append([name, [slot.flag for slot in slots], [number.kind for number in numbers]])
            exact = all(slot.dtype in (torch.float64, torch.complex128) for slot in slots)
            for number in numbers:
                self._sizes += weight(len(self._log)) * number.size
                self._rounding += 1e-10 if exact else 1e-5
            self.use_norms = self.use_norms or any(isinstance(number.value, Value) for number in numbers)
            if not edit.is_ready:
                self._unready.append(edit)
            there = []
            for slot in slots:
                self._edits.setdefault(slot.flag, []).append(edit)
                if slot.was_read:
                    there.append(slot.gradient)
                else:
                    self._outstanding.add(slot.flag)
            if there:
                with torch.inference_mode(False), torch.no_grad(), unguarded():
                    edit.apply(there)

    def apply(self, slots: Iterable[Slot]) -> None:
        """Do what was recorded for the gradients of ``slots`` and is not done yet. Their averages must be there."""
        if not self._outstanding:
            return
        with self._lock:
            if self._applies:
                raise UnsupportedError(
                    "a signal handler reads the model while the gradients are clipped or edited otherwise: let it note what is "
                    "to be done, and do that in the training loop"
                )
            alike: dict[tuple[Edit, ...], list[torch.Tensor]] = {}
            due = [slot for slot in slots if slot.flag in self._outstanding]
            for edit in dict.fromkeys(edit for slot in due for edit in self._edits[slot.flag]):
                edit.wait()  # an interrupted wait (Ctrl-C) leaves all edits outstanding
            self._applies = True
            try:
                due = [slot for slot in due if slot.flag in self._outstanding]  # else a handler has applied them
                for slot in due:
                    alike.setdefault(tuple(self._edits[slot.flag]), []).append(slot.gradient)
                with torch.inference_mode(False), torch.no_grad(), unguarded():
                    for edits, gradients in alike.items():
                        for edit in edits:
                            edit.apply(gradients)
            finally:  # not before: who finds them outstanding waits for the lock, or is the handler that is refused above
                self._outstanding.difference_update([slot.flag for slot in due])
                self._applies = False

    def digest(self) -> float:
        """A digest of what all ranks must have in common exactly; 0 if nothing was recorded."""
        if not self._log:
            return 0.0
        known, digest = self._digest
        return digest if self._log == known else digest_of_record(self._log)

    @property
    def sizes(self) -> float:
        """A number that all ranks must have in common up to rounding: see :meth:`differs`."""
        return self._sizes

    def differs(self, mean: float) -> bool:
        """Whether other ranks have recorded other numbers than this one. ``mean`` is the mean of their :attr:`sizes`."""
        return not abs(mean - self._sizes) <= self._rounding


def recorded(value: Any) -> Recorded | None:
    """Return ``value``, an argument of an operation, to be recorded; None if that is not possible."""
    if isinstance(value, Deferred) and value.dim() == 0:
        value = value_of(value)
        return Recorded(value, value.kind, value.size)
    if isinstance(value, torch.Tensor):
        if not is_number(value):
            return None
        value = value.detach().clone()
    elif not isinstance(value, int | float | None):
        return None
    return Recorded(value, *describe(value))


def owners_of(tensors: Sequence[Any]) -> dict[Owner, list[Slot]] | None:
    """Return whose gradients ``tensors`` are, if all of them are gradients that can be edited later."""
    found: dict[Owner, list[tuple[Slot, torch.Tensor]]] = {}
    for tensor in tensors:
        awaited: Any = resolver_of(tensor)
        owner = awaited.owner() if type(awaited) is AwaitedGradient else None
        if owner is None:
            return None
        found.setdefault(owner, []).append((owner.places.all[awaited.flag], tensor))
    for owner, pairs in found.items():
        if not owner.prepare_to_edit():
            return None
        if any(slot.rows is not None or slot.gradient is not it or slot.state not in _HAVE_PLACES for slot, it in pairs):
            return None
    return {owner: [slot for slot, _ in pairs] for owner, pairs in found.items()}


def _edit(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Record a call of ``function``, an operation in place. Return what the call returns, or NotImplemented."""
    is_foreach = function in _FOREACH
    given = arguments[0] if is_foreach else arguments[:1]
    numbers = [recorded(value) for value in (*arguments[1:], *keywords.values())]
    if not numbers or None in numbers or not given:
        return NotImplemented
    found = owners_of(given)
    if found is None:
        return NotImplemented
    values = [number.value for number in numbers if number is not None]
    count = len(arguments) - 1
    edit = Edit(function, is_foreach, values[:count], dict(zip(keywords, values[count:])))
    for owner, slots in found.items():
        owner.edits.record(edit, f"{function.__name__} {sorted(keywords)}", slots, [number for number in numbers if number])
    return arguments[0]


#: Operations that multiply; whether they divide.
SCALING: dict[Any, bool] = {torch.Tensor.mul_: False, torch.Tensor.div_: True}
SCALING.update({torch._foreach_mul_: False, torch._foreach_div_: True})
_FOREACH = frozenset(
    getattr(torch, name)
    for name in ("_foreach_mul_", "_foreach_div_", "_foreach_clamp_min_", "_foreach_clamp_max_")
    if hasattr(torch, name)
)
_IN_PLACE = [getattr(torch.Tensor, name) for name in ("mul_", "div_", "clamp_", "clip_", "clamp_min_", "clamp_max_")]
LATER.update(dict.fromkeys((*_FOREACH, *_IN_PLACE, torch.clamp_, torch.clip_), _edit))
