"""What all ranks must have done alike, or they would part: each refusal names the parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from ...core.errors import ManifestMismatch, TransportError, UnsupportedError
from .flags import Kept, Used
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
            "passes): the ranks would part"
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
    return [math.nan if slot is None or slot.parameter.grad is None else _norm(slot.parameter.grad) for slot in slots]


def require_equal_norms(kept: Kept, slots: Sequence[Slot], unaveraged: Callable[[], str | None]) -> None:
    """Whatever ranks have made of a gradient that all have read, it must be the same: only an average stays one.

    Args:
        slots: by flag.
        unaveraged: the name of a parameter of the model whose gradient is averaged by nobody, if there is one.

    Raises:
        UnsupportedError: it is not, by more than rounding.
    """
    for slot, norm, own in zip(slots, kept.norm, kept.own_norm):
        if norm == own or math.isnan(norm) or abs(own - norm) <= _rounding(slot.parameter) * max(abs(own), abs(norm)):
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


def _norm(gradient: torch.Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm = float(torch.linalg.vector_norm(values.detach(), dtype=torch.float64))
    return norm if math.isfinite(norm) else -1.0


def _rounding(parameter: torch.Tensor) -> float:
    """Relative, of the norm of a gradient that different processors have scaled alike."""
    of_the_factor = 1e-10 if parameter.dtype == torch.float64 else 1e-5
    return of_the_factor + 2 * torch.finfo(parameter.dtype).eps / math.sqrt(max(1, parameter.numel()))


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
