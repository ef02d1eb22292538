"""Rank 0's part of an agreed order: a task may be launched when it is ready on every rank; the scheduler chooses the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ..errors import FEWER_BATCHES, OrderMismatch, PeerLost
from ..scheduler import Policy, Scheduler
from ..task import CommTask
from .key import EMPTY, LaunchKey, extend_digest


class OrderLeader:
    """Decides which task is launched next. Pure. ``describe`` names a task for messages.

    No launched task ever waits for a rank that is not ready. So tasks may become ready in any order on each rank, and a rank
    can wait for any average, without a deadlock. Other tasks within the credit are in flight meanwhile and hide the latency of
    the two messages.
    """

    def __init__(self, world_size: int, policy: Policy, credit_bytes: int, describe: Callable[[LaunchKey], str]) -> None:
        self.scheduler: Scheduler[CommTask] = Scheduler(policy, credit_bytes)
        self._world_size = world_size
        self._describe = describe
        self._offered: dict[LaunchKey, set[int]] = {}  # the ranks on which a task is ready, until it is ready on all
        self._left: set[int] = set()
        self._history: deque[tuple[LaunchKey, str]] = (
            deque()
        )  # decided launches with their digests, since the last launch that all ranks have confirmed
        self._first = 0  # place of the first launch in the history
        self._confirmed = [0] * world_size
        self._digest = EMPTY

    @property
    def decided(self) -> int:
        """The number of launches decided on so far."""
        return self._first + len(self._history)

    @property
    def digest(self) -> str:
        return self._digest

    def offer(self, rank: int, key: LaunchKey) -> bool:
        """Note that ``key`` is ready on ``rank``. Returns whether it is ready on all ranks now.

        Raises:
            PeerLost: a rank on which the task is not ready has left.
            OrderMismatch: ``rank`` offered the task before.
        """
        ranks = self._offered.setdefault(key, set())
        if rank in ranks:
            raise OrderMismatch(f"rank {rank} reported twice that {self._describe(key)} is ready")
        ranks.add(rank)
        self._require_present(key)
        if len(ranks) < self._world_size:
            return False
        del self._offered[key]
        return True

    def forget(self, covers: Callable[[LaunchKey], bool]) -> None:
        """Forget the offered tasks for which ``covers`` is true, because they need no decision any more."""
        for key in [key for key in self._offered if covers(key)]:
            del self._offered[key]

    def leave(self, rank: int) -> None:
        """Note that ``rank`` will offer nothing more.

        Raises:
            PeerLost: a task that others have offered waits for it.
        """
        self._left.add(rank)
        for key in self._offered:
            self._require_present(key)

    def decide(self) -> list[CommTask]:
        """Return the tasks to launch now, in the policy's order, as far as the credit admits them."""
        batch: list[CommTask] = []
        while (task := self.scheduler.next()) is not None:
            batch.append(task)
            self._digest = extend_digest(self._digest, task)
            if self._world_size > 1:
                self._history.append((LaunchKey.of(task), self._digest))
        return batch

    def require_same(self, rank: int, first: int, launched: Sequence[LaunchKey]) -> None:
        """Check ``launched``, the launches of ``rank`` from place ``first`` on.

        Raises:
            OrderMismatch: they are not the launches that were decided; the message names both tensors.
        """
        for place, key in enumerate(launched, first):
            if not self._first <= place < self.decided:
                raise OrderMismatch(f"rank {rank} launched {self._describe(key)} where rank 0 launched nothing (place {place})")
            wanted = self._history[place - self._first][0]
            if key != wanted:
                raise OrderMismatch(
                    f"rank {rank} launched {self._describe(key)} where rank 0 launched {self._describe(wanted)} (place {place})"
                )

    def confirm(self, rank: int, first: int, launched: Sequence[LaunchKey], digest: str) -> None:
        """Check ``launched`` as :meth:`require_same` does, and ``digest``, the rank's digest of all launches up to their end.

        Raises:
            OrderMismatch: launches or digest are not what was decided; the message names the tensors.
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
        while self._first < confirmed - 1:  # the last confirmed launch is kept, because a report may have its digest
            self._history.popleft()
            self._first += 1

    def _digest_at(self, count: int) -> str | None:
        place = count - 1 - self._first
        return self._history[place][1] if 0 <= place < len(self._history) else None

    def _require_present(self, key: LaunchKey) -> None:
        gone = self._left - self._offered[key]
        if gone:
            raise peer_left_error(min(gone), self._describe(key))


def peer_left_error(rank: int, what: str) -> PeerLost:
    return PeerLost(f"rank {rank} left; {what} waits for it{FEWER_BATCHES}", rank=rank)
