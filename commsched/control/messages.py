"""The members of a job, and the messages of the control channel: one frozen dataclass per message, encoded as a JSON object in
UTF-8.

``decode`` is total: for any bytes it returns a message whose fields have their types, or raises ProtocolError.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, dataclass_transform

from ..core.errors import ProtocolError, error_text
from ..version import __version__

ROLES = ("rank", "server")


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a job: rank ``index`` of ``world_size``, or parameter server ``index``. Each process describes itself."""

    role: str
    index: int
    world_size: int  # according to this process
    host: str
    pid: int
    witness: str = ""  # address at which to ask whether the process runs; see ``witness.py``

    @classmethod
    def rank(cls, rank: int, world_size: int, host: str | None = None, witness: str = "") -> Member:
        """This process as a rank; ``host`` is the name of its machine in messages."""
        return cls("rank", rank, world_size, host or socket.gethostname(), os.getpid(), witness)

    @classmethod
    def thread(cls, rank: int, world_size: int) -> Member:
        """A rank that is a thread of this process, as all others are."""
        return cls("rank", rank, world_size, "", os.getpid())

    @classmethod
    def server(cls, index: int, host: str | None = None, witness: str = "", world_size: int = 0) -> Member:
        """This process as a parameter server."""
        return cls("server", index, world_size, host or socket.gethostname(), os.getpid(), witness)

    @property
    def is_rank(self) -> bool:
        return self.role == "rank"

    @property
    def about(self) -> dict[str, Any]:
        """The fields of an error that is about this process."""
        return {self.role: self.index}

    @property
    def process(self) -> str:
        return f"host {self.host}, pid {self.pid}"

    def __str__(self) -> str:
        return f"{self.role} {self.index} ({self.process})" if self.host else f"{self.role} {self.index}"


#: Incremented whenever a message changes. Members of different protocols or versions refuse each other.
PROTOCOL = 6

#: The gRPC method whose one stream per member carries the messages.
SERVICE, METHOD = "commsched.Control", "Join"

#: Largest message of a member, and so the limit of the value that it may give to a gather.
MAX_MESSAGE_BYTES = 64 * 2**20

#: Largest message that gRPC accepts: it leaves room for what the server adds to a member's value when it passes the value on.
MAX_WIRE_BYTES = MAX_MESSAGE_BYTES + 2**16

#: Greater than the number of any rank: a range from another process may not keep this one busy for long.
_MAX_RANK = 2**20


_KINDS: dict[str, type[Message]] = {}  # by name


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message:
    """Base of all messages, each of which is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = dataclass(frozen=True)(cls)


# --- from a member ---


class Hello(Message):
    """The first message of a member. ``within_seconds``: how much longer this member waits for all ranks to join."""

    version: str
    protocol: int
    member: Member
    within_seconds: float


class Ping(Message):
    """``sent_at``: the member's clock, in seconds."""

    sent_at: float


class Gather(Message):
    """This rank's value for the gather ``tag``, as JSON text that the server need not parse."""

    tag: str
    value: str


class AskMissing(Message):
    """This rank has waited for the gather ``tag`` for long: which ranks does it wait for?"""

    tag: str


class ReportFailure(Message):
    """A failure of this member; ``error`` is made by ``errors.to_record``."""

    error: dict[str, str]


class Leave(Message):
    """This rank sends nothing more."""


class Part(Message):
    """This rank has left, and wants to end its process without waiting for the others to leave."""


class Released(Message):
    """Answer to :class:`Parting`: nothing on this rank waits for anything from ``rank``."""

    rank: int


class Disconnect(Message):
    """This member closes its end, whether or not it may. The message is explicit because gRPC may show a killed process as a
    stream that ended in order."""


class Propose(Message):
    """Ask all ranks to use ``config`` from a step on that they agree on. ``window`` is passed on to their tuners."""

    config: dict[str, Any]
    window: dict[str, Any] = field(default_factory=dict)


class ToRank0(Message):
    """A value for rank 0, as JSON text that the server need not parse. ``topic`` says which part of rank 0 it is for."""

    topic: str
    value: str


class Announce(Message):
    """A value from rank 0 for the other ranks in ``to``, or all others if it is empty, as JSON text that the server need not
    parse."""

    topic: str
    value: str
    to: tuple[int, ...] = ()


class Prepared(Message):
    """Answer to :class:`Prepare`: for each group, the first step that is held. Step 1 of any other group is held."""

    steps: dict[int, int]


# --- from either ---


class Heartbeat(Message):
    """The sender is alive and has nothing else to send."""


# --- from the server ---


class Welcome(Message):
    """Answer to :class:`Hello`, with ``host`` and ``pid`` of rank 0's process."""

    host: str
    pid: int


class Ready(Message):
    """All ranks have joined. ``witness``: the address of rank 0's witness."""

    witness: str


class Pong(Message):
    """Answer to :class:`Ping`; ``server_time``: rank 0's clock, in seconds."""

    sent_at: float
    server_time: float


class GatherPart(Message):
    """The next of the values that all ranks gave to the gather ``tag``, in rank order. Each of ``runs`` is a number of
    neighbouring ranks and their value: most gathers compare what is equal on all ranks."""

    tag: str
    runs: tuple[tuple[int, str], ...]


