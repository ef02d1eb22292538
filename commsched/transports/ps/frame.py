"""The messages of the parameter server: a fixed header, then raw payload. Decoding is total and allocates nothing.

Gradients travel as they lie in memory, little-endian. JSON is used for the few small messages that are not gradients.
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Any, NamedTuple

from ...core.config import MAX_PARTITION_BYTES
from ...core.errors import ProtocolError
from ...core.manifest import ITEMSIZE
from ..contributions import Key
from ..reduce import Bytes

MAGIC = b"CSPS"
VERSION = 2

# magic, version, kind, dtype, group, partition, order, payload bytes, step, start, stop. 48 bytes: what is behind it stays
# aligned.
_HEADER = struct.Struct("<4sBBBxHxxIIIQQQ")
HEADER_BYTES = _HEADER.size

#: The most bytes of gradients: behind a hierarchy the sums of 16-bit partitions have 32.
MAX_RAW_BYTES = 2 * MAX_PARTITION_BYTES

#: Nothing larger is read.
MAX_MESSAGE_BYTES = HEADER_BYTES + MAX_RAW_BYTES

#: The most bytes of a payload that is not gradients: room for a manifest of 100,000 tensors.
MAX_JSON_BYTES = 16 * 2**20

_DTYPES = ("", *ITEMSIZE)  # a dtype travels as its place here; no dtype is 0
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Kind(IntEnum):
    """What a message says."""

    HELLO = 1  # worker: who I am (JSON); server: welcome
    GROUP = 2  # worker: the manifest of a group (JSON)
    PUSH = 3  # worker: my contribution to a key (raw)
    ACK = 4  # server: that push is here; only where the carrier cannot tell the worker itself
    RESULT = 5  # server: the average of a key (raw)
    GOODBYE = 6  # either: I end in good order
    ERROR = 7  # server: the job failed (JSON: type, message)
    LEFT = 8  # worker: that rank sends nothing more, I was told (JSON: its number)


#: Messages whose payload is gradients.
RAW = frozenset({Kind.PUSH, Kind.RESULT})
_JSON = frozenset({Kind.HELLO, Kind.GROUP, Kind.ERROR, Kind.LEFT})
_KINDS = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
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
    order: int = 0  # the policy's key of a push, and of its result: the smaller, the earlier it is to leave

    @property
    def key(self) -> Key:
        return Key(self.group, self.step, self.partition)

    @property
    def nbytes(self) -> int:
        """What it takes on the wire."""
        return HEADER_BYTES + len(self.payload)

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
    kind, group, step, partition, dtype, start, stop, payload, order = frame
    code = _DTYPE_CODES[dtype]
    return _HEADER.pack(MAGIC, VERSION, kind, code, group, partition, order, len(payload), step, start, stop)


def decode_header(header: Bytes) -> tuple[Frame, int]:
    """A message without its payload, from its first ``HEADER_BYTES`` bytes, and how many bytes its payload has.

    Raises:
        ProtocolError: it is not one of ours, or its payload cannot be; says why.
    """
    magic, version, kind_code, dtype_code, group, partition, order, nbytes, step, start, stop = _HEADER.unpack_from(header)
    if magic != MAGIC:
        raise ProtocolError(f"a message begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise ProtocolError(f"a message has wire version {version}; this is version {VERSION}")
    try:
        kind, dtype = _KINDS[kind_code], _DTYPES[dtype_code]
    except LookupError:
        raise ProtocolError(f"a message has kind {kind_code} and dtype {dtype_code}; one of them is unknown") from None
    if kind in RAW:
        if not (dtype and start < stop and stop - start == nbytes <= MAX_RAW_BYTES):
            raise ProtocolError(f"a {kind.name} of {dtype or 'no dtype'} bytes {start} to {stop} has {nbytes} bytes")
    elif nbytes > (most := MAX_JSON_BYTES if kind in _JSON else 0):
        raise ProtocolError(f"a {kind.name} has {nbytes} bytes of payload; it has at most {most}")
    return Frame(kind, group, step, partition, dtype, start, stop, b"", order), nbytes


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
    frame, nbytes = decode_header(message)
    payload = memoryview(message)[HEADER_BYTES:]
    if len(payload) != nbytes:
        raise ProtocolError(f"a {frame.kind.name} of {nbytes} bytes of payload came with {len(payload)}")
    return frame._replace(payload=payload)
