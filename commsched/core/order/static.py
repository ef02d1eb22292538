"""A static order: once readiness repeats from step to step, the last step's launches are repeated without messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import PeerLost
from ..scheduler import CreditWindow
from ..task import ALL_GATHER, CommTask
from .leader import peer_left_error
from .messages import EMPTY, LARGEST, LaunchKey, extend_digest

#: A place in a frozen order: partition and verb.
PatternEntry = tuple[int, str]

STABLE_STEPS = 5

#: Places by which a task may move between two steps of the same pattern. Neighbours that are computed at almost the same time
#: change places from step to step.
SLACK = 2

#: Steps after a change of configuration until an order that repeats itself is static for certain.
FREEZE_STEPS = STABLE_STEPS + SLACK


@dataclass
class _Step:
    step: int = -1
    ready: list[PatternEntry] = field(default_factory=list)
    launched: list[PatternEntry] = field(default_factory=list)


@dataclass
class _Group:
    current: _Step = field(default_factory=_Step)
    last: _Step = field(default_factory=_Step)
    alike: int = 0  # consecutive steps with the same order of readiness as the step before


class ReadinessPattern:
    """Detects when readiness repeats. It is notified of every task that becomes ready on all ranks, and of every launch."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    def became_ready(self, task: CommTask) -> list[PatternEntry] | None:
        """Note that ``task`` is ready on all ranks. If it is the first task of a step of its group, and the steps before were
        alike, returns the order in which the last step was launched; otherwise None."""
        group = self._groups.setdefault(task.group, _Group())
        first = task.step != group.current.step
        if first:
            self._end_step(group)
            group.current = _Step(task.step)
        if task.verb != ALL_GATHER:  # the time when an all-gather is ready depends on the network
            group.current.ready.append((task.partition.index, task.verb))
        return list(group.last.launched) if first and group.alike >= STABLE_STEPS else None

    def launched(self, key: LaunchKey) -> None:
        group = self._groups.get(key.group)
        if group is not None:
            group.current.launched.append((key.partition, key.verb))

    def forget(self, group: int) -> None:
        """Forget the pattern of ``group``, which has another plan now, or has had its last step."""
        self._groups.pop(group, None)

    def _end_step(self, group: _Group) -> None:
        same = group.current.step >= 0 and alike(group.last.ready, group.current.ready)
        group.alike = group.alike + 1 if same else 0
        group.last = group.current


def alike(a: Sequence[PatternEntry], b: Sequence[PatternEntry]) -> bool:
    """Whether both sequences hold the same places, each moved by at most ``SLACK``."""
    places = {place: at for at, place in enumerate(b)}
    return len(a) == len(b) and all(abs(places.get(place, len(b) + SLACK + 1) - at) <= SLACK for at, place in enumerate(a))


