"""The flags and checks by which ranks compare, in each round, what they do, so that they cannot diverge unnoticed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch

import commsched

from ...core.errors import TransportError, UnsupportedError
from ...core.group import TensorGroup
from ...core.manifest import TensorSpec
from ..common.step_flags import digests_differ, end_with_difference
from .compared import by_name
from .device import Device, register_on
from .edits import Edits
from .guard import guard, release, unguarded
from .samples import Samples, first_sample_difference
from .slot import CONTRIBUTED, Slot

_FIRST = 19  # number of floats in the second set before the floats for each parameter


@dataclass(frozen=True)
class BackwardShares:
    """The first set of flags, sent when backward is over. Each float is a share of ranks (0 to 1); the comment beside it says
    what these ranks do."""

    unfrozen: float  # have a parameter that needs a place in a buffer, or may need one later; of the live ranks
    adding: float  # have run no backward, but wait to add parameters
    share: list[float]  # by flag: have a gradient for the parameter


@dataclass(frozen=True)
class Whose:
    """The ranks of which something holds, as far as their ``count`` and the sum of their numbers tell: one of them, or all but
    one."""

    count: int
    total: int  # of the ranks' numbers, counted from 1
    world_size: int

    def only(self) -> int | None:
        """The rank, if it holds of one only."""
        return self.total - 1 if self.count == 1 else None

    def missing(self) -> int | None:
        """The rank of which alone it does not hold."""
        return self.world_size * (self.world_size + 1) // 2 - self.total - 1 if self.count == self.world_size - 1 else None


@dataclass(frozen=True)
class StepShares:
    """The second set of flags, sent at the end of the round. Each float is a share of ranks (0 to 1); the comment beside it
    says what these ranks do. All but the first two are shares of the live ranks."""

    live: float  # are live: they have not run out of batches (see join.py), and decide how the round ends
    own_changed: float  # have changed gradients that were their own sums, not averages
    committed: float  # called step()
    unfrozen: float  # as in BackwardShares
    hyper_parameters_differ: bool  # whether the ranks' hyper-parameters differ
    recorded: float  # record all edits of gradients that can be recorded: others may make them in compiled code
    edits_differ: bool  # whether the ranks have recorded different edits of gradients
    edit_sizes: float  # the mean of the sizes of the numbers in these edits
    asked: list[float]  # by order: asked for norms of gradients
    stepped: Whose  # called step()
    dropped: Whose  # have dropped a gradient that they submitted
    replaced: Whose  # have changed one
    share: list[float]  # by flag: still have a gradient for the parameter
    changed: list[float]  # by flag: have something other than the gradient they submitted or its average
    samples: torch.Tensor  # means over ranks of the sample norms and projections of read or changed gradients, on the host
    own_samples: torch.Tensor | None  # this rank's norms and projections


def _live(exhausted: float, live: float, none: float) -> float:
    """The share of live ranks, and ``none`` if there are none. A rank whose model is gone sends zeros only (see layout.py). It
    is not exhausted, so the others notice that it does not do as they do."""
    return (live or none) if exhausted else 1.0


class _Floats:
    """Holds numbers as a tensor on the host. The tensor is reused while the numbers stay the same, as in most steps."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._numbers: Sequence[float] | None = None
        self._tensor: torch.Tensor

    def of(self, numbers: Sequence[float], missing: int) -> torch.Tensor:
        """Return ``numbers``, followed by ``missing`` NaNs. The tensor must not be written to, and is valid until the next
        call."""
        if numbers != self._numbers:
            self._numbers = numbers
            self._tensor = torch.tensor([*numbers, *[math.nan] * missing], dtype=self._dtype, device="cpu")
        return self._tensor


