"""Every error commsched raises, sorted by whose fault it is.

The setting is wrong: :class:`ConfigError`. The engine, dtype or device cannot do it: :class:`UnsupportedError`. The ranks
disagree: :class:`ManifestMismatch`, :class:`OrderMismatch`. The bytes are not ours: :class:`ProtocolError`. The world broke:
:class:`TransportError`. It was used after close: :class:`ClosedError`.
"""

from __future__ import annotations


class CommschedError(Exception):
    """Base of all errors of commsched."""


class ConfigError(CommschedError, ValueError):
    """A setting is wrong; the message names the key, the value and what is allowed."""


class UnsupportedError(CommschedError):
    """This engine, optimizer, dtype or device cannot do what was asked; said before anything is half done."""


class ManifestMismatch(CommschedError):
    """Ranks disagree about the tensors; the message names the tensor and both values. Raised before data moves."""


class OrderMismatch(CommschedError):
    """Ranks would have launched, or launched, different collectives at one place of the agreed order; the message names both
    tensors. Collectives carry no identity: nothing else would show it but wrong numbers."""


class ProtocolError(CommschedError):
    """Bytes arrived that no rank of this job, in this state, should have sent."""


class TransportError(CommschedError):
    """The world broke: a network, a peer or the code of another rank failed. The message names the first cause."""


class PeerLost(TransportError):
    """A rank or server is gone: its connection broke, or it left while others still needed it."""


class PeerTimeout(TransportError):
    """A rank or server was silent for longer than ``fail_after``, or did not join in time."""


class ClosedError(CommschedError):
    """A session was used after it was closed."""


_BY_NAME: dict[str, type[CommschedError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        UnsupportedError,
        ManifestMismatch,
        OrderMismatch,
        ProtocolError,
        TransportError,
        PeerLost,
        PeerTimeout,
        ClosedError,
    )
}


def to_record(error: BaseException) -> dict[str, str]:
    """``error`` as two strings that may travel: the name of its class and its message."""
    name = type(error).__name__
    if name in _BY_NAME:
        return {"type": name, "message": str(error)}
    return {"type": "TransportError", "message": f"{name}: {error}"}


def from_record(record: dict[str, str]) -> CommschedError:
    """The error a peer described with :func:`to_record`; a class we do not know becomes a :class:`TransportError`."""
    return _BY_NAME.get(record.get("type", ""), TransportError)(record.get("message", "no message"))
