"""What travels on the control channel: one frozen dataclass per message, as a JSON object in UTF-8.

``decode`` is total: any bytes give a message whose fields have their types, or a ProtocolError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ..core.errors import ProtocolError
from ..version import __version__
from .member import ROLES, Member

#: Raised whenever a message changes. Members of different protocols or versions refuse each other.
PROTOCOL = 2

#: The gRPC method whose one stream per member carries the messages.
SERVICE, METHOD = "commsched.Control", "Join"

#: Largest message of a member, and so the largest value it may give to a gather.
MAX_MESSAGE_BYTES = 64 * 2**20

#: What gRPC takes: room for the server to say whose message it passes on.
MAX_WIRE_BYTES = MAX_MESSAGE_BYTES + 2**16


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages."""


# --- from a member ---


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First of all. ``within_seconds``: how much longer this member waits for all ranks to join."""

    version: str
    protocol: int
    member: Member
    within_seconds: float


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """``sent_at``: the member's clock, in seconds."""

    sent_at: float


@dataclass(frozen=True, slots=True)
class Give(Message):
    """This rank's value for the gather ``tag``, as JSON text that the server need not read."""

    tag: str
    value: str


@dataclass(frozen=True, slots=True)
class Report(Message):
    """A failure here; ``error`` as made by ``errors.to_record``."""

    error: dict[str, str]


@dataclass(frozen=True, slots=True)
class Leave(Message):
    """This rank sends nothing more."""


@dataclass(frozen=True, slots=True)
class Bye(Message):
    """This member closes its end, whether or not it may. Said in words, because gRPC may show a process that was killed as a
    stream that ended in order."""


@dataclass(frozen=True, slots=True)
class Propose(Message):
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tell(Message):
    """For rank 0, as JSON text that the server need not read."""

    value: str


@dataclass(frozen=True, slots=True)
class Announce(Message):
    """From rank 0, for all other ranks, as JSON text that the server need not read."""

    value: str


@dataclass(frozen=True, slots=True)
class Held(Message):
    """Answer to :class:`Hold`: for each group, the first step not yet promised."""

    steps: dict[int, int]


# --- from either ---


@dataclass(frozen=True, slots=True)
class Beat(Message):
    """Nothing new; the sender lives."""


# --- from the server ---


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Answer to :class:`Hello`; ``host`` and ``pid`` of rank 0's process."""

    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """All ranks have joined."""


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """Answer to :class:`Ping`; ``server_time``: rank 0's clock, in seconds."""

    sent_at: float
    server_time: float


@dataclass(frozen=True, slots=True)
class Given(Message):
    """What ``rank`` gave to the gather ``tag``."""

    tag: str
    rank: int
    value: str


@dataclass(frozen=True, slots=True)
class Told(Message):
    """To rank 0: what ``rank`` told it."""

    rank: int
    value: str


@dataclass(frozen=True, slots=True)
class Announced(Message):
    """To all other ranks: what rank 0 announced."""

    value: str


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """The job failed; the last message of a stream."""

    error: dict[str, str]


@dataclass(frozen=True, slots=True)
class Left(Message):
    rank: int


@dataclass(frozen=True, slots=True)
class End(Message):
    """All ranks have left; the last message of a stream."""


@dataclass(frozen=True, slots=True)
class Hold(Message):
    """Begin no step that is not begun yet or next, and say which is the first so held."""


@dataclass(frozen=True, slots=True)
class SwitchAt(Message):
    config: dict[str, Any]
    steps: dict[int, int]


_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        Hello,
        Ping,
        Give,
        Report,
        Leave,
        Bye,
        Propose,
        Tell,
        Announce,
        Held,
        Beat,
        Welcome,
        Ready,
        Pong,
        Given,
        Told,
        Announced,
        Failed,
        Left,
        End,
        Hold,
        SwitchAt,
    )
}


def encode(message: Message) -> bytes:
    """``message`` as bytes."""
    record = {field.name: _plain(getattr(message, field.name)) for field in fields(message)}
    return json.dumps({"message": type(message).__name__, **record}, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Member):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):  # JSON would turn keys that are numbers into strings
        return [[key, item] for key, item in value.items()]
    return value


def decode(data: bytes) -> Message:
    """The message that :func:`encode` made ``data`` from.

    Raises:
        ProtocolError: it made no such bytes.
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
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ProtocolError(f"{len(data)} bytes that are no message of the control channel ({reason})") from error


def _require_our_protocol(hello: dict[str, Any]) -> None:
    """Before the other fields are looked at, which may be different ones in another protocol."""
    version, protocol = _text(hello["version"]), _count(hello["protocol"])
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"the hello of commsched {version[:50]} (control protocol {protocol}), but rank 0 runs commsched {__version__} "
            f"(control protocol {PROTOCOL}); install the same version everywhere"
        )


def _build(kind: type[Any], record: dict[str, Any]) -> Any:
    known = fields(kind)
    if record.keys() != {field.name for field in known}:
        raise ValueError(f"{kind.__name__} with fields {sorted(record)}")
    return kind(**{field.name: _READERS[str(field.type)](record[field.name]) for field in known})


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a string")
    value.encode()  # a lone surrogate would raise later, wherever the text is printed
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("not a count")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("not a number of seconds")
    return float(value)


def _pairs(key: Callable[[Any], Any], item: Callable[[Any], Any]) -> Callable[[Any], dict[Any, Any]]:
    def read(value: Any) -> dict[Any, Any]:
        if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            raise ValueError("not a list of pairs")
        return {key(a): item(b) for a, b in value}

    return read


def _member(value: Any) -> Member:
    if not isinstance(value, dict):
        raise ValueError("not a member")
    member: Member = _build(Member, value)
    if member.role not in ROLES:
        raise ValueError(f"role {member.role!r}")
    return member


#: How to check and read a field, by its annotation.
_READERS: dict[str, Callable[[Any], Any]] = {
    "str": _text,
    "int": _count,
    "float": _seconds,
    "Member": _member,
    "dict[str, str]": _pairs(_text, _text),
    "dict[str, Any]": _pairs(_text, lambda value: value),
    "dict[int, int]": _pairs(_count, _count),
}
