"""Which messages leave first on a link that a rank shares with a shard of the parameter server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Protocol

#: A receiver that has so many bytes of a step's replies fewer to come than another one, and more than two of the largest
#: messages fewer, starts no other reply. (On shaped links one, two and four messages of 70 KB gave equal steps.)
_MOST_AHEAD_BYTES, _MOST_MESSAGES_AHEAD = 128_000, 2

#: It is woken when it has so many bytes fewer to come, or two messages, so that small messages still leave together.
_WOKEN_BYTES = 64_000

#: Receivers do not wait for those that are furthest behind when these have come no nearer for so long: the link would be idle.
#: TCP needs as long to notice that a last segment is lost, and a garbage collection may take longer. The time counts anew when
#: replies need not give way to pushes any more, since no receiver gets one before.
_PATIENCE_SECONDS = 0.2

#: A group of tensors, and a step of it.
GroupStep = tuple[int, int]


class Yielding(Protocol):
    """A stream, or several to one peer, whose messages give way."""

    def way_is_free(self) -> None:
        """A message may leave now. Called without a lock."""


class _Replies:
    """The replies of one step that are to leave: how many bytes to each receiver. All receivers get equally many, so who has
    fewer to come is ahead."""

    def __init__(self) -> None:
        self.to: dict[Yielding, int] = {}
        self.most = 0
        self._largest = 0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Those that are furthest behind got a reply, or may get one again."""
        self._patient_until = monotonic() + _PATIENCE_SECONDS

    def add(self, of: Yielding, nbytes: int) -> None:
        self.to[of] = left = self.to.get(of, 0) + nbytes
        self.most = max(self.most, left)
        self._largest = max(self._largest, nbytes)

    def remove(self, of: Yielding, nbytes: int) -> bool:
        """Returns whether ``most`` has fallen."""
        left = self.to[of]
        if left > nbytes:
            self.to[of] = left - nbytes
        else:
            del self.to[of]
        if left == self.most:
            self.most = max(self.to.values(), default=0)
            if self.most < left:
                self.restart_clock()
                return True
        return False

    def lead(self, of: Yielding) -> int:
        """``of`` has so many bytes fewer to come than the receiver that is furthest behind."""
        return self.most - self.to.get(of, 0)

    def seconds_to_wait(self, of: Yielding) -> float:
        """A reply to ``of`` waits for so many seconds at most, if nobody gets one meanwhile. 0 if it may leave."""
        if self.lead(of) <= max(_MOST_AHEAD_BYTES, _MOST_MESSAGES_AHEAD * self._largest):
            return 0.0
        return max(0.0, self._patient_until - monotonic())

    @property
    def woken_lead(self) -> int:
        """The lead in bytes with which a receiver that waits is woken."""
        return max(_WOKEN_BYTES, _MOST_MESSAGES_AHEAD * self._largest)


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
    there. Of the receivers of a step's replies the one that is furthest behind waits for no other, and the threads of receivers
    always read. Others stop waiting for it after a while without a reply to it. The price: where ranks have links of different
    speeds, all get their averages at the pace of the slowest.

    A row of norms counts as a message of the group whose averages it is about. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pushes = 0
        self._latest: dict[int, int] = {}  # by group: the latest step of which this rank has begun a push
        self._replies: dict[GroupStep, _Replies] = {}  # those that are to leave
        # Their steps. They are read without the lock, so the tuple is replaced and never changed.
        self._steps: tuple[GroupStep, ...] = ()
        # Who is to be woken. The value is the lead in bytes with which one that is ahead may go on, and -1 for all others.
        self._waiting: dict[Yielding, int] = {}

    def push_begins(self, step: GroupStep) -> None:
        """A push is to leave. Replies of its step give way until :meth:`push_left`."""
        group, number = step
        waiting: Sequence[Yielding] = ()
        with self._lock:
            self._pushes += 1
            if number > self._latest.get(group, -1):
                self._latest[group] = number
                waiting = self._replies_are_free()  # those of the step before need not give way any more
        _wake(waiting)

    def push_left(self) -> None:
        waiting: Sequence[Yielding] = ()
        with self._lock:
            self._pushes -= 1
            if self._pushes == 0:
                waiting = self._replies_are_free()
        _wake(waiting)

    def reply_begins(self, of: Yielding, step: GroupStep, nbytes: int) -> None:
        """A reply is to leave. Pushes of later steps give way until :meth:`reply_left`, or until ``of`` is forgotten."""
        with self._lock:
            if (replies := self._replies.get(step)) is None:
                replies = self._replies[step] = _Replies()
                self._steps = tuple(self._replies)
            replies.add(of, nbytes)

    def reply_left(self, of: Yielding, step: GroupStep, nbytes: int) -> None:
        waiting: Sequence[Yielding] = ()
        with self._lock:
            replies = self._replies.get(step)
            if replies is None or of not in replies.to:
                return  # ``of`` was forgotten meanwhile
            if replies.remove(of, nbytes):
                waiting = self._fewer(step, replies)
        _wake(waiting)

    def release(self, group: int) -> None:
        """Forget ``group``, which has had its last step. Replies of it give way to no push any more."""
        with self._lock:
            waiting = self._replies_are_free() if self._latest.pop(group, None) is not None else ()
        _wake(waiting)

    def is_free_for_reply(self, of: Yielding, step: GroupStep) -> bool:
        return not self._gives_way_to_pushes(step) and not self._seconds_for_pace(of, step)

    def is_free_for_push(self, step: GroupStep) -> bool:
        group, number = step
        return not any(of == group and earlier < number for of, earlier in self._steps)

    def seconds_to_wait(self, asking: Yielding, pushes: Sequence[GroupStep], replies: Sequence[GroupStep]) -> float:
        """``asking`` is to ask again after so many seconds, since none of these messages may leave now. 0 if one may.

        In that time :meth:`Yielding.way_is_free` of ``asking`` is called once, when one of them may leave, or some other
        message. It asks again then, too.
        """
        with self._lock:
            among_replies = [step for step in replies if not self._gives_way_to_pushes(step)]
            seconds = [self._seconds_for_pace(asking, step) for step in among_replies]
            if not all(seconds) or any(map(self.is_free_for_push, pushes)):
                return 0.0
            self._waiting[asking] = max((self._replies[step].woken_lead for step in among_replies), default=-1)
            return min(seconds, default=inf)

    def _gives_way_to_pushes(self, step: GroupStep) -> bool:
        group, number = step
        return self._pushes > 0 and number >= self._latest.get(group, inf)

    def _seconds_for_pace(self, of: Yielding, step: GroupStep) -> float:
        replies = self._replies.get(step)
        return 0.0 if replies is None else replies.seconds_to_wait(of)

    def forget(self, gone: Yielding) -> None:
        """Do not notify ``gone`` any more, and wait for none of its replies."""
        waiting: Sequence[Yielding] = ()
        with self._lock:
            self._waiting.pop(gone, None)
            for step, replies in list(self._replies.items()):
                if gone in replies.to and replies.remove(gone, replies.to[gone]):
                    waiting = [*waiting, *self._fewer(step, replies)]
        _wake(waiting)

    # --- called with the lock held ---

    def _fewer(self, step: GroupStep, replies: _Replies) -> Sequence[Yielding]:
        """The receiver that is furthest behind has come nearer to the others, or there is none any more. Returns who is to be
        woken."""
        if not replies.to:
            del self._replies[step]
            self._steps = tuple(self._replies)
            return self._take_waiting()
        woken = [each for each, lead in self._waiting.items() if replies.lead(each) <= lead]
        for each in woken:
            del self._waiting[each]
        return woken

    def _replies_are_free(self) -> Sequence[Yielding]:
        """Some replies need not give way to pushes any more. Returns who is to be woken."""
        for replies in self._replies.values():
            replies.restart_clock()
        return self._take_waiting()

    def _take_waiting(self) -> Sequence[Yielding]:
        waiting, self._waiting = list(self._waiting), {}
        return waiting

    def __repr__(self) -> str:
        with self._lock:
            pushes, replies, waiting = self._pushes, sum(len(each.to) for each in self._replies.values()), len(self._waiting)
        return f"<RightOfWay {pushes} pushes and replies to {replies} receivers to leave, {waiting} streams give way>"


def _wake(waiting: Sequence[Yielding]) -> None:
    for each in waiting:
        each.way_is_free()
