"""What rank 0's control server decides. Pure: messages in, messages out; no thread, lock, clock or I/O.

Life of a job: members join until every rank is there (Ready); values are gathered, ranks tell rank 0 and it announces, steps
are agreed on; ranks leave until the last has (End). Or it fails: the first failure counts and is told to every member
(Failed). Nothing comes after either: a member that has heard it ends its connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..core.errors import CommschedError, ConfigError, PeerLost, PeerTimeout, ProtocolError, from_record, to_record
from ..version import __version__
from .liveness import Liveness, too_silent
from .member import Member
from .messages import (
    Announce,
    Announced,
    Beat,
    Bye,
    End,
    Failed,
    Give,
    Given,
    Held,
    Hello,
    Hold,
    Leave,
    Left,
    Message,
    Ping,
    Pong,
    Propose,
    Ready,
    Report,
    SwitchAt,
    Tell,
    Told,
    Welcome,
)


@dataclass(frozen=True, slots=True)
class Send:
    """``message`` is to go out on each of ``connections``."""

    connections: tuple[int, ...]
    message: Message


class Roster:
    """Who is in the job and what has become of it.

    Connections are numbers that the caller chooses, one for each stream; ``now`` is rank 0's clock, in seconds. Each event
    returns what to send, in order.

    Args:
        host: of the process that decides, and pid: rank 0's; for messages.
    """

    def __init__(
        self, world_size: int, host: str, pid: int, *, fail_after_seconds: float, join_within_seconds: float, now: float
    ) -> None:
        self.world_size = world_size
        self.failure: CommschedError | None = None
        self.members: dict[int, Member] = {}  # by connection
        self.ready = False
        self.left: set[int] = set()
        self.given_up: set[int] = set()  # connections that were silent for too long
        self._welcome = Welcome(host, pid)
        self._fail_after_seconds = fail_after_seconds
        self._join_within_seconds = join_within_seconds
        self._join_by = now + join_within_seconds
        self._liveness: Liveness[int] = Liveness(fail_after_seconds, now)
        self._gathers: dict[str, set[int]] = {}  # tag: the ranks that gave
        self._proposals: deque[dict[str, Any]] = deque()
        self._held: dict[int, dict[int, int] | None] | None = None  # answers to the proposal in turn, by connection

    @property
    def ended(self) -> bool:
        """Every rank has left."""
        return len(self.left) == self.world_size

    @property
    def over(self) -> bool:
        return self.failure is not None or self.ended

    # --- events ---

    def received(self, connection: int, message: Message, now: float) -> list[Send]:
        """``message`` came in on ``connection``."""
        member = self.members.get(connection)
        if member is None:
            return self._joins(connection, message, now)
        if self.over:
            return []
        self._liveness.heard(connection)
        if isinstance(message, Ping):
            return [Send((connection,), Pong(message.sent_at, now))]
        handler = _OF_MEMBERS.get(type(message)) or (_OF_RANKS.get(type(message)) if member.is_rank and self.ready else None)
        if handler is None:
            return self.fail(ProtocolError(f"{member} sent {type(message).__name__}, which is not its to send now"))
        return handler(self, connection, message)

    def garbage(self, connection: int, error: ProtocolError) -> list[Send]:
        """Something came in on ``connection`` that is no message."""
        member = self.members.get(connection)
        if member is None:
            return self._refuse(connection, ProtocolError(f"a process that wants to join sent {error}"))
        return self.fail(ProtocolError(f"{member} sent {error}"))

    def disconnected(self, connection: int) -> list[Send]:
        """Nothing more will come in on ``connection``."""
        member = self.members.pop(connection, None)
        self._liveness.forget(connection)
        return self.fail(PeerLost(f"{member} is gone: its connection broke")) if member is not None else []

    def tick(self, now: float) -> list[Send]:
        """Time has passed."""
        if self.over:
            return []
        overdue = self._liveness.tick(now)
        if overdue:
            self.given_up.update(connection for connection, _ in overdue)
            connection, silence = max(overdue, key=lambda peer: peer[1])
            member = self.members[connection]
            return self.fail(too_silent(str(member), silence, self._fail_after_seconds))
        if not self.ready and now >= self._join_by:
            return self.fail(PeerTimeout(self._who_is_missing()))
        return []

    def fail(self, error: CommschedError) -> list[Send]:
        """The job failed, unless it is over already."""
        if self.over:
            return []
        self.failure = error
        return [Send(tuple(self.members), Failed(to_record(error)))]

    # --- joining ---

    def _joins(self, connection: int, message: Message, now: float) -> list[Send]:
        if not isinstance(message, Hello):
            return self._refuse(connection, ProtocolError(f"a process sent {type(message).__name__} before its hello"))
        if self.over:
            return self._refuse(connection, None)
        member = message.member
        objection = self._objection(message)
        if objection is not None:
            return self._refuse(connection, objection)
        self.members[connection] = member
        self._liveness.heard(connection)
        sends = [Send((connection,), self._welcome)]
        if self.ready:
            return [*sends, Send((connection,), Ready()), *(Send((connection,), Left(rank)) for rank in sorted(self.left))]
        if member.is_rank:
            self._join_by = min(self._join_by, now + message.within_seconds)
        if len(self._ranks()) == self.world_size:
            self.ready = True
            sends.append(Send(tuple(self.members), Ready()))
        return sends

    def _objection(self, hello: Hello) -> CommschedError | None:
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
        for other in self.members.values():
            if (other.role, other.index) == (member.role, member.index):
                return ConfigError(
                    f"two processes say that they are {member.role} {member.index}: one on {other.process} and one on "
                    f"{member.process}"
                )
        return None

    def _refuse(self, connection: int, error: CommschedError | None) -> list[Send]:
        """Turn a process away. Until all ranks are there the job cannot begin without it, so that everybody is told; later
        the job does not need it, and goes on."""
        sends = self.fail(error) if error is not None and not self.ready else []
        verdict = self.failure or error
        return [*sends, Send((connection,), Failed(to_record(verdict)) if verdict is not None else End())]

    def _who_is_missing(self) -> str:
        missing = sorted(set(range(self.world_size)) - self._ranks().keys())
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return f"{ranks} of {self.world_size} did not join within {self._join_within_seconds:g} s"

    def _ranks(self) -> dict[int, int]:
        """The connection of each rank that is there."""
        return {member.index: connection for connection, member in self.members.items() if member.is_rank}

    # --- while the job runs ---

    def _beat(self, connection: int, message: Beat) -> list[Send]:
        return []

    def _give(self, connection: int, message: Give) -> list[Send]:
        rank, tag = self.members[connection].index, message.tag
        gave = self._gathers.setdefault(tag, set())
        if rank in gave or rank in self.left:
            return self.fail(
                ProtocolError(f"{self.members[connection]} gave to '{tag}' {'twice' if rank in gave else 'after it left'}")
            )
        gave.add(rank)
        if len(gave) == self.world_size:
            del self._gathers[tag]
        if gone := self.left - gave:
            return self._nobody_gives(tag, min(gone))
        return [Send(tuple(self._ranks().values()), Given(tag, rank, message.value))]

    def _nobody_gives(self, tag: str, rank: int) -> list[Send]:
        return self.fail(PeerLost(f"{self.members[self._ranks()[rank]]} left, but '{tag}' waits for it"))

    def _report(self, connection: int, message: Report) -> list[Send]:
        return self.fail(from_record(message.error))

    def _leave(self, connection: int, message: Leave) -> list[Send]:
        rank = self.members[connection].index
        if rank in self.left:
            return self.fail(ProtocolError(f"{self.members[connection]} left twice"))
        for tag, gave in self._gathers.items():
            if rank not in gave:
                return self._nobody_gives(tag, rank)
        self.left.add(rank)
        sends = [Send(self._all_but(connection), Left(rank))]
        if self.ended:
            sends.append(Send(tuple(self.members), End()))
        return sends

    def _bye(self, connection: int, message: Bye) -> list[Send]:
        return self.fail(PeerLost(f"{self.members[connection]} is gone: it closed before all ranks had left"))

    def _all_but(self, connection: int) -> tuple[int, ...]:
        return tuple(other for other in self.members if other != connection)

    # --- to rank 0 and from it ---

    def _tell(self, connection: int, message: Tell) -> list[Send]:
        rank = self.members[connection].index
        if rank == 0:
            return self.fail(ProtocolError(f"{self.members[connection]} told itself something"))
        if rank in self.left:
            return self.fail(ProtocolError(f"{self.members[connection]} told rank 0 something after it left"))
        return [Send((self._ranks()[0],), Told(rank, message.value))]  # even if rank 0 has left: it is there until the end

    def _announce(self, connection: int, message: Announce) -> list[Send]:
        if self.members[connection].index != 0:
            return self.fail(ProtocolError(f"{self.members[connection]} announced something; only rank 0 may"))
        others = tuple(other for other in self._present() if other != connection)
        return [Send(others, Announced(message.value))] if others else []

    def _present(self) -> tuple[int, ...]:
        """The connections of the ranks that have not left, in rank order."""
        return tuple(connection for rank, connection in sorted(self._ranks().items()) if rank not in self.left)

    # --- agreeing on a step ---

    def _propose(self, connection: int, message: Propose) -> list[Send]:
        self._proposals.append(message.config)
        return self._ask()

    def _ask(self) -> list[Send]:
        """Take up the next proposal, unless one is being handled."""
        if self._held is not None or not self._proposals:
            return []
        present = self._present()
        self._held = dict.fromkeys(present)
        return [Send(present, Hold())]

    def _answer(self, connection: int, message: Held) -> list[Send]:
        if self._held is None or self._held.get(connection, {}) is not None:
            return self.fail(ProtocolError(f"{self.members[connection]} promised steps that nobody asked for"))
        self._held[connection] = message.steps
        promises = [steps for steps in self._held.values() if steps is not None]
        if len(promises) < len(self._held):
            return []
        asked, self._held = tuple(self._held), None
        return [Send(asked, SwitchAt(self._proposals.popleft(), first_common_steps(promises))), *self._ask()]

    def __repr__(self) -> str:
        state = "failed" if self.failure else "ended" if self.ended else "ready" if self.ready else "joining"
        return f"<Roster {state}: {len(self._ranks())} of {self.world_size} ranks, {len(self.left)} left>"


def first_common_steps(promises: Iterable[dict[int, int]]) -> dict[int, int]:
    """For every group that all ranks know, the first step that no rank has begun or may begin before it is told.

    ``promises``: of each rank, group -> the first step that it holds.
    """
    each = list(promises)
    common = set.intersection(*(set(steps) for steps in each))
    return {group: max(steps[group] for steps in each) for group in sorted(common)}


_Handler = Callable[[Roster, int, Any], list[Send]]

_OF_MEMBERS: dict[type[Message], _Handler] = {
    Beat: Roster._beat,
    Bye: Roster._bye,
    Report: Roster._report,
}

#: From ranks only, and only once all of them are there.
_OF_RANKS: dict[type[Message], _Handler] = {
    Give: Roster._give,
    Leave: Roster._leave,
    Propose: Roster._propose,
    Tell: Roster._tell,
    Announce: Roster._announce,
    Held: Roster._answer,
}
