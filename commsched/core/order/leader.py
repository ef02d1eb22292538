"""Rank 0's part of an agreed order: a task may be launched when it is ready on every rank; the scheduler chooses the next."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from ..errors import FEWER_BATCHES, OrderMismatch, PeerLost
from ..least import Least
from ..scheduler import CreditWindow, Policy, ReadyTasks
from ..task import ALL_REDUCE, CommTask
from .messages import EMPTY, LARGEST, OTHERS, LaunchKey, extend_digest

#: The part of a step's bytes that are still to become ready by which launches are decided ahead of the credit. A task that
#: becomes ready meanwhile waits for them. So little is decided ahead when the last tasks are near, which are usually the most
#: urgent ones. A larger part saves few messages more.
_AHEAD = 1 / 32

#: The largest part of the credit by which they are decided ahead. Partitions that are large beside the credit take so long that
#: a message for each costs little. A layer that becomes ready would wait for two more of them: backward passed over whole
#: layers, and forward waited for each of these. The step of 8 workers was 5.4 % longer than the bound instead of 4.4 %.
_AHEAD_OF_CREDIT = 1 / 4


class OrderLeader:
    """Decides which tasks are launched next, on each of ``channels``. Pure. ``describe`` names a task for messages.

    ``leaders[rank]`` is the rank that launches for ``rank``. Only these report, each for all its ranks.

    No launched task ever waits for a rank that is not ready. So tasks may become ready in any order on each rank, and a rank
    can wait for any average, without a deadlock. Other tasks within the credit are in flight meanwhile and hide the latency of
    the two messages.

    The launches of the largest group are decided ahead of the credit, many with one message, as far as nothing more urgent can
    become ready soon: by a share of the bytes of its step that are not ready yet, at most a share of the credit; all at once
    when the last are ready.
    """

    def __init__(self, leaders: Sequence[int], policy: Policy, describe: Callable[[LaunchKey], str], channels: int) -> None:
        self._ready: list[ReadyTasks[CommTask]] = [ReadyTasks(policy) for _ in range(channels)]  # on all ranks
        self._group_bytes: dict[int, int] = {}
        self._step_bytes: dict[int, tuple[int, int]] = {}  # by group: its step, and the bytes of it that became ready
        self._leaders = leaders
        self._count = len(set(leaders))
        self._describe = describe
        self._offered: dict[LaunchKey, set[int]] = {}  # the leaders whose ranks have a task ready, until all have
        self._left: set[int] = set()
        self._history: deque[tuple[LaunchKey, str]] = (
            deque()
        )  # decided launches with their digests, since the last launch that all ranks have confirmed
        self._first = 0  # place of the first launch in the history
        self._confirmed = Least(set(leaders) - {0}, 0)
        self._digest = EMPTY

    @property
    def decided(self) -> int:
        """The number of launches decided on so far."""
        return self._first + len(self._history)

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def has_ready(self) -> bool:
        """Whether a task is ready on all ranks and not yet decided on."""
        return any(map(len, self._ready))

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
        if len(ranks) < self._count:
            return False
        del self._offered[key]
        return True

    def add_group(self, group: int, nbytes: int) -> None:
        self._group_bytes[group] = nbytes

    def release(self, group: int) -> None:
        """Forget ``group``, which has had its last step."""
        self._group_bytes.pop(group, None)
        self._step_bytes.pop(group, None)
        self.forget(lambda key: key.group == group)

    def is_largest(self, group: int) -> bool:
        return group == max(self._group_bytes, key=self._group_bytes.__getitem__, default=group)

    def add(self, task: CommTask, ahead: bool) -> None:
        """Add ``task``, which is ready on all ranks. ``ahead``: no static order is in use, so the largest group has its channel
        for launches that are decided ahead."""
        step, nbytes = self._step_bytes.get(task.group, (task.step, 0))
        self._step_bytes[task.group] = task.step, task.nbytes + (nbytes if step == task.step else 0)
        self._ready[LARGEST if ahead and len(self._ready) > 1 and self.is_largest(task.group) else OTHERS].add(task)

    def end_ahead(self) -> None:
        """Decide no more launches ahead: the channel of the largest group is now for a static order."""
        while len(self._ready[LARGEST]):
            self._ready[OTHERS].add(self._ready[LARGEST].pop())

    def use(self, policy: Policy) -> None:
        """Continue with another policy."""
        for ready in self._ready:
            ready.use(policy)

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

    def decide(self, channel: int, credit: CreditWindow) -> list[CommTask]:
        """Return the tasks to launch next on ``channel``, in the policy's order: none if ``credit`` does not admit the first
        one; otherwise as many as it admits, and those that are decided ahead. ``credit`` is rank 0's, and not taken."""
        batch: list[CommTask] = []
        ready, decided = self._ready[channel], credit.in_flight
        while (task := ready.best) is not None:
            if not batch and not credit.admits(task.nbytes):
                break
            if batch and decided + task.nbytes > credit.limit + self._ahead_bytes(channel, task, credit.limit):
                break
            batch.append(ready.pop())
            decided += task.nbytes
            self._digest = extend_digest(self._digest, task, channel)
            if self._count > 1:
                self._history.append((LaunchKey.of(task), self._digest))
        return batch

    def _ahead_bytes(self, channel: int, task: CommTask, credit_bytes: int) -> float:
        """The bytes beyond the credit by which launches on ``channel`` are decided ahead; ``task`` is the next."""
        if channel != LARGEST or task.verb != ALL_REDUCE:  # an all-gather becomes ready soon, and is urgent
            return 0
        step, nbytes = self._step_bytes.get(task.group, (-1, 0))
        missing = self._group_bytes.get(task.group, 0) - nbytes
        if step != task.step:
            return 0
        return min(missing * _AHEAD, credit_bytes * _AHEAD_OF_CREDIT) if missing > 0 else math.inf

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

    def confirm(self, rank: int, count: int, digest: str) -> None:
        """Check ``digest``, that of the ``count`` launches that ``rank`` has made so far.

        Raises:
            OrderMismatch: they are not what was decided; the message names the last of them.
        """
        if not self._confirmed[rank] <= count <= self.decided:
            raise OrderMismatch(f"rank {rank} has launched {count} times, where rank 0 has decided on {self.decided} launches")
        if self._digest_at(count) not in (None, digest):
            last = self._history[count - 1 - self._first][0]
            raise OrderMismatch(
                f"rank {rank} launched other bytes than rank 0 for {self._describe(last)}, or shortly before: the ranks have "
                "cut their tensors differently"
            )
        self._confirmed.raise_to(rank, count)
        while (
            self._first < self._confirmed.least - 1
        ):  # the last confirmed launch is kept, because a report may have its digest
            self._history.popleft()
            self._first += 1

    def _digest_at(self, count: int) -> str | None:
        place = count - 1 - self._first
        return self._history[place][1] if 0 <= place < len(self._history) else None

    def _require_present(self, key: LaunchKey) -> None:
        if not self._left:
            return
        ready = self._offered[key]
        gone = [rank for rank in self._left if self._leaders[rank] not in ready]
        if gone:
            raise peer_left_error(min(gone), self._describe(key))


def peer_left_error(rank: int, what: str) -> PeerLost:
    return PeerLost(f"rank {rank} left; {what} waits for it{FEWER_BATCHES}", rank=rank)
