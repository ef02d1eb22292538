"""Norms of gradients whose averages are on the way: those who make the averages measure them, and tell all ranks.

A norm of gradients is a deferred tensor if the norms of the round are measured. They are from the round on that follows two
rounds in which all ranks have asked for them; until then whoever asks waits for the averages.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol
from weakref import WeakSet

import numpy as np
import torch

import commsched

from ...core.errors import UnsupportedError
from ...core.group import TensorGroup
from .deferred import Deferred, Value, defer, digest_of_text, value_of
from .edits import SCALING, Edit, Owner, owners_of, recorded
from .guard import LATER, mark, unguarded
from .slot import Slot

log = logging.getLogger("commsched")

#: The orders of norms that can be measured.
ORDERS = (2.0, math.inf, 1.0, 3.0)

#: How far a norm of a dtype that torch computes may be from a measured one, relatively.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}


class GroupNorms(Protocol):
    """The norms of the averages of one group, as ``Session.add_norms`` returns them."""

    @property
    def is_open(self) -> bool: ...

    def of(self, order: float) -> Any: ...


class RoundNorms:
    """The norms of one round. They can be had after the round, too."""

    def __init__(self, norms: dict[tuple[TensorGroup, float], GroupNorms]) -> None:
        self._norms = norms
        # Held while norms of the round are awaited, so that the next round begins after that. A signal handler may come here
        # meanwhile.
        self._lock = threading.RLock()
        self._kept: dict[tuple[TensorGroup, float], Any] = {}
        self._used: set[tuple[TensorGroup, float]] = set()
        self._values: WeakSet[Value] = WeakSet()  # those that somebody holds
        self.is_over = False

    @property
    def is_open(self) -> bool:
        return self.is_over or all(self._norms[key].is_open for key in self._used)

    def use(self, slots: Sequence[Slot], order: float) -> bool:
        """Whether the norms of the gradients of ``slots`` are measured. If so, they can be had from now on."""
        keys = {(slot.group, order) for slot in slots}
        if any(slot.tensor < 0 or (slot.dtype.is_complex and order != 2) for slot in slots) or not keys <= self._norms.keys():
            return False
        self._used |= keys
        return True

    def of(self, slots: Sequence[Slot], order: float) -> Any:
        """The norms of the averages of ``slots``. Waits for them."""
        with self._lock:
            for key in {(slot.group, order) for slot in slots}:
                if key not in self._kept:
                    self._kept[key] = self._norms[key].of(order)
        return np.array([self._kept[slot.group, order][slot.tensor] for slot in slots])

    def end(self) -> None:
        """Called before the next round begins."""
        with self._lock:
            for key in self._used - self._kept.keys():
                self._kept[key] = self._norms[key].of(key[1])
            self.is_over = True
        for value in list(self._values):
            value.get()  # else one that is kept and never read would keep the parameters

    def value(self, compute: Callable[[], torch.Tensor], kind: str, length: int) -> Value:
        """Return a value that depends on these norms."""
        value = Value(compute, kind, 0.0, frozenset([self]), length)
        self._values.add(value)
        return value


@dataclass
class NormsOfRound:
    """The orders of the norms that a round measures, and those that all ranks had asked for in the round before."""

    orders: list[float] = field(default_factory=list)
    asked_before: list[float] = field(default_factory=list)  # 0: any order


class Measures:
    """Which norms of one exchange are measured. ``next`` is of the next round. It changes until that begins, by what all ranks
    have asked for in the round before, and not after that."""

    NOTHING: ClassVar = [False] * (len(ORDERS) + 1)  # the ``asks`` of a rank that takes no part

    def __init__(self, session: commsched.Session, on_host: bool = True) -> None:
        self._session = session
        self.next = NormsOfRound()
        self._norms: dict[tuple[TensorGroup, float], GroupNorms] = {}
        # On a device the user's norms are tensors there, and the measured ones are not.
        self._is_refused = not (session.can_measure_norms and on_host)
        self.asked: set[float] = set()  # by this rank, in this round; 0: for any order
        self.current = RoundNorms({})

    @property
    def asks(self) -> list[bool]:
        """What this rank has asked for in this round, to be sent to all ranks."""
        return [order in self.asked and not self._is_refused for order in (*ORDERS, 0.0)]

    def resume(self, norms: NormsOfRound) -> None:
        """Go on from what another session's :attr:`next` was. All ranks must call it alike, before the first round."""
        self.next = norms

    def begin(self, groups: Sequence[TensorGroup]) -> None:
        """Called on all ranks before the first round of ``groups``. Collective, if it adds norms."""
        orders = self.next.orders
        if not self._is_refused and any((group, order) not in self._norms for group in groups for order in orders):
            self._add(groups, orders)
        self.current = RoundNorms(self._norms)
        self.next = NormsOfRound(list(orders), list(self.next.asked_before))

    def any_order(self, slots: Sequence[Slot]) -> float | None:
        """An order in which the norms of ``slots`` are measured, the largest if there are several."""
        orders = sorted({order for _, order in self._norms}, reverse=True)
        return next((order for order in orders if self.current.use(slots, order)), None)

    def end_round(self) -> None:
        """Called when the averages of the round are about to be overwritten, or when there are no more rounds."""
        if not self.current.is_over:
            self.current.end()

    def decide(self, shares: Sequence[float], committed: bool) -> None:
        """Decide what the next round measures, once for each round. ``shares`` of the ranks have asked in the last one, and
        ``committed`` says whether it ended with ``step()``."""
        asked = {order for order, share in zip((*ORDERS, 0.0), shares) if share > 0.99}
        self.next.orders = self._orders_with(asked.intersection(self.next.asked_before))
        if asked or committed:
            self.next.asked_before = list(asked)

    def begin_round(self, groups: Sequence[TensorGroup]) -> None:
        """Called on all ranks between two rounds of ``groups``, after :meth:`decide`. Collective, if it adds norms."""
        self.end_round()
        self.asked.clear()
        self.begin(groups)

    def _orders_with(self, wanted: set[float]) -> list[float]:
        """The orders that are measured if ``wanted`` are measured too."""
        orders = self.next.orders
        new = [order for order in ORDERS if order in wanted and order not in orders]
        if not new and 0.0 in wanted and not orders:
            new = [math.inf]
        return [*orders, *new]

    def _add(self, groups: Sequence[TensorGroup], orders: list[float]) -> None:
        norms = dict(self._norms)
        try:
            for group in groups:
                missing = [order for order in orders if (group, order) not in norms]
                if missing:
                    measured = self._session.add_norms(group, missing)
                    norms.update({(group, order): measured for order in missing})
        except UnsupportedError as error:
            self._is_refused = True
            log.info("norms of gradients are read when all averages are there: %s", error)
            return
        self._norms = norms


