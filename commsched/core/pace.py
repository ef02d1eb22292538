"""Finds ranks that are slower than the others. Step times cannot show this, because synchronous ranks wait for each other. So
ranks compare the time of a step that they spend without waiting. Pure: no thread, lock or clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import islice
from statistics import median
from typing import NamedTuple

#: Steps between two reports of a rank.
REPORT_STEPS = 50

#: The steps of more, early reports, by which no rank is named as slow: the first steps are not like the others.
EARLY_REPORTS = (20, 30, 40)

#: A report also has the median of each so many steps (a part), from the step ``PARTS_FROM`` on. Rank 0 keeps the last parts of
#: each rank: a rank that is slow is slower in all of them, and one that was disturbed for a while is not.
PART_STEPS = 5
PARTS_FROM = 5
PARTS_KEPT = 8

#: A rank is slow if, in ``SLOW_REPORTS`` consecutive reports, its own time is at least ``SLOW_FACTOR`` times the median of the
#: others and exceeds it by at least ``SLOW_SECONDS`` and by at least ``SLOW_SHARE`` of the whole step.
SLOW_FACTOR = 1.5
SLOW_SECONDS = 0.005
SLOW_SHARE = 0.1
SLOW_REPORTS = 2


class PaceReport(NamedTuple):
    """Medians over the :data:`REPORT_STEPS` steps before ``step``, or as many as there were, in seconds per step. ``own`` is
    the time without waiting, ``whole`` the whole time, ``parts`` the own time in each part since the last report, ``digest``
    that of this rank's gradients (see ``duplicates.py``), if they were sampled."""

    group: int
    step: int
    own: float
    whole: float
    parts: Sequence[float] = ()
    digest: str = ""


class Pace:
    """Measures this rank's steps. The core calls it with the core's lock held; ``now`` is in seconds."""

    def __init__(self) -> None:
        self._waits = 0  # number of threads that wait now
        self._since = 0.0  # time when the first of them began to wait
        self._waited = 0.0  # seconds before that in which any thread waited
        self._begun: dict[int, tuple[float, float]] = {}  # by group: start of the step, and the seconds waited until then
        self._steps: dict[int, deque[tuple[float, float]]] = {}  # by group: own and whole seconds of the last steps
        self._kept: tuple[int, int] | None = None  # bytes and index of the ended group whose last steps stay known

    def wait_begins(self, now: float) -> None:
        if self._waits == 0:
            self._since = now
        self._waits += 1

    def wait_ends(self, now: float) -> None:
        self._waits -= 1
        if self._waits == 0:
            self._waited += now - self._since

    def step_begins(self, group: int, step: int, now: float) -> PaceReport | None:
        """Note that ``step`` begins. Returns a report at :data:`EARLY_REPORTS` and every :data:`REPORT_STEPS` steps of a group,
        otherwise None."""
        waited = self._waited + (now - self._since if self._waits else 0.0)
        began, waited_before = self._begun.get(group, (now, waited))
        self._begun[group] = (now, waited)
        if step == 0:
            return None
        steps = self._steps.setdefault(group, deque(maxlen=REPORT_STEPS))
        steps.append((now - began - (waited - waited_before), now - began))
        if step % REPORT_STEPS and step not in EARLY_REPORTS:
            return None
        report = self.latest(group, step)
        return None if report is None else report._replace(parts=_parts([own for own, _ in steps], step))

    def latest(self, group: int, step: int, steps: int = REPORT_STEPS) -> PaceReport | None:
        """Medians over the last ``steps`` steps of ``group`` before ``step``, as far as they are remembered; None before the
        first step has ended."""
        known = self._steps.get(group)
        if not known:
            return None
        chosen = list(islice(known, max(0, len(known) - steps), None))
        return PaceReport(group, step, *(median(times) for times in zip(*chosen, strict=True)))

    def knows(self, group: int) -> bool:
        """Whether the last steps of ``group`` are remembered."""
        return group in self._steps

    def end(self, group: int, nbytes: int) -> int | None:
        """Note that ``group``, of that many bytes, has had its last step. The last steps of the largest group that has ended
        stay known, for the summary at the end of the job. Returns the group that is forgotten instead, if there is one."""
        self._begun.pop(group, None)
        if group not in self._steps or self._kept == (nbytes, group):
            return None
        ended, forgotten = (nbytes, group), self._kept
        if forgotten is not None and forgotten > ended:
            ended, forgotten = forgotten, ended
        self._kept = ended
        if forgotten is None:
            return None
        del self._steps[forgotten[1]]
        return forgotten[1]


