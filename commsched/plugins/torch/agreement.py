"""What all ranks must have done alike, or they would part: each refusal names the parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from ...core.errors import ManifestMismatch, TransportError, UnsupportedError
from .flags import Kept, Used
from .projection import projection
from .slot import Slot


def describe(slots: Sequence[Slot]) -> list[list[object]]:
    """As JSON."""
    return [[slot.name, list(slot.parameter.shape), str(slot.parameter.dtype), slot.is_sparse] for slot in slots]


def require_equal_parameters(described: Sequence[list[list[object]]]) -> None:
    """``described[r]`` is what rank ``r`` has.

    Raises:
        ManifestMismatch: names the first rank and parameter that differ.
    """
    for rank, theirs in enumerate(described):
        for ours, other in zip([*described[0], None], [*theirs, None]):
            if ours != other:
                raise ManifestMismatch(f"the optimizer has parameter {ours} on rank 0 but {other} on rank {rank}")


def require_same_end(kept: Kept, committed: bool, rank: int, step: int) -> None:
    """
    Raises:
        TransportError: some ranks called step() in a round, ``rank`` if it has ``committed``, and others did not.
    """
    if kept.committed != committed:
        stepped, other = f"called step() in step {step}", "dropped the gradients of that round or ran backward again"
        here, there = (stepped, other) if committed else (other, stepped)
        raise TransportError(
            f"rank {rank} {here}, but another rank {there} (a caught exception, a skipped step or another number of backward "
            "passes, or several that use different parts of the model on different ranks): the ranks would part"
        )


def require_added_alike(share: float, rank: int) -> None:
    """``share`` of the ranks waits to add parameters.

    Raises:
        UnsupportedError: some ranks do, and others train on.
    """
    if 0 < share < 1:
        raise UnsupportedError(
            f"some ranks called add_param_group() while others trained on (seen on rank {rank}): call it on all ranks, between "
            "the same steps"
        )


def require_unfrozen_alike(share: float, late: Iterable[Slot], rank: int) -> None:
    """``share`` of the ranks has unfrozen something; ``late`` are the parameters that have no place in a buffer.

    Raises:
        UnsupportedError: some ranks have, and others have not.
    """
    if 0 < share < 1:
        names = [slot.name for slot in late if slot.has_gradient or slot.parameter.requires_grad]
        here = f"'{names[0]}' does on rank" if names else "no such parameter does on rank"
        raise UnsupportedError(
            f"a parameter that required no gradient so far requires one now, or has one, on some ranks only: {here} {rank}; "
            "unfreeze it on all ranks"
        )


def require_averaged_before_changed(share: float, name: str | None, rank: int) -> None:
    """``share`` of the ranks has changed gradients that were their own; ``name`` is that of a parameter whose ``rank`` has.

    Raises:
        UnsupportedError: there is such a rank. The average of what each has clipped is not the clipped average.
    """
    if share > 0:
        here, there = f"the gradient of '{name}' was changed on rank {rank}", "a gradient was changed on another rank"
        raise UnsupportedError(
            f"{there if name is None else here} (clipped, say) when the last backward before step() was within no_sync(), so "
            "that it was that rank's own sum and no average: put the last backward outside no_sync()"
        )


def require_changed_alike(kept: Kept, slots: Sequence[Slot]) -> None:
    """``slots`` are by flag.

    Raises:
        UnsupportedError: some ranks have put something into a gradient since it was handed over, or dropped it, and others
            have the average, or nothing.
    """
    for flag, changed in enumerate(kept.changed):
        if changed and kept.share[flag] and not changed == kept.share[flag] == 1.0:  # neither dropped nor changed by all
            raise UnsupportedError(
                f"the gradient of '{slots[flag].name}' was changed or dropped before step() on some ranks, but others have "
                "what was averaged, or none: the ranks would part"
            )


def norms(slots: Sequence[Slot | None]) -> list[float]:
    """Of their gradients, whose averages were awaited. NaN for None; -1: it is not finite."""
    return [math.nan if slot is None or slot.parameter.grad is None else norm(slot.parameter.grad) for slot in slots]


def projections(slots: Sequence[Slot | None]) -> list[float]:
    """Likewise; 0 where it is not finite."""
    return [
        math.nan if slot is None or slot.parameter.grad is None else projection(_values(slot.parameter.grad)) for slot in slots
    ]


def require_equal_norms(kept: Kept, slots: Sequence[Slot], unaveraged: Callable[[], str | None]) -> None:
    """Whatever ranks have made of a gradient that all have read, it must be the same: only an average stays one. Told by its
    norm, and by its projection onto one direction, as there are edits that leave the norm: of signs, say.

    Args:
        slots: by flag.
        unaveraged: the name of a parameter of the model whose gradient is averaged by nobody, if there is one.

    Raises:
        UnsupportedError: it is not, by more than rounding.
    """
    for slot in slots:
        mean, own = kept.norm[slot.flag], kept.own_norm[slot.flag]
        if math.isnan(mean):
            continue
        longest = max(abs(own), abs(mean))
        apart = abs(kept.own_projection[slot.flag] - kept.projection[slot.flag])
        as_long = abs(own - mean) <= _rounding_of_norm(slot.parameter) * longest
        if as_long and (own < 0 or apart <= _rounding_of_projection(slot.parameter) * longest):
            continue
        other = unaveraged()
        hint = (
            f" '{other}' is in no ScheduledOptimizer, so its gradient is this rank's own: freeze it, give it to an optimizer, "
            "or clip without it"
            if other is not None
            else ""
        )
        raise UnsupportedError(
            f"the gradient of '{slot.name}' was changed before step() to other values here than on other ranks (clipped by a "
            f"norm of this rank only, or with other random numbers?): the ranks would part.{hint}"
        )


def norm(gradient: torch.Tensor) -> float:
    """In float64; -1: it is not finite."""
    length = float(torch.linalg.vector_norm(_values(gradient), dtype=torch.float64))
    return length if math.isfinite(length) else -1.0


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()


def _rounding_of_norm(parameter: torch.Tensor) -> float:
    """Relative, of a gradient that different processors have scaled alike: that of its elements averages out."""
    return _rounding_of_factor(parameter) + 2 * torch.finfo(parameter.dtype).eps / math.sqrt(max(1, parameter.numel()))


def _rounding_of_projection(parameter: torch.Tensor) -> float:
    """Relative to the norm."""
    return _rounding_of_factor(parameter) + 2 * torch.finfo(parameter.dtype).eps


def _rounding_of_factor(parameter: torch.Tensor) -> float:
    return 1e-10 if parameter.dtype == torch.float64 else 1e-5


def require_gradients(used: Used, slots: Sequence[Slot], rank: int) -> None:
    """
    Raises:
        UnsupportedError: other ranks have a gradient of one of ``slots``, and ``rank`` has none.
    """
    for slot in slots:
        if used.share[slot.flag] > 0 and not slot.has_gradient:
            raise UnsupportedError(
                f"gradients are read before step() (to clip them, say), but '{slot.name}' has one on other ranks and none on "
                f"rank {rank}: the ranks would part"
            )