def _norm_of(owner: Owner, slots: Sequence[Slot], order: float, dtype: torch.dtype) -> Value | None:
    """The norms of the gradients of ``slots``, as they are now; None if they are not measured."""
    measures, edits = owner.measures, owner.edits
    measures.asked.add(order)
    before = [list(edits.of(slot)) for slot in slots]
    if not all(edit.is_scaling for each in before for edit in each) or not measures.current.use(slots, order):
        return None
    current = measures.current
    kind = digest_of_text(repr((order, str(dtype), [slot.flag for slot in slots], [len(each) for each in before])))
    read = [index for index, slot in enumerate(slots) if slot.was_read]
    actual: dict[int, torch.Tensor] = {}
    if read:  # anything may have been done to these, through other tensors in their memory
        with torch.no_grad(), unguarded():
            actual = dict(zip(read, torch._foreach_norm([slots[index].gradient for index in read], order)))
    wide = {index: float(value) for index, value in actual.items()}
    rounding = {index: _ROUNDING.get(slots[index].gradient.dtype, 0.0) for index in actual}

    def compute() -> torch.Tensor:
        norms = current.of(slots, order)
        factors: dict[Edit, float] = {}
        for index, each in enumerate(before):
            for edit in each:
                if edit not in factors:
                    factors[edit] = edit.factor()
                norms[index] *= factors[edit]
        for index, value in wide.items():
            # If they are equal up to rounding, this rank goes on with the bits of ranks that have not read the gradient.
            if not abs(value - norms[index]) <= rounding[index] * abs(value):
                norms[index] = value
        return torch.from_numpy(norms).to(dtype)

    return current.value(compute, kind, len(slots))


