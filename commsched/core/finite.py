"""Finds the rank whose gradients were the first that are not finite. An average carries a NaN of one rank to all ranks, so the
averages cannot show this. Pure: no thread, lock or clock.

A loss of NaN turns nearly every gradient of its rank into NaN, and an update with the average turns the weights into NaN for
good. So it is enough to check both ends of each partition before it is sent, and to report only a state that lasts. A state
that passes does no more harm than in plain training, for example when a loss is scaled down until its gradients are finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .errors import ranks_text
from .manifest import ITEMSIZE, Manifest
from .task import CommTask

#: Consecutive steps of one group with gradients that are not finite, after which a rank reports it; it reports again after each
#: further such number. Loss scaling begins with a scale of 2 ** 16, which is 1 after 16 skipped steps.
LASTING_STEPS = 20

#: Bits of the exponent in the last byte of an element and in the byte before: all are set if the element is not finite.
_EXPONENT = {"float16": (0x7C, 0), "bfloat16": (0x7F, 0x80), "float32": (0x7F, 0x80), "float64": (0x7F, 0xF0)}
_ENDS = {dtype: (ITEMSIZE[dtype], *bits) for dtype, bits in _EXPONENT.items()}


class FiniteReport(NamedTuple):
    """Gradients of ``group`` on one rank were not finite in every step since ``step``; ``tensor`` was the first one found."""

    group: int
    step: int
    tensor: str


def looks_finite(dtype: str, data: memoryview) -> bool:
    """Whether the first and the last element are finite. ``data`` are the elements' bytes and must not be empty. True for a
    ``dtype`` that is not a floating-point type."""
    if dtype not in _ENDS:
        return True
    size, last, before = _ENDS[dtype]
    return (data[-1] & last != last or data[-2] & before != before) and (
        data[size - 1] & last != last or data[size - 2] & before != before
    )


class NotFinite:
    """Finds gradients of this rank that stay not finite. One thread at a time adds them."""

    def __init__(self) -> None:
        self._since: dict[int, FiniteReport] = {}  # by group
        self._last: dict[int, int] = {}  # by group: last step in which a gradient was not finite

    def forget(self, group: int) -> None:
        """Forget ``group``, which has had its last step. Any thread."""
        self._since.pop(group, None)
        self._last.pop(group, None)

    def add(self, task: CommTask, manifest: Manifest) -> FiniteReport | None:
        """Note that the gradients of ``task``, which are about to be sent, do not look finite. Returns a report if this has
        lasted, otherwise None."""
        group, step, at = task.group, task.step, task.partition
        first, last = (manifest.tensors[at.tensors[end]].name for end in (0, -1))
        # A plugin's own tensors are named "commsched."; NaN has a meaning in them.
        if first.startswith("commsched.") or self._last.get(group) == step:
            return None
        if self._last.get(group) != step - 1:
            starts_well = looks_finite(at.dtype, task.data[: ITEMSIZE[at.dtype]])
            self._since[group] = FiniteReport(group, step, last if starts_well else first)
        self._last[group] = step
        since = self._since[group]
        return since if (step - since.step + 1) % LASTING_STEPS == 0 else None


class FirstNotFinite:
    """Names, on rank 0 and only once, the rank that was the first. One thread at a time.

    One report is not enough, because the report of a rank that was earlier may still be in transit. But when a rank reports for
    the second time, a rank that has not reported has nothing to report.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._reports: dict[int, dict[int, FiniteReport]] = {}  # by group and rank
        self._has_spoken = False

    def add(self, rank: int, report: FiniteReport) -> str | None:
        """Add the report of ``rank``. Returns the line to log, once; otherwise None."""
        reports = self._reports.setdefault(report.group, {})
        again = rank in reports
        reports[rank] = report
        if self._has_spoken or (len(reports) < self._world_size and not again):
            return None
        self._has_spoken = True
        return _describe(reports)


def _describe(reports: Mapping[int, FiniteReport]) -> str:
    by_step: dict[int, list[int]] = {}
    for rank, report in sorted(reports.items()):
        by_step.setdefault(report.step, []).append(rank)
    (step, first), *others = sorted(by_step.items())
    later = "".join(f", {ranks_text(ranks)} since step {since}" for since, ranks in others)
    return (
        f"{ranks_text(first)} {'has' if len(first) == 1 else 'have'} had gradients that are not finite (NaN or infinite) in "
        f"every step since step {step}, '{reports[first[0]].tensor}' among them{later}; "
        "training goes on, as it would without commsched"
    )