class Flags:
    """Two sets of floats that are averaged over the ranks, some of them per parameter of the optimizer.

    Each set is a group of its own. So no gradient shares a partition with the flags and waits for them, and both sets are sent
    before all gradients but the first ones.
    """

    def __init__(self, session: commsched.Session, device: Device, parameters: int) -> None:
        self._device = device
        self._rank, self._world_size = session.rank, session.world_size
        self._used_group, (self._used,) = register_on(
            session, device, [TensorSpec("commsched.used", (4 + parameters,), "float32")]
        )
        self._kept_group, (self._kept,) = register_on(
            session, device, [TensorSpec("commsched.kept", (_FIRST + 4 * parameters,), "float64")]
        )  # float64, because norms are compared and no wire dtype narrows float64
        self._all_used: BackwardShares | None = None  # the averaged flags of this round, once they were read
        self._all_kept: StepShares | None = None
        self._own: torch.Tensor | None = None  # this rank's norms and projections of samples
        self._digests = 0.0, 0.0  # of this rank's hyper-parameters and edits
        self._say_used, self._say_kept = _Floats(torch.float32), _Floats(torch.float64)

    @property
    def registered(self) -> list[tuple[TensorGroup, list[torch.Tensor]]]:
        """The groups of the flags, with their tensors."""
        return [(self._used_group, [self._used]), (self._kept_group, [self._kept])]

    def begin_step(self) -> None:
        self._used_group.begin_step()
        self._kept_group.begin_step()

    def settle(self) -> None:
        """Wait until the last round is over on all ranks."""
        self.used()
        self.kept()

    def offer_used(self, live: bool, unfrozen: bool, adding: bool, used: Sequence[bool]) -> None:
        self._all_used = None
        with self._device.copying():
            self._used.copy_(self._say_used.of([not live, live, unfrozen, adding, *used], 0))
        self._used_group.notify_ready(0)

    def offer_kept(
        self,
        live: bool,
        own_changed: bool,
        committed: bool,
        unfrozen: bool,
        kept: Sequence[bool],
        changed: Sequence[bool],
        samples: torch.Tensor | None,
        compared: tuple[float, bool, float, float],
        asks: list[bool],
    ) -> None:
        """Submit this rank's second set of flags, whose meaning :class:`StepShares` says. Never waits. ``samples`` is the
        result of ``Samples.of``; ``compared`` are the digest of hyper-parameters, whether edits are compared,
        and their digest and sizes; ``asks`` are ``Measures.asks``."""
        self._all_kept = None
        self._own, self._digests = samples, (compared[0], compared[2])
        dropped = any(changed) and any(each and not still for each, still in zip(changed, kept))
        replaced = any(changed) and any(each and still for each, still in zip(changed, kept))
        place = self._rank + 1
        whose = [place * committed, dropped, place * dropped, replaced, place * replaced]
        numbers = [not live, live, own_changed, committed, unfrozen, *compared, *asks, *whose, *kept, *changed]
        with self._device.copying():
            self._kept.copy_(self._say_kept.of(numbers, 2 * len(kept)))
        if samples is not None:
            self._kept[-samples.numel() :].copy_(samples.view(-1))
        self._device.when_written(partial(self._kept_group.notify_ready, 0))

    def are_there(self) -> bool:
        return self._used_group.proxies[0].is_open and self._kept_group.proxies[0].is_open

    def used(self) -> BackwardShares:
        """Wait until backward is over on all ranks, and return the first flags."""
        if self._all_used is None:
            self._used_group.proxies[0].wait()
            with self._device.copying():
                exhausted, live, unfrozen, adding, *share = self._used.tolist()
            self._all_used = BackwardShares(unfrozen / _live(exhausted, live, 1.0), adding, share)
        return self._all_used

    @property
    def are_kept(self) -> bool:
        """Whether :meth:`kept` need not wait."""
        return self._all_kept is not None or self._kept_group.proxies[0].is_open

    def kept(self) -> StepShares:
        """Wait until the round is over on all ranks, and return the second flags."""
        if self._all_kept is None:
            self._kept_group.proxies[0].wait()
            with self._device.copying():
                kept = self._kept.to("cpu", copy=True)
                own = self._own.to("cpu") if self._own is not None else None
            count = (len(kept) - _FIRST) // 4
            exhausted, live, own_changed = kept[:3].tolist()
            live = _live(exhausted, live, 0.0)
            if 0.0 < live < 1.0:
                kept[3:] /= live
            committed, unfrozen, digest, recorded, edits, sizes = kept[3:9].tolist()
            differ, edits_differ = digests_differ(self._digests[0], digest), digests_differ(self._digests[1], edits)
            asked = kept[9:14].tolist()
            ranks = self._world_size if live == 1.0 else 0  # else the ranks that decide are not all, and nobody is named
            whose = [round(ranks * share) for share in kept[14:_FIRST].tolist()]
            share, changed = kept[_FIRST : _FIRST + 2 * count].view(2, count).tolist()
            samples = kept[_FIRST + 2 * count :].view(2, count)
            self._all_kept = StepShares(
                live,
                own_changed,
                committed,
                unfrozen,
                differ,
                recorded,
                edits_differ,
                sizes,
                asked,
                Whose(round(ranks * committed), whose[0], ranks),
                Whose(whose[1], whose[2], ranks),
                Whose(whose[3], whose[4], ranks),
                share,
                changed,
                samples,
                own,
            )
        return self._all_kept


