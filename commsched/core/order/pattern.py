"""Whether the order of readiness repeats from step to step, so that it may be frozen. Rank 0's; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..task import ALL_GATHER, CommTask
from .key import Key

#: A place in a frozen order: partition and verb.
Place = tuple[int, str]

STABLE_STEPS = 5

#: Neighbours that are computed at almost the same time change places from step to step; more than so many is another pattern.
SLACK = 2


@dataclass
class _Step:
    step: int = -1
    ready: list[Place] = field(default_factory=list)
    launched: list[Place] = field(default_factory=list)


@dataclass
class _Group:
    current: _Step = field(default_factory=_Step)
    last: _Step = field(default_factory=_Step)
    alike: int = 0  # steps in a row whose order of readiness was that of the step before


class Pattern:
    """Told of all that becomes ready on all ranks, and of all launches."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._nbytes: dict[int, int] = {}

    def add_group(self, group: int, nbytes: int) -> None:
        """There is a group, of that many bytes."""
        self._nbytes[group] = nbytes

    def became_ready(self, task: CommTask) -> list[Place] | None:
        """``task`` is ready on all ranks. If it is the first of a step of the largest group, and the steps before were alike:
        the order in which the last was launched."""
        group = self._groups.setdefault(task.group, _Group())
        first = task.step != group.current.step
        if first:
            self._end_step(group)
            group.current = _Step(task.step)
        if task.verb != ALL_GATHER:  # when that is ready depends on the network
            group.current.ready.append((task.partition.index, task.verb))
        if first and group.alike >= STABLE_STEPS and task.group == max(self._nbytes, key=self._nbytes.__getitem__):
            return list(group.last.launched)
        return None

    def launched(self, key: Key) -> None:
        group = self._groups.get(key.group)
        if group is not None:
            group.current.launched.append((key.partition, key.verb))

    def forget(self, group: int) -> None:
        """Its plan is another one now."""
        self._groups.pop(group, None)

    def release(self, group: int) -> None:
        """It has had its last step."""
        self._groups.pop(group, None)
        self._nbytes.pop(group, None)

    def _end_step(self, group: _Group) -> None:
        same = group.current.step >= 0 and alike(group.last.ready, group.current.ready)
        group.alike = group.alike + 1 if same else 0
        group.last = group.current


def alike(a: Sequence[Place], b: Sequence[Place]) -> bool:
    """Whether both hold the same, each within ``SLACK`` places."""
    places = {place: at for at, place in enumerate(b)}
    return len(a) == len(b) and all(abs(places.get(place, len(b) + SLACK + 1) - at) <= SLACK for at, place in enumerate(a))
