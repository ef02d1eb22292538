"""A static order: each rank launches the next of a fixed list as soon as it is ready. It needs no messages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..credit import CreditWindow
from ..errors import PeerLost
from ..task import ALL_GATHER, CommTask
from .decider import left_behind
from .key import EMPTY, Key, roll
from .pattern import STABLE_STEPS, Place, alike


class Frozen:
    """One group's launches from step ``first_step`` on.

    That no rank waits for ever needs this: a group's gradients become ready without waiting for an average of the same group
    and step. Plugins hold it, and whatever else there is (flags, other models) goes in an agreed order on another channel.
    """

    def __init__(
        self, group: int, first_step: int, order: Sequence[Place], credit_bytes: int, describe: Callable[[Key], str]
    ) -> None:
        self.group = group
        self.first_step = first_step
        self.order = list(order)
        self.credit = CreditWindow(credit_bytes)
        self._describe = describe
        self._step = first_step
        self._place = 0
        self._ready: dict[Key, CommTask] = {}
        self._outstanding: set[Key] = set()  # ready or launched, and not yet sent
        self._digest = EMPTY  # of what was launched in this step
        self._readiness: list[Place] = []  # of this step
        self._usual: list[Place] = []  # of the first static step
        self._unusual_steps = 0
        self._missing: dict[int, tuple[int, int]] = {}  # of ranks that left: see ``leave``

    def covers(self, key: Key) -> bool:
        return key.group == self.group and key.step >= self.first_step

    def add(self, task: CommTask) -> None:
        """``task`` became ready here."""
        key = Key.of(task)
        self._ready[key] = task
        self._outstanding.add(key)
        if task.verb != ALL_GATHER:
            self._readiness.append((key.partition, key.verb))

    def next(self) -> CommTask | None:
        """The next of the list, if it is ready and the credit admits it."""
        key = self._head()
        task = self._ready.get(key)
        if task is None or not self.credit.admits(task.nbytes):
            return None
        del self._ready[key]
        self.credit.take(task.nbytes)
        self._digest = roll(self._digest, task)
        self._place += 1
        return task

    def _head(self) -> Key:
        return Key(self.group, self._step, *self.order[self._place])

    def stuck(self) -> int:
        """How many tasks wait for one that is before them and is not ready, and may never be: its step was broken off."""
        return 0 if self._head() in self._ready else len(self._ready)

    def sent(self, task: CommTask) -> None:
        self._outstanding.discard(Key.of(task))
        self.credit.give_back(task.nbytes)

    def end_step(self) -> tuple[int, str] | None:
        """When all of a step is launched, once: the step and the digest of its launches."""
        if self._place < len(self.order):
            return None
        done = self._step, self._digest
        if not self._usual:
            self._usual = self._readiness
        self._unusual_steps = 0 if alike(self._usual, self._readiness) else self._unusual_steps + 1
        self._step, self._place, self._digest, self._readiness = self._step + 1, 0, EMPTY, []
        return done

    @property
    def unfit(self) -> bool:
        """Tasks have become ready in another order than usual for as long as it took to call the order stable."""
        return self._unusual_steps >= STABLE_STEPS

    def launched(self, step: int) -> int:
        """How many tasks of ``step`` were launched here."""
        return self._place if step == self._step else len(self.order) if step < self._step else 0

    def leave(self, rank: int, first_missing_step: int, launched: int) -> None:
        """``rank`` completes no step from that one on, of which it launched so many tasks."""
        self._missing[rank] = first_missing_step, launched

    def in_vain(self, stuck_too: bool) -> PeerLost | None:
        """Why who waits for what is outstanding here waits for ever; None if no rank is missing. ``stuck_too``: also for what
        waits for a task that is not ready here."""
        if not self._missing:
            return None  # asked whenever a wait wakes, with the core's lock held
        stuck = self._ready.keys() if self.stuck() and not stuck_too else ()
        for key in sorted(self._outstanding.difference(stuck)):
            for rank, (step, launched) in self._missing.items():
                if (key.step, self.order.index((key.partition, key.verb))) >= (step, launched):
                    return left_behind(rank, self._describe(key))
        return None