class OwnSums:
    """Remembers gradients that backward has made but that do not travel yet, to detect whether the user has changed them.

    This costs nothing until a gradient is read. Then it costs one norm, because a change through ``.data`` leaves no trace.
    """

    def __init__(self) -> None:
        self._sums: dict[Slot, _OwnSum] = {}

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._sums

    def note(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Remember ``gradient``, the ``.grad`` of ``slot``, after backward has added to it."""
        known = self._sums.get(slot)
        if known is not None:
            if known.follow(gradient):
                return
            release(known.gradient)
        self._sums[slot] = _OwnSum(gradient)

    def forget(self) -> None:
        """Forget all gradients, because they travel from here on."""
        for own in self._sums.values():
            release(own.gradient)
        self._sums.clear()

    def changed(self) -> str | None:
        """The name of a parameter whose gradient differs from backward's, and was neither dropped nor zeroed; else None."""
        with unguarded():
            return next((slot.name for slot, own in self._sums.items() if own.is_changed(slot.parameter.grad)), None)


class _OwnSum:
    def __init__(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient
        self._version = gradient._version
        self._norm: float | None = None  # norm of the gradient when it was first read
        guard(gradient, self._read_by(ref(self)))

    def follow(self, gradient: torch.Tensor) -> bool:
        """Note that backward has added to ``gradient``. Return whether that is this gradient, which nobody has read so far."""
        if gradient is not self.gradient or self._norm is not None:
            return False
        with unguarded():
            self._version = gradient._version
        return True

    @staticmethod
    def _read_by(weak: ref[_OwnSum]) -> Callable[[], None]:
        def read() -> None:
            own = weak()
            if own is not None:  # else the model is gone, so no change need be detected
                own._read()

        return read

    def _read(self) -> None:
        release(self.gradient)
        self._norm = norm(self.gradient)

    def is_changed(self, gradient: torch.Tensor | None) -> bool:
        if gradient is None:
            return False
        as_it_was = (
            gradient is self.gradient
            and gradient._version == self._version
            and (self._norm is None or norm(gradient) == self._norm)
        )
        return not as_it_was and norm(gradient) != 0.0


def require_same_end(kept: StepShares, committed: bool, rank: int, step: int) -> None:
    """Require that all ranks end the round in the same way. ``committed`` says whether ``rank`` called step(). Raises
    TransportError if some ranks called step() and others did not."""
    if kept.committed != committed:
        stepped, other = f"called step() in step {step}", "dropped the gradients of that round or ran backward again"
        here, there = (stepped, other) if committed else (other, stepped)
        other_rank = kept.stepped.missing() if committed else kept.stepped.only()
        who = "another rank" if other_rank is None else f"rank {other_rank}"
        raise TransportError(
            f"rank {rank} {here}, but {who} {there}: all ranks must call step() after the same backward passes, or "
            "ranks would diverge. Look for a caught exception, a skipped step() or another number of backward passes. If ranks "
            "use different parts of the model in several passes before step(), put all but the last within optimizer.no_sync()"
        )


def require_equal_hyper_parameters(
    kept: StepShares, session: commsched.Session, label: str, step: int, groups: Sequence[Mapping[str, Any]], keys: Set[str]
) -> None:
    """Require that all ranks have the same hyper-parameters in ``step``: the values of ``keys`` in ``groups``, those of this
    rank's optimizer. Raises RanksDiverged, which names the first that differs and the ranks' values."""
    if kept.hyper_parameters_differ:
        end_with_difference(session, f"hyper-parameters{label}", step, by_name(groups, keys))


def require_added_alike(share: float, rank: int) -> None:
    """Require that all ranks add parameters, or none. ``share`` is the share of ranks that wait to add some. Raises
    UnsupportedError if only some wait."""
    if 0 < share < 1:
        raise UnsupportedError(
            f"some ranks called add_param_group() while others trained on (seen on rank {rank}): call it on all ranks, between "
            "the same steps"
        )


def require_unfrozen_alike(share: float, late: Iterable[Slot], rank: int) -> None:
    """Require that all ranks have unfrozen parameters, or none. ``share`` is the share of ranks that have some; ``late`` are
    the parameters that have no place in a buffer. Raises UnsupportedError if only some ranks have."""
    if 0 < share < 1:
        names = [slot.name for slot in late if slot.state in CONTRIBUTED or slot.parameter.requires_grad]
        here = f"'{names[0]}' does on rank" if names else "no such parameter does on rank"
        raise UnsupportedError(
            f"a parameter that required no gradient so far requires one now, or has one, on some ranks only: {here} {rank}; "
            "unfreeze it on all ranks"
        )


def require_averaged_before_changed(share: float, name: str | None, rank: int) -> None:
    """Require that no rank has changed gradients that were its own sums: the average of gradients that each rank has clipped is
    not the clipped average. Raises UnsupportedError if the ``share`` of ranks that have is not 0.

    ``name`` is a parameter whose gradient was changed on ``rank``, or None.
    """
    if share > 0:
        here, there = f"the gradient of '{name}' was changed on rank {rank}", "a gradient was changed on another rank"
        raise UnsupportedError(
            f"{there if name is None else here} (clipped, say) when the last backward before step() was within no_sync(), so "
            "it was that rank's own sum, not an average: put the last backward outside no_sync()"
        )


def require_changed_alike(kept: StepShares, slots: Sequence[Slot]) -> None:
    """Require that all ranks have changed a gradient, or none. ``slots`` are by flag. Raises UnsupportedError if some ranks
    have changed or dropped a gradient since it was submitted, and others have the average, or no gradient."""
    for flag, changed in enumerate(kept.changed):
        if changed and kept.share[flag] and not changed == kept.share[flag] == 1.0:  # not dropped by all, nor changed by all
            dropped, replaced = kept.dropped.only(), kept.replaced.only()
            who = f" (rank {dropped} has dropped one)" if dropped is not None else ""
            if dropped is None and replaced is not None:
                who = f" (rank {replaced} has changed one)"
            raise UnsupportedError(
                f"the gradient of '{slots[flag].name}' was changed or dropped before step() on some ranks{who}, but others "
                "have what was averaged, or none: ranks would diverge"
            )


def require_equal_values(
    kept: StepShares, slots: Sequence[Slot], samples: Samples, edits: Edits, unaveraged: Callable[[], str | None]
) -> None:
    """Require that a gradient which all ranks have read, and may have changed, has the same values on all ranks, as far as
    ``samples`` and recorded ``edits`` show. ``slots`` are by flag. Raises UnsupportedError if values differ by more than
    rounding.

    ``unaveraged`` returns the name of a parameter of the model whose gradient nothing averages, if there is one.
    """
    different = None
    if (kept.recorded > 0.99 or edits.use_norms) and (kept.edits_differ or edits.differs(kept.edit_sizes)):
        # It may be another rank that recorded them, so this rank's own edits would not tell the name.
        different = next((flag for flag, changed in enumerate(kept.changed) if changed), 0)
    elif kept.own_samples is not None:
        different = first_sample_difference(kept.samples, kept.own_samples, samples.rounding)
    if different is None:
        return
    other = unaveraged()
    hint = (
        f" '{other}' is in no ScheduledOptimizer, so its gradient is this rank's own: freeze it, give it to an optimizer, "
        "or clip without it"
        if other is not None
        else ""
    )
    raise UnsupportedError(
        f"the gradient of '{slots[different].name}' was changed before step() to other values here than on other ranks "
        f"(clipped by a norm of this rank only, or with other random numbers?): ranks would diverge.{hint}"
    )


def norm(gradient: torch.Tensor) -> float:
    """The norm of ``gradient``, computed in float64; -1 if it is not finite."""
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    length = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return length if math.isfinite(length) else -1.0
