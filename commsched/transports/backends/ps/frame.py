"""The messages of the parameter server: a fixed header, then raw payload.

Decoding is total, which means that any bytes give a message or a declared error. It copies no payload.

Gradients are sent as they lie in memory, little-endian. The few small messages that are not gradients are JSON.

The header carries a checksum of the payload and a checksum of itself (XXH3, 64 bits). TCP's own checksum has 16 bits and is
computed anew by each device that forwards the bytes, so a bad network card, switch or memory can change a gradient unnoticed.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest as checksum

from ....core.errors import ConfigError, ProtocolError
from ....core.manifest import ITEMSIZE
from ....core.scheduler import MAX_PARTITION_BYTES
from ....settings import MAX_FLOWS, parse_address
from ...averaging.contributions import PartitionKey
from ...averaging.reduce import Bytes
from ...backend import Contributors, TransportContext

MAGIC = b"CSPS"
VERSION = 7

# magic, version, kind, dtype, group, partition, order, payload bytes, step, start, stop, the payload's checksum; then the
# checksum of these fields. The header has 64 bytes, so that the payload behind it stays aligned.
_FIELDS = struct.Struct("<4sBBBxIIIIQQQQ")
_CHECKSUM = struct.Struct("<Q")
_HEADER = struct.Struct(_FIELDS.format + "Q")
HEADER_BYTES = _HEADER.size

#: The most bytes of gradients in a message. Behind a hierarchy the sums of 16-bit partitions have 32 bits per element.
MAX_RAW_BYTES = 2 * MAX_PARTITION_BYTES

#: The most bytes of a message. A larger message is not read.
MAX_MESSAGE_BYTES = HEADER_BYTES + MAX_RAW_BYTES

#: The most bytes of a payload that is not gradients: as many as the control channel carries, by which ranks compare a manifest
#: before. It has room for some hundred thousand tensors.
MAX_JSON_BYTES = 64 * 2**20

_DTYPES = ("", *ITEMSIZE)  # a dtype is sent as its index here; 0 means no dtype
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class FrameKind(IntEnum):
    HELLO = 1  # worker: its identity (JSON); server: welcome
    GROUP = 2  # worker: the manifest of a group (JSON)
    PUSH = 3  # worker: its contribution to a key (raw)
    ACK = 4  # server: the push has arrived; only where the carrier itself cannot report it
    RESULT = 5  # server: the average of a key (raw)
    GOODBYE = 6  # either: the sender ends in good order
    ERROR = 7  # server: the job failed (JSON: type, message)
    LEFT = 8  # worker: a rank, maybe another one, sends nothing more (JSON: its number)
    RELEASED = 9  # worker: it pushes nothing more to these groups, and has all their averages (JSON: their numbers)
    RESERVE = 10  # a launcher: serve the job that it has proved next; server: HELLO, once no other job is in hand


#: Messages whose payload is gradients.
RAW = frozenset({FrameKind.PUSH, FrameKind.RESULT})
_JSON = frozenset({FrameKind.HELLO, FrameKind.GROUP, FrameKind.ERROR, FrameKind.LEFT, FrameKind.RELEASED})
_KINDS = {int(kind): kind for kind in FrameKind}


#: Makes a named tuple without the call of Python that its own constructor is. Several are made for each message.
_new = tuple.__new__


class Damaged(Exception):
    """The payload of a message differs from the sent payload; the text gives the checksums. ``frame`` lacks the payload."""

    def __init__(self, frame: Frame, nbytes: int, sent: int, came: int) -> None:
        super().__init__(
            f"the checksum of its {nbytes} bytes is {came:016x}, not {sent:016x} as when they were sent; a network card, "
            "switch or memory changes bits"
        )
        self.frame = frame


class Frame(NamedTuple):
    """One message. ``dtype``, ``start`` and ``stop`` give the range of the group's buffer that the key means, since a key may
    mean another range after a new plan."""

    kind: FrameKind
    group: int = 0
    step: int = 0
    partition: int = 0
    dtype: str = ""
    start: int = 0
    stop: int = 0
    payload: Bytes = b""
    order: int = 0  # the policy's key of a push, and of its result; smaller leaves earlier

    @property
    def key(self) -> PartitionKey:
        return _new(PartitionKey, self[1:4])

    def carrying(self, payload: Bytes) -> Frame:
        """The same message with that payload. (``_replace`` costs several times as much.)"""
        kind, group, step, partition, dtype, start, stop, _, order = self
        return _new(Frame, (kind, group, step, partition, dtype, start, stop, payload, order))

    @property
    def nbytes(self) -> int:
        """The bytes of the message on the wire."""
        return HEADER_BYTES + len(self.payload)

    def require_intact(self, sent: int) -> None:
        """Check the payload against ``sent``, the checksum in the header.

        Raises:
            Damaged: the checksums differ.
        """
        came = checksum(self.payload)
        if came != sent:
            raise Damaged(self.carrying(b""), len(self.payload), sent, came)

    def json(self) -> Any:
        """Decode the payload of a message that is not gradients.

        Raises:
            ProtocolError: the payload is not JSON.
        """
        try:
            return json.loads(bytes(self.payload))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a {self.kind.name} message does not hold JSON: {error}") from error


def json_frame(kind: FrameKind, value: Any, group: int = 0) -> Frame:
    """Return a message whose payload is ``value`` as JSON."""
    return Frame(kind, group=group, payload=json.dumps(value).encode())


def encode_header(frame: Frame) -> bytes:
    """Return the header of ``frame``, which precedes its payload on the wire.

    Raises:
        struct.error: a number does not fit (32-bit group, partition and order, 64-bit step).
    """
    kind, group, step, partition, dtype, start, stop, payload, order = frame
    nbytes, code = len(payload), _DTYPE_CODES[dtype]
    fields = _FIELDS.pack(MAGIC, VERSION, kind, code, group, partition, order, nbytes, step, start, stop, checksum(payload))
    return fields + _CHECKSUM.pack(checksum(fields))


def decode_header(header: Bytes) -> tuple[Frame, int, int]:
    """Decode the first ``HEADER_BYTES`` bytes of a message.

    Returns:
        The message without its payload, the number of bytes of the payload, and the checksum of the payload.

    Raises:
        ProtocolError: this is no message of this protocol, the header is damaged, or such a payload is impossible; says why.
    """
    fields = _HEADER.unpack_from(header)
    magic, version, kind_code, dtype_code, group, partition, order, nbytes, step, start, stop, payload_checksum, sent = fields
    if magic != MAGIC:
        raise ProtocolError(f"a message begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise ProtocolError(f"a message has wire version {version}; this is version {VERSION}")
    came = checksum(memoryview(header)[: _FIELDS.size])
    if sent != came:
        raise ProtocolError(
            f"a header that arrived damaged: its checksum is {came:016x}, not {sent:016x} as when it was sent; a network card, "
            "switch or memory changes bits"
        )
    try:
        kind, dtype = _KINDS[kind_code], _DTYPES[dtype_code]
    except LookupError:
        raise ProtocolError(f"a message has kind {kind_code} and dtype {dtype_code}; one of them is unknown") from None
    if kind in RAW:
        if not (dtype and start < stop and stop - start == nbytes <= MAX_RAW_BYTES):
            raise ProtocolError(f"a {kind.name} of {dtype or 'no dtype'} bytes {start} to {stop} has {nbytes} bytes")
    elif nbytes > (most := MAX_JSON_BYTES if kind in _JSON else 0):
        raise ProtocolError(f"a {kind.name} has {nbytes} bytes of payload; the limit is {most}")
    return _new(Frame, (kind, group, step, partition, dtype, start, stop, b"", order)), nbytes, payload_checksum


def encode(frame: Frame) -> bytes:
    """Return ``frame`` as one message. The payload is copied once. Raises as :func:`encode_header` does."""
    return b"".join((encode_header(frame), frame.payload))


def decode(message: bytes) -> Frame:
    """The inverse of :func:`encode`, safe for bytes from any source. The payload is a view into ``message``.

    Raises:
        ProtocolError: ``message`` is no message of this protocol; says why.
        Damaged: the payload differs from the sent payload.
    """
    if len(message) < HEADER_BYTES:
        raise ProtocolError(f"a message of {len(message)} bytes is shorter than a header")
    frame, nbytes, sent = decode_header(message)
    payload = memoryview(message)[HEADER_BYTES:]
    if len(payload) != nbytes:
        raise ProtocolError(f"a {frame.kind.name} of {nbytes} bytes of payload came with {len(payload)}")
    frame = frame.carrying(payload)
    frame.require_intact(sent)
    return frame


#: The largest world size that a server accepts from the first worker, since it keeps state for each rank.
MAX_RANKS = 65_536


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """The first message of a worker: ``rank`` of ``world_size`` greets the server that it counts as number ``server``.

    ``control_address`` is the address of rank 0's control channel, for a server that was not started by a rank. ``members`` and
    ``divisor`` are those of :attr:`contributors`; ``None`` means that the ranks are the ranks of the job. The stream is number
    ``flow`` of the worker's ``flows`` to this server.
    """

    rank: int
    world_size: int
    server: int
    control_address: str | None = None
    members: tuple[int, ...] | None = None
    divisor: int | None = None
    flow: int = 0
    flows: int = 1

    @classmethod
    def of(cls, context: TransportContext, server: int) -> WorkerHello:
        """The hello of the rank with ``context`` to the server that it counts as number ``server``."""
        world, contributors = context.world, context.contributors
        plain = contributors == Contributors.all_ranks(world.world_size)
        members, divisor = (None, None) if plain else (contributors.members, contributors.divisor)
        return cls(world.rank, world.world_size, server, context.control_address, members, divisor, 0, context.settings.flows)

    def of_flow(self, flow: int) -> WorkerHello:
        """The hello of the same worker on another flow."""
        return replace(self, flow=flow)

    @property
    def contributors(self) -> Contributors:
        plain = Contributors.all_ranks(self.world_size)
        return Contributors(self.members or plain.members, self.divisor or plain.divisor)

    @property
    def member(self) -> int:
        """The job's rank, which names this rank in messages."""
        return self.rank if self.members is None else self.members[self.rank]

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Any) -> WorkerHello:
        """The inverse of :meth:`to_record`.

        Raises:
            ProtocolError: ``record`` does not have the form that :meth:`to_record` gives.
            ConfigError: the rank is not below the world size, the world size is above :data:`MAX_RANKS`, or ``members``,
                ``divisor``, ``flow``, ``flows`` or ``control_address`` cannot be.
        """
        wanted = {f.name for f in fields(cls)}
        if not isinstance(record, dict) or record.keys() != wanted:
            raise ProtocolError(f"a hello holds {', '.join(sorted(wanted))}; this one does not")
        members = record["members"]
        if not isinstance(members, list | tuple | None):
            raise ProtocolError("a hello holds a value of the wrong type")
        numbers = [record["rank"], record["world_size"], record["server"], record["flow"], record["flows"], *(members or ())]
        numbers += [] if record["divisor"] is None else [record["divisor"]]
        address = record["control_address"]
        if not all(type(n) is int and 0 <= n < 2**31 for n in numbers) or not isinstance(address, str | None):
            raise ProtocolError("a hello holds a value of the wrong type")
        if record["world_size"] > MAX_RANKS:
            raise ConfigError(f"a hello says that there are {record['world_size']} ranks; the limit is {MAX_RANKS}")
        if not record["flow"] < record["flows"] <= MAX_FLOWS:
            raise ConfigError(f"a hello is of flow {record['flow']} of {record['flows']}; the limit is {MAX_FLOWS}")
        if address is not None:
            parse_address(address, "the address of rank 0 in a hello")
        hello = cls(**{**record, "members": None if members is None else tuple(members)})
        if hello.rank >= hello.world_size:
            raise ConfigError(f"rank {hello.rank} is not below its world size of {hello.world_size}")
        if (hello.members is not None and len(hello.members) != hello.world_size) or hello.divisor == 0:
            raise ConfigError(
                f"rank {hello.rank} says that its world of {hello.world_size} ranks has the members {hello.members} and "
                f"divisor {hello.divisor}"
            )
        return hello
