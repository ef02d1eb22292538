"""The decisions of rank 0's control server. Pure: messages in, messages out; no thread, lock, clock or I/O.

The life of a job:

- Members join until every rank is present (Ready).
- Values are gathered, ranks send values to rank 0 (ToRank0), rank 0 sends values to the others (Announce), steps are agreed on.
- Ranks leave until the last one has left (End). A rank that has left need not wait for the others: it may end once no other
  rank waits for an average that it took part in. End then goes to this rank alone, or to all members if it is rank 0.
- Or the job fails: the first failure counts and is sent to every member (Failed).

No message follows End or Failed: a member that has received one ends its connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..core.errors import CommschedError, ConfigError, PeerLost, PeerTimeout, ProtocolError, from_record, ranks_text, to_record
from ..version import __version__
from . import messages
from .liveness import FailureDetector, too_silent
from .messages import ROLES, Member, Message, ranges_of

#: A message of gathered values has fewer characters than this, unless it is one value.
_MAX_OF_A_PART = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Send:
    """``message`` must be sent on each of ``connections``."""

    connections: tuple[int, ...]
    message: Message


class Roster:
    """The members of the job and the state of the job.

    The caller chooses one number per stream, its connection. ``now`` is rank 0's clock, in seconds. Each event method returns
    the messages to send, in order.

    No event but a tick takes a time that grows with the number of members, apart from the messages that it sends to all of
    them. The messages of a job whose ranks all do the same grow with their number, and not with its square: the values of a
    gather travel together once they are complete, and so do the notices of the ranks that leave between two ticks.

    ``host`` and ``pid`` are of rank 0's process, for messages. ``servers`` counts the parameter servers that are processes of
    their own.
    """

    def __init__(
        self,
        world_size: int,
        host: str,
        pid: int,
        *,
        fail_after_seconds: float,
        join_within_seconds: float,
        now: float,
        servers: int = 0,
    ) -> None:
        self.world_size = world_size
        self._servers = servers
        self.failure: CommschedError | None = None
        self.members: dict[int, Member] = {}  # by connection
        self._joined: dict[str, dict[int, int]] = {role: {} for role in ROLES}  # connections by role and index
        self.ready = False
        self.left: set[int] = set()
        self._untold: list[int] = []  # those of ``left`` that the others have not been told of
        self.given_up: set[int] = set()  # connections that were silent for too long
        self._refused = ""  # the process that was refused last
        self._turned_away: set[int] = set()  # connections of refused processes, whose heartbeats may still arrive
        self._welcome = messages.Welcome(host, pid)
        self._fail_after_seconds = fail_after_seconds
        self._join_within_seconds = join_within_seconds
        self._join_by = now + join_within_seconds
        self._liveness: FailureDetector[int] = FailureDetector(fail_after_seconds, now, world_size)
        self._parting: dict[int, set[int]] = {}  # rank that left and wants to end: ranks that have yet to spare it
        self._released: set[int] = set()  # connections of ranks that may end
        self._rank_0_ends = False
        self._gathers: dict[str, dict[int, str]] = {}  # tag: the values given so far, by rank
        self._proposals: deque[messages.Propose] = deque()
        self._held: dict[int, dict[int, int] | None] | None = None  # answers to the current proposal, by connection
        self._unanswered = 0  # connections in ``_held`` that have not answered

    @property
    def ended(self) -> bool:
        """Every rank has left, or rank 0 may end."""
        return len(self.left) == self.world_size or self._rank_0_ends

    @property
    def over(self) -> bool:
        return self.failure is not None or self.ended

    # --- events ---

    def received(self, connection: int, message: Message, now: float) -> list[Send]:
        member = self.members.get(connection)
        if member is None:
            late = isinstance(message, messages.Heartbeat) and connection in self._turned_away
            return [] if late else self._joins(connection, message, now)
        if self.over or connection in self._released:
            return []
        self._liveness.heard(connection)
        if isinstance(message, messages.Ping):
            return [Send((connection,), messages.Pong(message.sent_at, now))]
        handler = _OF_MEMBERS.get(type(message)) or (_OF_RANKS.get(type(message)) if member.is_rank and self.ready else None)
        if handler is None:
            return self.fail(ProtocolError(f"{member} sent {type(message).__name__}, which it may not send now"))
        return handler(self, connection, message)

    def invalid_message(self, connection: int, error: ProtocolError) -> list[Send]:
        """Bytes that are no message arrived on ``connection``."""
        member = self.members.get(connection)
        if member is None:
            return self._refuse(connection, ProtocolError(f"a process that wants to join sent {error}"))
        return self.fail(ProtocolError(f"{member} sent {error}"))

    def refused(self, why: str) -> None:
        """A process was refused before it could identify itself. It may be one of the missing ranks."""
        self._refused = why

    def disconnected(self, connection: int) -> list[Send]:
        """Nothing more will arrive on ``connection``."""
        member = self.members.pop(connection, None)
        if member is not None:
            del self._joined[member.role][member.index]
        self._liveness.forget(connection)
        self._turned_away.discard(connection)
        if connection in self._released:
            return []
        return self.fail(PeerLost(f"{member} is gone: its connection broke", **member.about)) if member is not None else []

    def tick(self, now: float) -> list[Send]:
        """Time has passed."""
        if self.over:
            return []
        overdue = self._liveness.tick(now)
        if overdue:
            self.given_up.update(connection for connection, _ in overdue)
            connection, silence = max(overdue, key=lambda peer: peer[1])
            member = self.members[connection]
            return self.fail(too_silent(member, silence, self._fail_after_seconds))
        if not self.ready and now >= self._join_by:
            return self.fail(PeerTimeout(self._who_is_missing()))
        return self.tell_left()

    def tell_left(self) -> list[Send]:
        """Notify all members of the ranks that have left since the last notice. Called between ticks where there are none."""
        if self.failure is not None or not self._untold:
            return []
        ranges, self._untold = ranges_of(self._untold), []
        return [Send(tuple(self.members), messages.Left(ranges))]

    def doubtful(self) -> list[tuple[int, Member]]:
        """The connections and members that have been silent for so long that their witnesses should be asked."""
        return [] if self.over else [(connection, self.members[connection]) for connection in self._liveness.doubtful()]

    def runs(self, connection: int) -> None:
        """A witness reports that the member's process runs."""
        if connection in self.members and connection not in self._released:
            self._liveness.heard(connection)

    def fail(self, error: CommschedError) -> list[Send]:
        """The job failed, unless it is over already."""
        if self.over:
            return []
        self.failure = error
        return [Send(tuple(self.members), messages.Failed(to_record(error)))]

    # --- joining ---

    def _joins(self, connection: int, message: Message, now: float) -> list[Send]:
        if not isinstance(message, messages.Hello):
            return self._refuse(connection, ProtocolError(f"a process sent {type(message).__name__} before its hello"))
        if self.over:
            return self._refuse(connection, None)
        member = message.member
        if member.is_rank and member.index in self.left:  # its next session: rank 0 is still in this one
            return self._refuse(connection, None)
        objection = self._objection(message)
        if objection is not None:
            return self._refuse(connection, objection)
        before = self.tell_left()  # the new member is told of all ranks that have left, and of each once
        self.members[connection] = member
        self._joined[member.role][member.index] = connection
        self._liveness.heard(connection)
        sends = [Send((connection,), self._welcome)]
        if self.ready:
            left = [Send((connection,), messages.Left(ranges_of(self.left)))] if self.left else []
            return [*before, *sends, Send((connection,), self._all_joined()), *left]
        if member.is_rank:
            self._join_by = min(self._join_by, now + message.within_seconds)
        if len(self._ranks) == self.world_size:
            self.ready = True
            sends.append(Send(tuple(self.members), self._all_joined()))
        return sends

    def _objection(self, hello: messages.Hello) -> CommschedError | None:
        member = hello.member
        if hello.version != __version__:
            return ProtocolError(
                f"{member} runs commsched {hello.version}, but rank 0 ({self._welcome.host}) runs commsched {__version__}; "
                "install the same version everywhere"
            )
        if member.is_rank and member.world_size != self.world_size:
            return ConfigError(f"{member} says there are {member.world_size} ranks, but rank 0 says {self.world_size}")
        if member.is_rank and member.index >= self.world_size:
            return ConfigError(f"{member} is not one of the {self.world_size} ranks, which are counted from 0")
        if not member.is_rank and member.index >= self._servers:
            return ConfigError(f"{member} is not one of the {self._servers} parameter servers that rank 0 was given")
        connection = self._joined[member.role].get(member.index)
        if connection is not None:
            other = self.members[connection]
            return ConfigError(
                f"two processes say that they are {member.role} {member.index}: one on {other.process} and one on "
                f"{member.process}"
            )
        return None

    def _refuse(self, connection: int, error: CommschedError | None) -> list[Send]:
        """Refuse a process. Until all ranks have joined, the job cannot begin without it, so the refusal fails the job for
        every member. Later the job does not need the process, and goes on."""
        sends = self.fail(error) if error is not None and not self.ready else []
        self._turned_away.add(connection)
        verdict = self.failure or error
        return [*sends, Send((connection,), messages.Failed(to_record(verdict)) if verdict is not None else messages.End())]

    def _who_is_missing(self) -> str:
        missing = sorted(set(range(self.world_size)) - self._ranks.keys())
        refused = f"; rank 0 refused {self._refused}" if self._refused else ""
        return f"{ranks_text(missing)} of {self.world_size} did not join within {self._join_within_seconds:g} s{refused}"

    @property
    def _ranks(self) -> dict[int, int]:
        """The connection of each rank that has joined."""
        return self._joined["rank"]

    def _all_joined(self) -> messages.Ready:
        return messages.Ready(self.members[self._ranks[0]].witness if 0 in self._ranks else "")

    # --- while the job runs ---

    def _give(self, connection: int, message: messages.Gather) -> list[Send]:
        rank, tag = self.members[connection].index, message.tag
        gave = self._gathers.setdefault(tag, {})
        if rank in gave or rank in self.left:
            return self.fail(
                ProtocolError(
                    f"{self.members[connection]} contributed to '{tag}' {'twice' if rank in gave else 'after it left'}"
                )
            )
        if (other := self._same_turn(tag)) is not None:
            return self._other_purposes(tag, rank, other)
        last = next(reversed(gave.values()), None)
        gave[rank] = last if last == message.value else message.value  # values are mostly equal: keep one
        if gone := [other for other in self.left if other not in gave]:
            return self._nobody_gives(tag, min(gone))
        if len(gave) < self.world_size:
            return []
        del self._gathers[tag]
        ranks = tuple(self._ranks.values())
        return [Send(ranks, messages.GatherPart(tag, runs)) for runs in _parts([gave[rank] for rank in range(self.world_size)])]

    def _same_turn(self, tag: str) -> str | None:
        """The tag of another gather that is as far in its ranks' order of gathers as ``tag``. Neither can ever be complete."""
        turn = tag.partition(",")[0]
        return next((other for other in self._gathers if other != tag and other.partition(",")[0] == turn), None)

    def _other_purposes(self, tag: str, rank: int, other: str) -> list[Send]:
        theirs = min(self._gathers[other])
        purposes = [each.partition(", ")[2] or "for another purpose" for each in (other, tag)]
        return self.fail(
            ConfigError(
                f"rank {theirs} waits for all ranks {purposes[0]}, and rank {rank} {purposes[1]}: all ranks must make these "
                "calls in the same order"
            )
        )

    def _ask_missing(self, connection: int, message: messages.AskMissing) -> list[Send]:
        gave = self._gathers.get(message.tag)
        if gave is None:  # it has become complete
            return []
        missing = ranges_of(set(range(self.world_size)) - gave.keys())
        return [Send((connection,), messages.Missing(message.tag, missing))]

    def _nobody_gives(self, tag: str, rank: int) -> list[Send]:
        connection = self._ranks.get(rank)
        who = self.members[connection] if connection is not None else f"rank {rank}"
        purpose = tag.partition(", ")[2]
        if not purpose:
            return self.fail(PeerLost(f"{who} left, but '{tag}' waits for it", rank=rank))
        return self.fail(
            PeerLost(
                f"{who} left, but other ranks wait for it {purpose}: every rank must run the same training loop; look for a "
                "condition on the rank, or a rank without batches",
                rank=rank,
            )
        )

    def _report(self, connection: int, message: messages.ReportFailure) -> list[Send]:
        return self.fail(from_record(message.error))

    def _leave(self, connection: int, message: messages.Leave) -> list[Send]:
        rank = self.members[connection].index
        if rank in self.left:
            return self.fail(ProtocolError(f"{self.members[connection]} left twice"))
        for tag, gave in self._gathers.items():
            if rank not in gave:
                return self._nobody_gives(tag, rank)
        self.left.add(rank)
        self._untold.append(rank)
        if self.ended:
            return [*self.tell_left(), Send(tuple(self.members), messages.End())]
        sends: list[Send] = []
        for parting in tuple(self._parting):  # a rank that leaves has received all averages
            sends += self._spared(parting, rank)
        return sends

    def _part(self, connection: int, message: messages.Part) -> list[Send]:
        rank = self.members[connection].index
        if rank not in self.left or rank in self._parting:
            return self.fail(ProtocolError(f"{self.members[connection]} asked to part, but has not left, or asked before"))
        self._parting[rank] = set(range(self.world_size)) - self.left
        return [*self.tell_left(), Send(self._present(), messages.Parting(rank))]

    def _released_by(self, connection: int, message: messages.Released) -> list[Send]:
        return self._spared(message.rank, self.members[connection].index)

    def _spared(self, rank: int, by: int) -> list[Send]:
        waiting = self._parting.get(rank)
        if not waiting:
            return []
        waiting.discard(by)
        if waiting or self.over:
            return []
        if rank == 0:
            self._rank_0_ends = True
            return [*self.tell_left(), Send(tuple(self.members), messages.End())]
        connection = self._ranks[rank]
        self._released.add(connection)
        self._liveness.forget(connection)
        sends = [Send((connection,), messages.End())]
        if self._held is not None and connection in self._held and self._held[connection] is None:
            del self._held[connection]  # it begins no step
            sends += self._one_answer_less()
        return sends

    def _bye(self, connection: int, message: messages.Disconnect) -> list[Send]:
        member = self.members[connection]
        return self.fail(PeerLost(f"{member} is gone: it closed before all ranks had left", **member.about))

    # --- values to rank 0 and from it ---

    def _to_rank_0(self, connection: int, message: messages.ToRank0) -> list[Send]:
        rank = self.members[connection].index
        if rank == 0:
            return self.fail(ProtocolError(f"{self.members[connection]} sent itself a message"))
        if rank in self.left:
            return self.fail(ProtocolError(f"{self.members[connection]} sent rank 0 a message after it left"))
        # Also if rank 0 has left: it stays until the end.
        return [Send((self._ranks[0],), messages.FromRank(rank, message.topic, message.value))]

    def _announce(self, connection: int, message: messages.Announce) -> list[Send]:
        if self.members[connection].index != 0:
            return self.fail(ProtocolError(f"{self.members[connection]} announced something; only rank 0 may"))
        others: Iterable[int] = self._present()
        if message.to:
            others = (self._ranks[rank] for rank in message.to if rank in self._ranks and rank not in self.left)
        others = tuple(other for other in others if other != connection)
        return [Send(others, messages.Announced(message.topic, message.value))] if others else []

    def _present(self) -> tuple[int, ...]:
        """The connections of the ranks that have not left, in rank order."""
        return tuple(connection for rank, connection in sorted(self._ranks.items()) if rank not in self.left)

    # --- agreeing on a step ---

    def _propose(self, connection: int, message: messages.Propose) -> list[Send]:
        self._proposals.append(message)
        return self._ask()

    def _ask(self) -> list[Send]:
        """Take up the next proposal, unless one is being handled."""
        if self._held is not None or not self._proposals:
            return []
        present = self._present()
        self._held = dict.fromkeys(present)
        self._unanswered = len(present)
        return [Send(present, messages.Prepare())]

    def _answer(self, connection: int, message: messages.Prepared) -> list[Send]:
        if self._held is None or self._held.get(connection, {}) is not None:
            return self.fail(ProtocolError(f"{self.members[connection]} promised steps that nobody asked for"))
        self._held[connection] = message.steps
        return self._one_answer_less()

    def _one_answer_less(self) -> list[Send]:
        assert self._held is not None
        self._unanswered -= 1
        if self._unanswered:
            return []
        promises = [steps for steps in self._held.values() if steps is not None]
        asked, self._held = tuple(each for each in self._held if each not in self._released), None
        proposal = self._proposals.popleft()
        commit = messages.Commit(proposal.config, first_common_steps(promises), proposal.window)
        return [Send(asked, commit), *self._ask()]