class StaticOrder:
    """One group's launches from step ``first_step`` on, within ``credit``.

    Freedom from deadlock requires that a group's gradients become ready without waiting for an average of the same group and
    step, or for another rank that may wait for one (``may_freeze`` of ``Session.register``). All other tasks (flags, other
    models) are launched in an agreed order on another channel.
    """

    def __init__(
        self,
        group: int,
        first_step: int,
        order: Sequence[PatternEntry],
        credit: CreditWindow,
        describe: Callable[[LaunchKey], str],
    ) -> None:
        self.group = group
        self.first_step = first_step
        self.order = list(order)
        self._credit = credit
        self._describe = describe
        self._step = first_step
        self._place = 0
        self._ready: dict[LaunchKey, CommTask] = {}
        self._outstanding: set[LaunchKey] = set()  # tasks that are ready or launched, and not yet sent
        self._digest = EMPTY  # digest of this step's launches
        self._readiness: list[PatternEntry] = []  # order of readiness in this step
        self._usual: list[PatternEntry] = []  # order of readiness in the first static step
        self._unusual_steps = 0
        self._missing: dict[int, tuple[int, int]] = {}  # by rank that left: see ``leave``
        self._given: set[LaunchKey] = set()  # tasks ahead of this rank's place that it has launched; see ``resume``

    def resume(self, step: int, launched: Sequence[PatternEntry]) -> None:
        """Begin in ``step``, of which this rank has launched the tasks ``launched`` before it knew of this order."""
        self._step = step
        self._readiness = list(launched)
        self._given = {LaunchKey(self.group, step, *place) for place in launched}
        self._pass_given()

    def _pass_given(self) -> None:
        while self._given and self._head() in self._given:
            self._given.discard(self._head())
            self._place += 1
            self.end_step()

    def covers(self, key: LaunchKey) -> bool:
        return key.group == self.group and key.step >= self.first_step

    def add(self, task: CommTask) -> None:
        """Add ``task``, which became ready here."""
        key = LaunchKey.of(task)
        self._ready[key] = task
        self._outstanding.add(key)
        if task.verb != ALL_GATHER:
            self._readiness.append((key.partition, key.verb))

    def next(self) -> CommTask | None:
        """Return the next task of the order, if it is ready and the credit admits it."""
        key = self._head()
        task = self._ready.get(key)
        if task is None or not self._credit.admits(task.nbytes):
            return None
        del self._ready[key]
        self._credit.take(task.nbytes)
        self._digest = extend_digest(self._digest, task, LARGEST)
        self._place += 1
        if self._place < len(self.order):
            self._pass_given()
        return task

    def _head(self) -> LaunchKey:
        return LaunchKey(self.group, self._step, *self.order[self._place])

    def blocked_count(self) -> int:
        """The number of ready tasks that wait for an earlier task which is not ready. That task may never become ready, if its
        step was broken off."""
        return 0 if self._head() in self._ready else len(self._ready) + len(self._given)

    def sent(self, task: CommTask) -> None:
        self._outstanding.discard(LaunchKey.of(task))

    def end_step(self) -> tuple[int, str] | None:
        """Begin the next step if all tasks of the current one are launched. Returns the ended step and the digest of its
        launches; None if the step has not ended."""
        if self._place < len(self.order):
            return None
        done = self._step, self._digest
        if not self._usual:
            self._usual = self._readiness
        self._unusual_steps = 0 if alike(self._usual, self._readiness) else self._unusual_steps + 1
        self._step, self._place, self._digest, self._readiness = self._step + 1, 0, EMPTY, []
        return done

    @property
    def is_between_steps(self) -> bool:
        """Whether no task of the current step was launched."""
        return self._place == 0

    @property
    def is_stale(self) -> bool:
        """Whether tasks have become ready in another order than usual for ``STABLE_STEPS`` consecutive steps, after which an
        order counts as stable."""
        return self._unusual_steps >= STABLE_STEPS

    def launched(self, step: int) -> int:
        """The number of tasks of ``step`` that were launched here."""
        return self._place if step == self._step else len(self.order) if step < self._step else 0

    def leave(self, rank: int, first_missing_step: int, launched: int) -> None:
        """Note that ``rank`` has left. It completes no step from ``first_missing_step`` on, and has launched only ``launched``
        tasks of that step."""
        self._missing[rank] = first_missing_step, launched

    def deadlock_error(self, include_blocked: bool) -> PeerLost | None:
        """The PeerLost error if an outstanding task can never complete because a rank has left; otherwise None.
        ``include_blocked`` includes the tasks that wait for a task which is not ready here."""
        if not self._missing:
            return None  # a fast path: called whenever a wait wakes, with the core's lock held
        blocked = self._ready.keys() if self.blocked_count() and not include_blocked else ()
        for key in sorted(self._outstanding.difference(blocked).union(self._given if include_blocked else ())):
            for rank, (step, launched) in self._missing.items():
                if (key.step, self.order.index((key.partition, key.verb))) >= (step, launched):
                    return peer_left_error(rank, self._describe(key))
        return None
