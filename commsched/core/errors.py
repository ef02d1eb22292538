"""Every error that commsched raises, sorted by cause.

A setting is wrong: :class:`ConfigError`. The engine, dtype or device does not support the request: :class:`UnsupportedError`.
The ranks disagree: :class:`ManifestMismatch`, :class:`OrderMismatch`, :class:`RanksDiverged`. Foreign bytes arrived:
:class:`ProtocolError`. A network, peer or other rank failed: :class:`TransportError`. A session was used after close:
:class:`ClosedError`.
"""

from __future__ import annotations

from collections.abc import Sequence


def ranks_text(ranks: Sequence[int], most: int | None = None) -> str:
    """``ranks`` as messages name them: "rank 3", "ranks 1, 2". With ``most``, only so many numbers, and how many more."""
    shown = ", ".join(map(str, ranks[:most]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{and_more(len(ranks) - len(ranks[:most]))}"


def and_more(count: int) -> str:
    """The end of a list of which ``count`` items are not shown: " and 2 more". Empty if all are."""
    return f" and {count} more" if count else ""


def error_text(error: BaseException) -> str:
    """``error`` as messages name it: "ValueError: bad data". Only its type if it says nothing, as KeyboardInterrupt does."""
    try:
        text = encodable(str(error).rstrip())
    except Exception:  # the class is the user's, and so is its __str__
        text = "<exception str() failed>"  # as Python says it
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def encodable(text: str) -> str:
    """``text`` with escapes for what UTF-8 cannot carry to another rank, such as the bytes of a file name that are no text."""
    return text.encode(errors="backslashreplace").decode()


class CommschedError(Exception):
    """Base of all errors of commsched.

    ``rank`` or ``server`` is the process that the error is about. ``step`` is the step of a group of tensors, counted from 0.
    ``tensor`` is a tensor's name. A field is ``None`` if it does not apply or is not known. The fields are sent to other ranks
    with the error.
    """

    def __init__(
        self,
        *arguments: object,
        rank: int | None = None,
        server: int | None = None,
        step: int | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(*arguments)
        self.rank = rank
        self.server = server
        self.step = step
        self.tensor = tensor


class ConfigError(CommschedError, ValueError):
    """A setting is wrong; the message names the key, the value and what is allowed."""


class UnsupportedError(CommschedError):
    """This engine, optimizer, dtype or device does not support the request. Raised before anything is half done."""


class ManifestMismatch(CommschedError):
    """Ranks disagree about the tensors; the message names the tensor and both values. Raised before data is sent."""


class OrderMismatch(CommschedError):
    """Ranks would have launched, or launched, different collectives at one place of the agreed or static order. The message
    names the tensors. Collectives carry no identity, so only wrong numbers would show this otherwise."""


class RanksDiverged(CommschedError):
    """Ranks have different weights, hyper-parameters or other values that must be equal. The message names the first value that
    differs, the step, and which ranks have which value. The job ends, because training is no longer synchronous."""


class ProtocolError(CommschedError):
    """Bytes arrived that no rank of this job, in this state, should have sent."""


class TransportError(CommschedError):
    """A network, a peer or the code of another rank failed. The message names the first cause."""


#: Appended to messages about a rank that left while others continued to train.
FEWER_BATCHES = "; if it had fewer batches than the others, give every rank as many (DistributedSampler, or drop_last=True)"

#: The message of the error raised when a process forked from a rank uses the rank's objects.
FORKED = "a forked process takes no part in the job: it does not have the threads and connections of its rank"


class PeerLost(TransportError):
    """A rank or server is gone: its connection broke, or it left while others still needed it."""


class PeerTimeout(TransportError):
    """A rank or server was silent for longer than ``fail_after``, or did not join in time."""


class ClosedError(CommschedError):
    """A session was used after it was closed."""


#: The fields that are numbers, and a bound on their digits: every number has fewer.
_NUMBERS, _MAX_DIGITS = ("rank", "server", "step"), 19

_BY_NAME: dict[str, type[CommschedError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        UnsupportedError,
        ManifestMismatch,
        OrderMismatch,
        RanksDiverged,
        ProtocolError,
        TransportError,
        PeerLost,
        PeerTimeout,
        ClosedError,
    )
}


def to_record(error: BaseException) -> dict[str, str]:
    """``error`` as strings that may be sent: the name of its class, its message, and its known fields."""
    name = type(error).__name__
    known = {"type": name, "message": encodable(str(error))} if name in _BY_NAME else {}
    record = known or {"type": "TransportError", "message": error_text(error)}
    fields = {field: getattr(error, field, None) for field in (*_NUMBERS, "tensor")}
    return {**record, **{field: encodable(str(value)) for field, value in fields.items() if value is not None}}


def from_record(record: dict[str, str]) -> CommschedError:
    """The error that a peer described with :func:`to_record`; an unknown class becomes a :class:`TransportError`."""
    error = _BY_NAME.get(record.get("type", ""), TransportError)(
        record.get("message", "no message"), tensor=record.get("tensor")
    )
    for field in _NUMBERS:
        text = record.get(field, "")
        if text.isascii() and text.isdecimal() and len(text) < _MAX_DIGITS:
            setattr(error, field, int(text))
    return error