def first_common_steps(promises: Iterable[dict[int, int]]) -> dict[int, int]:
    """Return, for every group that any rank knows, the first step that no rank has begun or may begin before it is notified.

    ``promises``: for each rank, a map from each group to the first step that the rank holds. A rank that does not know a group
    yet holds its step 1: ranks add a group one after another, so a group that was left out because one rank had not added it
    would miss the change for ever.
    """
    each = list(promises)
    return {group: max(steps.get(group, 1) for steps in each) for group in sorted(set().union(*each))}


def _parts(values: list[str]) -> Iterator[tuple[tuple[int, str], ...]]:
    """``values`` as runs of equal neighbours, in parts that a member accepts as one message each."""
    part: list[tuple[int, str]] = []
    characters = 0
    for value, equal in groupby(values):
        if part and characters + len(value) > _MAX_OF_A_PART:
            yield tuple(part)
            part, characters = [], 0
        part.append((len(list(equal)), value))
        characters += len(value)
    yield tuple(part)


_Handler = Callable[[Roster, int, Any], list[Send]]

_OF_MEMBERS: dict[type[Message], _Handler] = {
    messages.Heartbeat: lambda roster, connection, message: [],
    messages.Disconnect: Roster._bye,
    messages.ReportFailure: Roster._report,
}

#: Messages from ranks only, and only once all ranks have joined.
_OF_RANKS: dict[type[Message], _Handler] = {
    messages.Gather: Roster._give,
    messages.AskMissing: Roster._ask_missing,
    messages.Leave: Roster._leave,
    messages.Part: Roster._part,
    messages.Released: Roster._released_by,
    messages.Propose: Roster._propose,
    messages.ToRank0: Roster._to_rank_0,
    messages.Announce: Roster._announce,
    messages.Prepared: Roster._answer,
}
