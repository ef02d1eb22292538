"""The messages between the processes of an elastic job and their launchers: a line of JSON for each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from .generations import Asked, GiveUp


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one process in a generation, counted from 1. All ranks begin with the values that the rank ``root`` has
    after ``steps`` steps.

    Attributes:
        local_rank, local_world_size: among the ranks of the same machine.
        host: the address of that machine, at which rank 0 listens.
        job: the name of the generation's session, which both ends of each connection prove. No other generation has it.
    """

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    root: int
    steps: int
    host: str
    job: str
    servers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer to a member that is dismissed."""


@dataclass(frozen=True, slots=True)
class Summoned:
    """The message to a member that is summoned."""


@dataclass(frozen=True, slots=True)
class Listens:
    """Rank 0 of a generation says where its control channel is, and the launcher says so to the other ranks."""

    generation: int
    address: str


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A generation has lost a rank or a server, or a rank has asked for its next place; ``why`` says which. The launcher says
    so to the other ranks at once: those that still open their sessions would wait for it. ``rank``: its number, if it is a
    rank."""

    generation: int
    why: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The process that asked is not the one that has the rank's place."""

    why: str


Answer = Place | Finish | GiveUp | Refused | Summoned | Listens | RankEnded


# --- between launchers ---


@dataclass(frozen=True, slots=True)
class LauncherHello:
    """A launcher joins the job: its ``settings``, which must be those of the others, the number of ranks for which it has room,
    and the address of its machine."""

    settings: dict[str, Any]
    room: int
    host: str


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """The job takes the launcher, or does not, since ``problem``."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class Alive:
    """The other end lives. Both ends say it all the time."""


@dataclass(frozen=True, slots=True)
class MemberSaid:
    """The process ``member`` has said ``line``."""

    member: int
    line: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The process ``member`` has ended.

    Attributes:
        exit_code: negative: the number of the signal that killed it.
        told: the events that it has reported.
        was_ended: the launcher has ended it, as it did not end by itself.
    """

    member: int
    exit_code: int
    told: tuple[str, ...] = ()
    was_ended: bool = False


@dataclass(frozen=True, slots=True)
class MemberStopped:
    """The signal ``number`` has stopped the process ``member``; 0: it was found not to run."""

    member: int
    number: int


@dataclass(frozen=True, slots=True)
class Started:
    """The process ``member`` has the number ``pid``."""

    member: int
    pid: int


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The process ``member`` was not started, since the launcher had got a signal before the order came."""

    member: int


@dataclass(frozen=True, slots=True)
class Closes:
    """The launcher starts no further process: it has got a signal, and its processes end."""


@dataclass(frozen=True, slots=True)
class StartMember:
    """Start the process ``member``, as ``rank``, in the place ``slot`` of the machine."""

    member: int
    rank: int
    slot: int


@dataclass(frozen=True, slots=True)
class KillMember:
    member: int


@dataclass(frozen=True, slots=True)
class KeepReady:
    """A generation has begun, and may lose a process."""


@dataclass(frozen=True, slots=True)
class Examine:
    """Say by :class:`MemberStopped` if the process ``member`` does not run."""

    member: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Say ``line`` to the process ``member``."""

    member: int
    line: str


@dataclass(frozen=True, slots=True)
class EndAll:
    """The job ends: by the signal ``number`` to all processes now, or, if it is 0, by a failure, of which they hear. They have
    some seconds to end by themselves."""

    number: int


@dataclass(frozen=True, slots=True)
class Over:
    """The job is over, with this exit code and, if it has failed, this sentence on it."""

    exit_code: int
    sentence: str


MachineReport = MemberSaid | Ended | MemberStopped | Started | NotStarted | Closes
MachineOrder = StartMember | KillMember | KeepReady | Examine | Tell | EndAll

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Asked, Place, Finish, GiveUp, Refused, Summoned, Listens, RankEnded),
        *(LauncherHello, HostAnswer, Alive, MemberSaid, Ended, MemberStopped, Started, NotStarted, Closes),
        *(StartMember, KillMember, KeepReady, Examine, Tell, EndAll, Over),
    )
}


def to_line(message: Any) -> bytes:
    return f"{json.dumps({'kind': type(message).__name__, **asdict(message)})}\n".encode()


def from_line(line: bytes | str) -> Any:
    """Raises ValueError if the line is none."""
    try:
        record = json.loads(line)
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
        return _KINDS[str(values.pop("kind"))](**values)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"this is no message of an elastic job: {line[:200]!r}") from error