def _foreach_norm(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the norms of a list of gradients, deferred, or NotImplemented."""
    if len(arguments) > 2 or keywords.keys() - {"ord"}:
        return NotImplemented
    norms = _deferred_norms(list(arguments[0]), keywords.get("ord", arguments[1] if len(arguments) > 1 else 2))
    return NotImplemented if norms is None else norms


def _norm(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the norm of one gradient, deferred, or NotImplemented."""
    given = dict(zip(("input", "order"), arguments))
    given.update({"order" if name in ("p", "ord") else name: value for name, value in keywords.items()})
    others = [value for name, value in given.items() if name not in ("input", "order", "keepdim")]
    order = given.get("order", 2)
    if len(arguments) > 2 or given.get("keepdim") or any(value is not None for value in others) or "input" not in given:
        return NotImplemented
    norms = _deferred_norms([given["input"]], 2 if order in ("fro", None) else order)
    if norms is None:
        return NotImplemented
    mark(norms[0])
    return norms[0]


def _deferred_norms(gradients: list[Any], order: Any) -> list[torch.Tensor] | None:
    if isinstance(order, bool) or not isinstance(order, int | float) or float(order) not in ORDERS or not gradients:
        return None
    found = owners_of(gradients)
    if found is None:
        return None
    dtypes = {slot.dtype for slots in found.values() for slot in slots}
    if len(dtypes) > 1:
        return None
    (dtype,) = dtypes
    dtype = dtype.to_real()
    norms: dict[int, list[torch.Tensor]] = {}  # by the id of the gradient
    for owner, slots in found.items():
        value = _norm_of(owner, slots, float(order), dtype)
        if value is None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            places = torch.full((len(slots),), math.nan, dtype=dtype).unbind()
        for index, (slot, place) in enumerate(zip(slots, places)):
            norms.setdefault(id(slot.gradient), []).append(defer(place, value, index))
    return [norms[id(gradient)].pop(0) for gradient in gradients]


def _check_and_unscale(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Record GradScaler's division by the scale. Whether anything is not finite is deferred, in the tensor for that."""
    if len(arguments) != 3 or keywords:
        return NotImplemented
    gradients, found_inf, inverse = arguments
    number = recorded(inverse)
    if number is None or recorded(found_inf) is None or found_inf.dtype is not torch.float32:
        return NotImplemented
    found = owners_of(gradients)
    if found is None:
        return NotImplemented
    measured = []  # for each owner: the norms, and what they are of
    for owner, slots in found.items():
        owner.measures.asked.add(0.0)
        order = owner.measures.any_order(slots)
        value = _norm_of(owner, slots, order, torch.float64) if order is not None else None
        if value is None:
            return NotImplemented
        measured.append((value, slots))
    before = value_of(found_inf) if isinstance(found_inf, Deferred) else float(found_inf)

    def compute() -> torch.Tensor:
        largest = float(before.get() if isinstance(before, Value) else before)
        finite = all(bool(value.get().isfinite().all()) or _are_finite(value, slots) for value, slots in measured)
        return torch.tensor(max(largest, 0.0 if finite else 1.0), dtype=torch.float32)

    edit = Edit(_unscale, True, [number.value], {})
    for owner, slots in found.items():
        owner.edits.record(edit, function.__name__, slots, [number])
    values = [value for value, _ in measured] + ([before] if isinstance(before, Value) else [])
    kind = digest_of_text(repr([value.kind for value in values]))
    defer(found_inf, Value(compute, kind, 0.0, frozenset().union(*(value.sources for value in values))))
    return None


def _are_finite(norms: Value, slots: Sequence[Slot]) -> bool:
    """Whether the averages of ``slots`` are finite although a norm is not: powers of large numbers may be infinite. Waits for
    the averages."""
    if any(source.is_over for source in norms.sources):
        return False
    for slot in slots:
        for proxy in slot.proxies:
            proxy.wait()
    return all(bool(slot.gradient.isfinite().all()) for slot in slots)


def _unscale(gradients: list[torch.Tensor], inverse: torch.Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros((), dtype=torch.float32), inverse)


SCALING[_unscale] = False
LATER[torch._foreach_norm] = _foreach_norm
LATER[torch._amp_foreach_non_finite_check_and_unscale_] = _check_and_unscale
LATER.update(dict.fromkeys((torch.linalg.vector_norm, torch.norm, torch.Tensor.norm), _norm))