class Missing(Message):
    """Answer to :class:`AskMissing`: the gather ``tag`` waits for the ranks in ``ranges``, from each key to its value."""

    tag: str
    ranges: dict[int, int]


class FromRank(Message):
    """To rank 0: the value that ``rank`` sent by :class:`ToRank0`."""

    rank: int
    topic: str
    value: str


class Announced(Message):
    """To all other ranks: the value that rank 0 announced."""

    topic: str
    value: str


class Failed(Message):
    """The job failed; the last message of a stream."""

    error: dict[str, str]


class Left(Message):
    """The ranks in ``ranges``, from each key to its value, have left: they send nothing more."""

    ranges: dict[int, int]


class Parting(Message):
    """``rank``, which has left, wants to end its process. The other ranks answer with :class:`Released`."""

    rank: int


class End(Message):
    """All ranks have left, or no rank needs this one any more, or rank 0 ends; the last message of a stream."""


class Prepare(Message):
    """Hold back every step that has not begun and is not the next one, and answer with the first step held."""


class Commit(Message):
    """All ranks use ``config`` from step ``steps[group]`` of each group on. ``window`` was proposed with it."""

    config: dict[str, Any]
    steps: dict[int, int]
    window: dict[str, Any] = field(default_factory=dict)


def ranges_of(ranks: Iterable[int]) -> dict[int, int]:
    """``ranks`` as a map from the first to the last of those that follow each other."""
    ranges: dict[int, int] = {}
    first = last = -2
    for rank in sorted(ranks):
        first = first if rank == last + 1 else rank
        ranges[first] = last = rank
    return ranges


def ranks_in(ranges: dict[int, int]) -> list[int]:
    """The inverse of :func:`ranges_of`, without numbers that are too great for a rank."""
    return [rank for first, last in ranges.items() for rank in range(first, min(last, _MAX_RANK) + 1)]


#: JSON without spaces. ``json.dumps`` would make an encoder for each call.
to_json = json.JSONEncoder(separators=(",", ":")).encode


def encode(message: Message) -> bytes:
    record = {name: _plain(value) for name, value in vars(message).items()}
    return to_json({"message": type(message).__name__, **record}).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Member):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, dict):  # as pairs: JSON would turn keys that are numbers into strings
        return [[key, item] for key, item in value.items()]
    return value


def decode(data: bytes) -> Message:
    """The message that :func:`encode` turned into ``data``.

    Raises:
        ProtocolError: ``data`` is no encoded message.
    """
    try:
        record = json.loads(data.decode())
        if not isinstance(record, dict):
            raise ValueError("not an object")
        kind = _KINDS[_text(record.pop("message"))]
        if kind is Hello:
            _require_our_protocol(record)
        message: Message = _build(kind, record)
        return message
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = error_text(error)[:200]
        raise ProtocolError(f"{len(data)} bytes that are not a message of the control channel ({reason})") from error


def _require_our_protocol(hello: dict[str, Any]) -> None:
    """Check the protocol before the other fields are read: another protocol may have different fields."""
    version, protocol = _text(hello["version"]), _count(hello["protocol"])
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"the hello of commsched {version[:50]} (control protocol {protocol}), but rank 0 runs commsched {__version__} "
            f"(control protocol {PROTOCOL}); install the same version everywhere"
        )


def _build(kind: type[Any], record: dict[str, Any]) -> Any:
    known = _FIELDS[kind]
    if record.keys() != known.keys():
        raise ValueError(f"{kind.__name__} with fields {sorted(record)}")
    return kind(*[read(record[name]) for name, read in known.items()])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a string")
    value.encode()  # a lone surrogate would raise later, wherever the text is printed
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("not a count")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError("not a list")
    return tuple(map(_count, value))


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("not a number of seconds")
    return float(value)


def _pairs(key: Callable[[Any], Any], item: Callable[[Any], Any], into: Callable[[Any], Any] = dict) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            raise ValueError("not a list of pairs")
        return into((key(a), item(b)) for a, b in value)

    return read


def _member(value: Any) -> Member:
    if not isinstance(value, dict):
        raise ValueError("not a member")
    member: Member = _build(Member, value)
    if member.role not in ROLES:
        raise ValueError(f"role {member.role!r}")
    return member


#: The function that checks and reads a field, by the field's annotation.
_READERS: dict[str, Callable[[Any], Any]] = {
    "str": _text,
    "int": _count,
    "float": _seconds,
    "Member": _member,
    "dict[str, str]": _pairs(_text, _text),
    "dict[str, Any]": _pairs(_text, lambda value: value),
    "dict[int, int]": _pairs(_count, _count),
    "tuple[tuple[int, str], ...]": _pairs(_count, _text, tuple),
    "tuple[int, ...]": _counts,
}

#: By kind of message: the reader of each field.
_FIELDS: dict[type[Any], dict[str, Callable[[Any], Any]]] = {
    kind: {each.name: _READERS[str(each.type)] for each in fields(kind)} for kind in (*_KINDS.values(), Member)
}
