"""Rank 0's part of an agreed order: a task may be launched when every rank has it ready; the scheduler says which is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ..errors import OrderMismatch, PeerLost
from ..scheduler import Policy, Scheduler
from ..task import CommTask
from .key import EMPTY, Key, roll


class Decider:
    """Pure. ``describe`` names a task for messages.

    No launched task ever waits for a rank that is not ready, so ranks may become ready in any order and can wait for any
    average, without a deadlock. The latency of the two messages is hidden while others of the credit are on their way.
    """

    def __init__(self, world_size: int, policy: Policy, credit_bytes: int, describe: Callable[[Key], str]) -> None:
        self.scheduler: Scheduler[CommTask] = Scheduler(policy, credit_bytes)
        self._world_size = world_size
        self._describe = describe
        self._offered: dict[Key, set[int]] = {}  # ready on these ranks, not yet on all
        self._left: set[int] = set()
        self._history: deque[tuple[Key, str]] = deque()  # what was decided, with its digest, that some rank has not confirmed
        self._first = 0  # the place of the history's first
        self._confirmed = [0] * world_size
        self._digest = EMPTY

    @property
    def decided(self) -> int:
        """How many launches were decided on so far."""
        return self._first + len(self._history)

    @property
    def digest(self) -> str:
        return self._digest

    def offer(self, rank: int, key: Key) -> bool:
        """``rank`` has ``key`` ready; whether all ranks have now.

        Raises:
            PeerLost: a rank that it needs has left.
            OrderMismatch: it offered it before.
        """
        ranks = self._offered.setdefault(key, set())
        if rank in ranks:
            raise OrderMismatch(f"rank {rank} said twice that {self._describe(key)} is ready")
        ranks.add(rank)
        self._require_present(key)
        if len(ranks) < self._world_size:
            return False
        del self._offered[key]
        return True

    def forget(self, covers: Callable[[Key], bool]) -> None:
        """What was offered, and is covered, needs no decision any more."""
        for key in [key for key in self._offered if covers(key)]:
            del self._offered[key]

    def leave(self, rank: int) -> None:
        """``rank`` will offer nothing more.

        Raises:
            PeerLost: others wait for it.
        """
        self._left.add(rank)
        for key in self._offered:
            self._require_present(key)

    def decide(self) -> list[CommTask]:
        """The tasks to launch now, in order, that the policy and the credit admit."""
        batch: list[CommTask] = []
        while (task := self.scheduler.next()) is not None:
            batch.append(task)
            self._digest = roll(self._digest, task)
            if self._world_size > 1:
                self._history.append((Key.of(task), self._digest))
        return batch

    def require_same(self, rank: int, first: int, launched: Sequence[Key]) -> None:
        """``rank`` says that it launched these from place ``first`` on.

        Raises:
            OrderMismatch: it is not what was decided; names both tensors.
        """
        for place, key in enumerate(launched, first):
            if not self._first <= place < self.decided:
                raise OrderMismatch(f"rank {rank} launched {self._describe(key)} where rank 0 launched nothing (place {place})")
            wanted = self._history[place - self._first][0]
            if key != wanted:
                raise OrderMismatch(
                    f"rank {rank} launched {self._describe(key)} where rank 0 launched {self._describe(wanted)} (place {place})"
                )

    def confirm(self, rank: int, first: int, launched: Sequence[Key], digest: str) -> None:
        """Likewise; and its digest of all launches is this one now.

        Raises:
            OrderMismatch: it is not what was decided; names both tensors.
        """
        self.require_same(rank, first, launched)
        count = first + len(launched)
        if self._digest_at(count) not in (None, digest):
            last = self._history[count - 1 - self._first][0]
            raise OrderMismatch(
                f"rank {rank} launched other bytes than rank 0 for {self._describe(last)}, or shortly before: the ranks have "
                "cut their tensors differently"
            )
        self._confirmed[rank] = count
        confirmed = min(self._confirmed[1:], default=count)
        while self._first < confirmed - 1:  # the last is kept: reports begin with its digest
            self._history.popleft()
            self._first += 1

    def _digest_at(self, count: int) -> str | None:
        place = count - 1 - self._first
        return self._history[place][1] if 0 <= place < len(self._history) else None

    def _require_present(self, key: Key) -> None:
        gone = self._left - self._offered[key]
        if gone:
            raise left_behind(min(gone), self._describe(key))


def left_behind(rank: int, what: str) -> PeerLost:
    return PeerLost(f"rank {rank} left; {what} waits for it")


def keys_of(records: Iterable[Sequence[int]]) -> list[Key]:
    return [Key.from_record(record) for record in records]
