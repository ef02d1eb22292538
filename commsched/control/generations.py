"""Decides which processes are the ranks of an elastic job, from one generation to the next.

A *generation* is a time in which the ranks stay the same. Each has a session of its own in every rank, with a name of its own,
so that nothing of an earlier one can be taken for a part of it. The launcher holds a :class:`Generations`, so no rank is
special. It is pure: it knows no process, socket or clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core import timeouts
from ..core.errors import ranks_text


@dataclass(frozen=True, slots=True)
class Asked:
    """A process asks for its place in the next generation.

    Attributes:
        steps: the number of steps whose result it has; None: it has no result that others could go on from.
        is_over: it has made all steps.
        lost: the rank that its generation has lost first, if it knows.
        was_silent: that rank was silent; without a rank, several were.
        is_done: all ranks have made all steps, so it wants no place any more.
        leaves: it ends, without a failure, and wants no place.
        keeps_nothing: it would have a result if the script kept copies.
    """

    steps: int | None = None
    is_over: bool = False
    lost: int | None = None
    was_silent: bool = False
    is_done: bool = False
    leaves: bool = False
    keeps_nothing: bool = False


# Why a job ends if none of its ranks goes on: some have had a result; none has said so, and none is left; some are left.
HOLDERS_LOST = "no rank is left that has the values after a step: all that had them are lost"
NONE_LEFT = (
    "no rank is left that has the values after a step: all are lost, or have ended before the first step, or outside the loop "
    "of commsched.Elastic"
)
NOTHING_KEPT = (
    "no rank is left that has all values after a step: those that are left were in the midst of its updates, or of taking "
    'those of another rank, and commsched.Elastic(keep="nothing") keeps no copies. Start again from a checkpoint; '
    'keep="device" or keep="cpu" outlives such a loss'
)
NONE_BEGUN = "ranks lost each other before the first step, so none has values to go on from"


# --- what the launcher is to do ---


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process that takes the place of ``rank``."""

    rank: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the process ``member``."""

    member: int
    why: str


@dataclass(frozen=True, slots=True)
class Form:
    """Begin a generation: ``ranks`` by member. ``is_again``: nobody was lost or has come, but ranks have lost each other."""

    generation: int
    ranks: Mapping[int, int]
    root: int
    steps: int
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class Summon:
    """Tell ``member``, which has a place, to ask for its next one after the step in hand: ranks have come."""

    member: int


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Tell ``member`` that there is no place for it, as it expects."""

    member: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job has failed. Tell all that have asked ``why``."""

    why: str


Action = Start | Kill | Form | Summon | Dismiss | GiveUp


class Generations:
    """The ranks of one elastic job. A process is a *member*, by a number that is never used again.

    A rank that is lost is replaced while restarts are left. Without any left, the job goes on with fewer ranks, down to
    ``min_ranks``; then ranks are counted anew, in their order. A new generation begins when all living members have asked for
    their places. Its root is the survivor with the most steps. New processes that are late are not waited for if enough others
    are there. When such a process asks, the generation that runs without it ends, and another one begins with it.

    Args:
        replace_within_seconds: a new process is late when the others have waited for it for so long.
        max_restarts: how many processes may be started in place of lost ones. A new generation of the same processes counts,
            too.
        join_within_seconds: a new process must ask within this time.
    """

    def __init__(
        self, min_ranks: int, max_restarts: int, join_within_seconds: float, replace_within_seconds: float = math.inf
    ) -> None:
        self._min_ranks = min_ranks
        self._restarts_left = max_restarts
        self._join_within_seconds = join_within_seconds
        self._replace_within_seconds = replace_within_seconds
        self._generation = 0
        self._ranks: dict[int, int] = {}  # by member: all that live
        self._newcomers: dict[int, float] = {}  # members without a generation so far, and when they were started, or inf
        self._without_place: dict[int, float] = {}  # newcomers that are not started yet, and since when they are wanted
        self._late: set[int] = set()  # newcomers without which a generation has begun
        self._late_starts = 0  # processes to be started that are late from the beginning
        self._asked: dict[int, Asked] = {}
        self._has_result = False  # a member has, or had, a result that others can go on from
        self._keeps_nothing = False  # a member has none since the script keeps no copies
        self._has_lost = False  # since the generation began
        self._has_summoned = False  # since the generation began
        self._suspects: dict[int, float] = {}  # members that others have lost, but that live, and since when that is known
        self._is_finishing = False  # a member has made all steps, and so all of its generation have
        self._is_closed = False  # there will be no further generation
        self._why = ""
        self._first_asked_at: float | None = None  # of those that wait for the next generation

    @property
    def is_closed(self) -> bool:
        """Whether the job has failed."""
        return self._is_closed

    @property
    def restarts_left(self) -> int:
        return self._restarts_left

    def wanted(self, member: int, rank: int, now: float) -> None:
        """``member`` is to be started in the place of ``rank``, as soon as a machine has room for it."""
        self._ranks[member], self._newcomers[member], self._without_place[member] = rank, math.inf, now
        if self._late_starts:
            self._late_starts -= 1
            self._late.add(member)

    def started(self, member: int, now: float) -> int:
        """``member`` is being started. Return the rank that it begins as."""
        self._newcomers[member] = now
        del self._without_place[member]
        return self._ranks[member]

    def not_started(self, member: int, now: float) -> None:
        """``member``, which was being started, was not. It is wanted as before."""
        self._newcomers[member], self._without_place[member] = math.inf, now

    def asked(self, member: int, asked: Asked, now: float) -> list[Action]:
        """``member`` asks for its next place."""
        if self._is_closed:
            return [GiveUp(self._why)]
        if member not in self._ranks:
            return []
        if asked.leaves:
            return [Dismiss(member), *self._lost(*self._forget(member))]
        self._asked[member] = asked
        self._has_result = self._has_result or asked.steps is not None
        self._keeps_nothing = self._keeps_nothing or asked.keeps_nothing
        if asked.is_done or (self._is_finishing and self._generation > 0):
            return self._finished()
        if member in self._late:
            if any(other not in self._late for other in self._asked):
                return self._decided()
            self._has_summoned = True
            return [Summon(other) for other in self._ranks if other not in self._newcomers]
        if self._first_asked_at is None:
            self._first_asked_at = now
        actions: list[Action] = []
        # Without a rank, several were silent: all that do not ask soon.
        are_many = asked.was_silent and asked.lost is None
        for other, rank in self._ranks.items():
            if (are_many or rank == asked.lost) and other not in {*self._asked, *self._newcomers, *self._suspects}:
                self._suspects[other] = now
                if asked.was_silent and not are_many:
                    actions.append(Kill(other, "it was silent"))
        return actions + self._decided()

    def _finished(self) -> list[Action]:
        """A member says, or shows by its end, that all ranks of its generation have made all steps."""
        self._is_finishing = True
        if self._generation == 0:
            return self._decided()
        if self._has_lost:  # after its last step, so a new process would have nothing to do
            return self.give_up("a rank has failed after the last step")
        known = {member: asked for member, asked in self._asked.items() if member not in self._late}
        if behind := sorted(self._ranks[member] for member, asked in known.items() if not asked.is_over):
            has = "has" if len(behind) == 1 else "have"
            return self.give_up(f"{ranks_text(behind)} {has} further steps to make, and others have made all of theirs")
        actions: list[Action] = [Kill(member, "all steps are made") for member in self._late]
        for member in tuple(self._late):
            self._forget(member)
        actions += [Dismiss(member) for member in self._asked]
        self._asked.clear()
        return actions

    def ended(self, member: int, well: bool, is_consequence: bool = False) -> list[Action]:
        """The process ``member`` has ended, ``well`` or not. ``is_consequence``: it has failed since another one has, as a new
        process does that is in the midst of joining."""
        if member not in self._ranks:  # it has left
            return []
        rank, was_late = self._forget(member)
        if self._is_closed:
            return []
        return self._finished() if well else self._lost(rank, was_late, is_consequence)

    def includes(self, member: int) -> bool:
        """Whether ``member`` is wanted, and has neither ended nor left."""
        return member in self._ranks

    def has_place(self, member: int) -> bool:
        """Whether ``member`` is a rank of the generation that began last."""
        return member in self._ranks and member not in self._newcomers

    def silent(self, members: Sequence[int]) -> None:
        """All of ``members`` are lost together: no generation begins with one of them, before ``ended`` is called for each."""
        for member in members:
            self._asked.pop(member, None)

    def _forget(self, member: int) -> tuple[int, bool]:
        """Return its rank, and whether it was late."""
        for known in (self._newcomers, self._without_place, self._asked, self._suspects):
            known.pop(member, None)
        was_late = member in self._late
        self._late.discard(member)
        return self._ranks.pop(member), was_late

    def _lost(self, rank: int, was_late: bool, is_consequence: bool = False) -> list[Action]:
        """The process that was ``rank`` takes no further part."""
        if self._generation == 0:
            return self.give_up(f"rank {rank} has ended before all ranks had joined")
        if self._is_finishing:
            return self.give_up(f"rank {rank} has failed after the last step")
        if not self._survivors():
            return self.give_up(self._why_none_goes_on())
        if is_consequence:  # that other one counts
            return [Start(rank)]
        self._has_lost = self._has_lost or not was_late
        if self._restarts_left > 0:
            self._restarts_left -= 1
            self._late_starts += was_late
            return [Start(rank)]
        if len(self._ranks) < self._min_ranks:
            count = sum(member not in self._newcomers for member in self._ranks)
            left = f"{count} {'rank is' if count == 1 else 'ranks are'} left"
            return self.give_up(f"{left}, fewer than --min {self._min_ranks}, and no restart (--max-restarts)")
        return self._decided()

    def tick(self, now: float) -> list[Action]:
        """The time is ``now``: find processes that have failed and do not end, and new ones that have not asked in time."""
        if self._is_closed:
            return []
        since = math.inf if self._first_asked_at is None else self._first_asked_at
        missing = [member for member in self._ranks if member not in self._asked]
        are_new = bool(missing) and self._generation > 0 and all(member in self._newcomers for member in missing)
        if are_new and now > since + self._replace_within_seconds and len(self._asked) >= self._min_ranks:
            self._late.update(missing)
            return self._decided()
        hanging = [each for each, since in self._suspects.items() if now > since + timeouts.LAUNCHER_SECONDS]
        if hanging := [member for member in hanging if member not in self._asked]:
            for member in hanging:
                del self._suspects[member]
            return [Kill(member, "it has failed, and does not end") for member in hanging]
        homeless = [
            member
            for member, wanted_at in self._without_place.items()
            if now > max(wanted_at, since if member in self._late else wanted_at) + self._join_within_seconds
        ]
        needs_all = self._generation == 0 or len(self._ranks) - len(self._without_place) < self._min_ranks
        if homeless and needs_all:  # otherwise the others go on without these, as soon as all have asked
            text = ranks_text(sorted(self._ranks[member] for member in homeless))
            return self.give_up(f"no machine with room for {text} has come within {self._join_within_seconds:g} s")
        late = [
            member
            for member, started_at in self._newcomers.items()
            if member not in self._asked
            and now > max(started_at, started_at if member in self._late else since) + self._join_within_seconds
        ]
        if late and self._generation == 0:
            text = ranks_text(sorted(self._ranks[member] for member in late))
            return self.give_up(f"{text} did not join within {self._join_within_seconds:g} s")
        return [Kill(member, f"it did not join within {self._join_within_seconds:g} s") for member in late]

    def awaited(self, now: float, seconds: float) -> list[int]:
        """Members of the last generation that have not asked, although others have waited for ``seconds``."""
        if self._is_closed or self._first_asked_at is None or now < self._first_asked_at + seconds:
            return []
        return [member for member in self._ranks if member not in self._asked and member not in self._newcomers]

    def _survivors(self) -> list[int]:
        """The living members that have the job's values, or may have."""
        known = {member: asked.steps is not None for member, asked in self._asked.items()}
        return [member for member in self._ranks if member not in self._newcomers and known.get(member, True)]

    def _why_none_goes_on(self) -> str:
        if self._keeps_nothing:
            return NOTHING_KEPT
        if self._has_result:
            return HOLDERS_LOST
        are_left = any(member not in self._newcomers for member in self._ranks)
        return NONE_BEGUN if are_left else NONE_LEFT

    def _decided(self) -> list[Action]:
        if self._generation > 0 and not self._survivors():  # new processes need not be awaited
            return self.give_up(self._why_none_goes_on())
        awaited = [member for member in self._ranks if member not in self._asked and member not in self._late]
        if awaited or len(self._asked) < (self._min_ranks if self._late else 1):
            return []
        if self._generation == 0:
            return self.give_up("a rank has ended without joining the job") if self._is_finishing else self._form(0, 0)
        results = {member: asked.steps for member in self._survivors() if (asked := self._asked[member]).steps is not None}
        is_again = not self._has_lost and not self._has_summoned
        if is_again:
            if self._restarts_left == 0:
                return self.give_up("the ranks lost each other, and no restart is left")
            self._restarts_left -= 1
        root = min(results, key=lambda member: (-results[member], self._ranks[member]))
        return self._form(root, results[root], is_again)

    def _form(self, root: int, steps: int, is_again: bool = False) -> list[Action]:
        in_order = sorted(self._asked, key=lambda member: (self._ranks[member], member))
        places = {member: rank for rank, member in enumerate(in_order)}
        self._ranks.update(places)
        self._generation += 1
        for member in in_order:
            self._newcomers.pop(member, None)
        self._late -= places.keys()
        self._asked.clear()
        self._suspects.clear()
        self._has_lost = self._has_summoned = False
        self._first_asked_at = None
        return [Form(self._generation, places, places.get(root, 0), steps, is_again)]

    def give_up(self, why: str) -> list[Action]:
        """The job cannot go on."""
        self._is_closed, self._why = True, why
        return [GiveUp(why)]