def _parts(own: Sequence[float], step: int) -> tuple[float, ...]:
    """The median of each part that has ended since the report before the one at ``step``; ``own`` are the last steps' times."""
    before = max((at for at in (PARTS_FROM, *EARLY_REPORTS, step - REPORT_STEPS) if at < step), default=0)
    since = own[max(0, len(own) - (step - before)) :]
    return tuple(median(since[at : at + PART_STEPS]) for at in range(0, len(since), PART_STEPS))


class Stragglers:
    """Compares the reports of all ranks, on rank 0. Each rank reports in the order of its steps. One thread at a time."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._reports: dict[tuple[int, int], dict[int, PaceReport]] = {}  # by group and step, then by rank
        self._slow: dict[tuple[int, int], int] = {}  # by group and rank: consecutive reports in which it was slow
        self._named: set[int] = set()
        self._parts: dict[int, list[deque[float]]] = {}  # by group, then by rank: of the same steps on all ranks

    def add(self, rank: int, report: PaceReport) -> list[str]:
        """Add the report of ``rank``. Returns sentences about the ranks now found to be slow, each rank only once."""
        key = (report.group, report.step)
        reports = self._reports.setdefault(key, {})
        reports[rank] = report
        if len(reports) < self._world_size:
            return []
        # Not all ranks made the older reports of this group, and none of them still will.
        self._reports = {other: kept for other, kept in self._reports.items() if other[0] != key[0] or other[1] > key[1]}
        parts = self._parts.setdefault(report.group, [deque(maxlen=PARTS_KEPT) for _ in range(self._world_size)])
        for each, kept in sorted(reports.items()):
            parts[each].extend(kept.parts)
        if report.step in EARLY_REPORTS:
            return []
        own = sorted(each.own for each in reports.values())
        return [line for rank in sorted(reports) if (line := self._judge(rank, reports[rank], own)) is not None]

    def forget(self, group: int) -> None:
        """Forget what is known of ``group``. No further report of it may be added."""
        self._parts.pop(group, None)
        self._reports = {key: kept for key, kept in self._reports.items() if key[0] != group}
        self._slow = {key: count for key, count in self._slow.items() if key[0] != group}

    def own_parts(self, group: int) -> dict[int, tuple[float, ...]]:
        """By rank: its own seconds in the last parts that all ranks have reported, the same parts on each rank. Empty before
        the first."""
        return {rank: tuple(parts) for rank, parts in enumerate(self._parts.get(group, ()))}

    def _judge(self, rank: int, mine: PaceReport, own: Sequence[float]) -> str | None:
        """``own``: the own times of all ranks, in ascending order."""
        others = _median_without(own, mine.own)
        key = (mine.group, rank)
        if mine.own < SLOW_FACTOR * others or mine.own - others < max(SLOW_SECONDS, SLOW_SHARE * mine.whole):
            self._slow.pop(key, None)
            return None
        self._slow[key] = self._slow.get(key, 0) + 1
        if self._slow[key] < SLOW_REPORTS or rank in self._named:
            return None
        self._named.add(rank)
        return (
            f"rank {rank} is slow: it takes {mine.own * 1000:.0f} ms of a step by itself, without waiting, and the other ranks "
            f"{others * 1000:.0f} ms (medians of {REPORT_STEPS} steps before step {mine.step}); they wait for it"
        )


def _median_without(ascending: Sequence[float], one: float) -> float:
    """The median of all numbers but ``one`` of them. It is asked for each rank, so it looks at few of them."""
    place, number = bisect_left(ascending, one), len(ascending) - 1

    def at(index: int) -> float:
        return ascending[index if index < place else index + 1]

    return (at((number - 1) // 2) + at(number // 2)) / 2
