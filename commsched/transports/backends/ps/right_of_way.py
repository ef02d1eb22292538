"""Which messages leave first on a link that a rank shares with a shard of the parameter server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import inf
from typing import Protocol

#: By how many replies of a step a receiver may be ahead of another one. With 1, 2 and 4 steps on shaped links were equally long.
_MOST_AHEAD = 2

#: A group of tensors, and a step of it.
GroupStep = tuple[int, int]


class Yielding(Protocol):
    """A stream, or several to one peer, whose messages give way."""

    def way_is_free(self) -> None:
        """A message may leave now. Called without a lock."""


class _Replies:
    """The replies of one step that are to leave: how many to each receiver. All receivers get the same ones, in the same
    order, so who has fewer to come is ahead."""

    def __init__(self) -> None:
        self.to: dict[Yielding, int] = {}
        self.most = 0

    def add(self, of: Yielding) -> None:
        self.to[of] = count = self.to.get(of, 0) + 1
        self.most = max(self.most, count)

    def remove(self, of: Yielding, all_of_them: bool = False) -> bool:
        """Remove one. Returns whether ``most`` has fallen."""
        count = self.to.pop(of)
        if count > 1 and not all_of_them:
            self.to[of] = count - 1
        if count < self.most:
            return False
        self.most = max(self.to.values(), default=0)
        return self.most < count


class RightOfWay:
    """Which messages leave first on the link that pushes of a rank share with replies of the shard that it hosts.

    **A reply gives way to pushes of its step.** All ranks wait for a push, but only one rank waits for a reply. If both share
    the link equally, replies of layers that are needed last delay the pushes of front layers. In simulation and on shaped links
    that costs 4 to 8 % of a step.

    **A push gives way to replies of earlier steps.** Their receivers are behind, in that earlier step, and no push of this rank
    can be averaged before they have caught up. If such replies gave way, or shared the link equally, a rank that is a little
    ahead would hold back the others, and ranks would take turns at being ahead: on shaped links, where communication takes
    twice as long as computation, steps then took up to 1.4 times as long as they need.

    **A reply gives way if its receiver is ahead of another one.** Connections that share a link do not share it equally, and a
    step of all ranks ends with that of the last. A rank that gets its averages late is also late with its pushes in the next
    step. On shaped links ranks began a step up to 0.2 s apart, and steps took up to 3 % longer.

    Nothing waits for ever. A push waits only for replies of its group that do not give way to pushes any more once the push is
    there. Of the receivers of a step's replies the one that is behind waits for no other, and the threads of receivers always
    read.

    A row of norms counts as a message of the group whose averages it is about. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pushes = 0
        self._latest: dict[int, int] = {}  # by group: the latest step of which this rank has begun a push
        self._replies: dict[GroupStep, _Replies] = {}  # those that are to leave
        # Their steps. They are read without the lock, so the tuple is replaced and never changed.
        self._steps: tuple[GroupStep, ...] = ()
        # Who is to be woken, and whether also when the last receiver of a step's replies comes nearer to the others.
        self._waiting: dict[Yielding, bool] = {}

    def push_begins(self, step: GroupStep) -> None:
        """A push is to leave. Replies of its step give way until :meth:`push_left`."""
        group, number = step
        waiting: Sequence[Yielding] = ()
        with self._lock:
            self._pushes += 1
            if number > self._latest.get(group, -1):
                self._latest[group] = number
                waiting = self._take_waiting()  # replies of the step before need not give way any more
        _wake(waiting)

    def push_left(self) -> None:
        waiting: Sequence[Yielding] = ()
        with self._lock:
            self._pushes -= 1
            if self._pushes == 0:
                waiting = self._take_waiting()
        _wake(waiting)

    def reply_begins(self, of: Yielding, step: GroupStep) -> None:
        """A reply is to leave. Pushes of later steps give way until :meth:`reply_left`, or until ``of`` is forgotten."""
        with self._lock:
            if (replies := self._replies.get(step)) is None:
                replies = self._replies[step] = _Replies()
                self._steps = tuple(self._replies)
            replies.add(of)

    def reply_left(self, of: Yielding, step: GroupStep) -> None:
        waiting: Sequence[Yielding] = ()
        with self._lock:
            replies = self._replies.get(step)
            if replies is None or of not in replies.to:
                return  # ``of`` was forgotten meanwhile
            if replies.remove(of):
                waiting = self._fewer(step, replies)
        _wake(waiting)

    def release(self, group: int) -> None:
        """Forget ``group``, which has had its last step. Replies of it give way to nothing."""
        with self._lock:
            waiting = self._take_waiting() if self._latest.pop(group, None) is not None else ()
        _wake(waiting)

    def is_free_for_reply(self, of: Yielding, step: GroupStep) -> bool:
        group, number = step
        gives_way_to_pushes = self._pushes > 0 and number >= self._latest.get(group, inf)
        return not gives_way_to_pushes and not self._is_ahead(of, step)

    def is_free_for_push(self, step: GroupStep) -> bool:
        group, number = step
        return not any(of == group and earlier < number for of, earlier in self._steps)

    def must_wait(self, asking: Yielding, pushes: Sequence[GroupStep], replies: Sequence[GroupStep]) -> bool:
        """Whether none of these messages may leave now. Then :meth:`Yielding.way_is_free` of ``asking`` is called once, when
        one of them may, or some other message. It asks again."""
        with self._lock:
            if any(map(self.is_free_for_push, pushes)) or any(self.is_free_for_reply(asking, step) for step in replies):
                return False
            self._waiting[asking] = any(self._is_ahead(asking, step) for step in replies)
            return True

    def _is_ahead(self, of: Yielding, step: GroupStep) -> bool:
        replies = self._replies.get(step)
        return replies is not None and replies.most - replies.to.get(of, 0) > _MOST_AHEAD

    def forget(self, gone: Yielding) -> None:
        """Do not notify ``gone`` any more, and wait for none of its replies."""
        waiting: Sequence[Yielding] = ()
        with self._lock:
            self._waiting.pop(gone, None)
            for step, replies in list(self._replies.items()):
                if gone in replies.to and replies.remove(gone, all_of_them=True):
                    waiting = [*waiting, *self._fewer(step, replies)]
        _wake(waiting)

    # --- called with the lock held ---

    def _fewer(self, step: GroupStep, replies: _Replies) -> Sequence[Yielding]:
        """The last receiver has come nearer to the others, or there is none any more. Returns who is to be woken."""
        if replies.to:
            return self._take_waiting(only_ahead=True)
        del self._replies[step]
        self._steps = tuple(self._replies)
        return self._take_waiting()

    def _take_waiting(self, only_ahead: bool = False) -> Sequence[Yielding]:
        taken = [each for each, is_ahead in self._waiting.items() if is_ahead or not only_ahead]
        for each in taken:
            del self._waiting[each]
        return taken

    def __repr__(self) -> str:
        replies = sum(sum(each.to.values()) for each in self._replies.values())
        return f"<RightOfWay {self._pushes} pushes and {replies} replies to leave, {len(self._waiting)} streams give way>"


def _wake(waiting: Sequence[Yielding]) -> None:
    for each in waiting:
        each.way_is_free()
