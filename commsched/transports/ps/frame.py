"""The messages of the parameter server: a fixed header, then raw payload. Decoding is total and allocates nothing.

Gradients travel as they lie in memory, little-endian. JSON is used for the few small messages that are not gradients.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ...core.config import MAX_PARTITION_BYTES
from ...core.errors import ProtocolError
from ...core.manifest import ITEMSIZE
from ..aggregator import Key
from ..reduce import Bytes

MAGIC = b"CSPS"
VERSION = 1

# magic, version, kind, dtype, group, partition, order, step, start, stop. 48 bytes: a payload behind it stays aligned.
_HEADER = struct.Struct("<4sBBBxHxxIIxxxxQQQ")
HEADER_BYTES = _HEADER.size

#: gRPC refuses anything larger before it is decoded.
MAX_MESSAGE_BYTES = HEADER_BYTES + MAX_PARTITION_BYTES

_DTYPES = ("", *ITEMSIZE)  # a dtype travels as its place here; no dtype is 0
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Kind(IntEnum):
    """What a message says."""

    HELLO = 1  # worker: who I am (JSON); server: welcome
    GROUP = 2  # worker: the manifest of a group (JSON)
    PUSH = 3  # worker: my contribution to a key (raw)
    ACK = 4  # server: that push is here
    RESULT = 5  # server: the average of a key (raw)
    GOODBYE = 6  # either: I end in good order
    ERROR = 7  # server: the job failed (JSON: type, message)
    LEFT = 8  # worker: that rank sends nothing more, I was told (JSON: its number)


_RAW = frozenset({Kind.PUSH, Kind.RESULT})
_JSON = frozenset({Kind.HELLO, Kind.GROUP, Kind.ERROR, Kind.LEFT})


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. ``dtype``, ``start`` and ``stop`` say which range of the group's buffer a key means, since a key may
    mean another range after the plan was cut anew."""

    kind: Kind
    group: int = 0
    step: int = 0
    partition: int = 0
    dtype: str = ""
    start: int = 0
    stop: int = 0
    payload: Bytes = b""
    order: int = 0  # the policy's key of a push: the smaller, the earlier its result is to leave

    @property
    def key(self) -> Key:
        return Key(self.group, self.step, self.partition)

    def json(self) -> Any:
        """The payload of a message that is not gradients.

        Raises:
            ProtocolError: it is not JSON.
        """
        try:
            return json.loads(bytes(self.payload))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a {self.kind.name} message does not hold JSON: {error}") from error


def json_frame(kind: Kind, value: Any, group: int = 0) -> Frame:
    """A message that is not gradients and says more than its kind."""
    return Frame(kind, group=group, payload=json.dumps(value).encode())


def encode_header(frame: Frame) -> bytes:
    """What stands before the payload of ``frame`` on the wire.

    Raises:
        struct.error: a number does not fit (16-bit group, 32-bit partition and order, 64-bit step).
    """
    code = _DTYPE_CODES[frame.dtype]
    return _HEADER.pack(
        MAGIC, VERSION, frame.kind, code, frame.group, frame.partition, frame.order, frame.step, frame.start, frame.stop
    )


def encode(frame: Frame) -> bytes:
    """``frame`` as one message; the payload is copied once. Raises what :func:`encode_header` raises."""
    return b"".join((encode_header(frame), frame.payload))


def decode(message: bytes) -> Frame:
    """The inverse of :func:`encode`, for bytes from anywhere; the payload is a view into ``message``.

    Raises:
        ProtocolError: ``message`` is not one of ours; says why.
    """
    if len(message) < HEADER_BYTES:
        raise ProtocolError(f"a message of {len(message)} bytes is shorter than a header")
    magic, version, kind_code, dtype_code, group, partition, order, step, start, stop = _HEADER.unpack_from(message)
    if magic != MAGIC:
        raise ProtocolError(f"a message begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise ProtocolError(f"a message has wire version {version}; this is version {VERSION}")
    try:
        kind, dtype = Kind(kind_code), _DTYPES[dtype_code]
    except (ValueError, IndexError):
        raise ProtocolError(f"a message has kind {kind_code} and dtype {dtype_code}; one of them is unknown") from None
    payload = memoryview(message)[HEADER_BYTES:]
    if kind in _RAW and not (dtype and start < stop and stop - start == len(payload)):
        raise ProtocolError(f"a {kind.name} of {dtype or 'no dtype'} bytes {start} to {stop} has {len(payload)} bytes")
    if kind not in _RAW and kind not in _JSON and len(payload):
        raise ProtocolError(f"a {kind.name} has {len(payload)} bytes of payload; it has none")
    return Frame(kind, group, step, partition, dtype, start, stop, payload, order)
