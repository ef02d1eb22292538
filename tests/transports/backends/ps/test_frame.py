"""The messages: what is encoded comes back, and bytes from anywhere are a frame or a ProtocolError."""

import json
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from commsched.core.errors import ConfigError, ProtocolError
from commsched.core.manifest import ITEMSIZE
from commsched.core.scheduler import MAX_PARTITION_BYTES
from commsched.settings import MAX_FLOWS
from commsched.transports.backends.ps.frame import (
    HEADER_BYTES,
    MAGIC,
    MAX_JSON_BYTES,
    MAX_MESSAGE_BYTES,
    VERSION,
    Damaged,
    Frame,
    FrameKind,
    WorkerHello,
    decode,
    decode_header,
    encode,
    encode_header,
    json_frame,
)

groups, partitions, steps = st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@st.composite
def raw_frames(draw) -> Frame:
    payload = draw(st.binary(min_size=1, max_size=64))
    start = draw(st.integers(0, 2**63))
    return Frame(
        draw(st.sampled_from([FrameKind.PUSH, FrameKind.RESULT])),
        draw(groups),
        draw(steps),
        draw(partitions),
        draw(st.sampled_from(list(ITEMSIZE))),
        start,
        start + len(payload),
        payload,
        draw(partitions),
    )


def test_the_header_keeps_payloads_aligned():
    assert HEADER_BYTES == 64
    assert HEADER_BYTES % 8 == 0


@given(raw_frames())
def test_gradients_come_back_as_they_were(frame):
    message = encode(frame)
    assert message == encode_header(frame) + frame.payload
    assert decode(message) == frame
    assert decode_header(message)[:2] == (frame._replace(payload=b""), len(frame.payload))
    assert frame.nbytes == len(message)


@given(st.sampled_from([FrameKind.ACK, FrameKind.GOODBYE]), groups, steps, partitions)
def test_messages_without_payload_come_back_as_they_were(kind, group, step, partition):
    frame = Frame(kind, group, step, partition)
    assert decode(encode(frame)) == frame
    assert decode(encode(frame)).key == (group, step, partition)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_comes_back_as_it_was(value):
    frame = decode(encode(json_frame(FrameKind.GROUP, value, group=9)))
    assert (frame.kind, frame.group, frame.json()) == (FrameKind.GROUP, 9, value)


@given(st.binary(max_size=120))
@example(b"")
@example(MAGIC + bytes(60))
def test_any_bytes_are_a_frame_or_a_protocol_error(message):
    check_total(message)


@given(raw_frames(), st.data())
def test_a_damaged_message_is_refused(frame, data):
    message = bytearray(encode(frame))
    for place in data.draw(st.sets(st.integers(0, len(message) - 1), min_size=1, max_size=3)):
        message[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises((ProtocolError, Damaged)):
        decode(bytes(message[: data.draw(st.integers(0, len(message)))]))


def test_every_single_bit_counts():
    frame = Frame(FrameKind.PUSH, 1, 2, 3, "float32", 0, 8, b"gradient", 4)
    message = encode(frame)
    for bit in range(8 * len(message)):
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError if bit < 8 * HEADER_BYTES else Damaged) as raised:
            decode(bytes(changed))
        if bit >= 8 * HEADER_BYTES:
            assert raised.value.frame == frame._replace(payload=b"")


@given(st.binary(max_size=51))
def test_any_header_with_a_right_checksum_is_a_frame_or_a_protocol_error(fields):
    checked = (MAGIC + bytes([VERSION]) + fields).ljust(56, b"\0")
    check_total(checked + struct.pack("<Q", xxh3_64_intdigest(checked)))


def check_total(message: bytes) -> None:
    try:
        frame = decode(message)
    except (ProtocolError, Damaged):
        return
    if frame.kind in (FrameKind.PUSH, FrameKind.RESULT):
        assert len(frame.payload) == frame.stop - frame.start > 0
        assert frame.dtype in ITEMSIZE
    try:
        frame.json()
    except ProtocolError:
        pass


def header(magic=MAGIC, version=VERSION, kind=3, dtype=3, start=0, stop=4, nbytes=4) -> bytes:
    fields = struct.pack("<4sBBBxHxxIIIQQQQ", magic, version, kind, dtype, 0, 0, 0, nbytes, 0, start, stop, 0)
    return fields + struct.pack("<Q", xxh3_64_intdigest(fields))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"GET / HTTP/1.1\r\n", r"a message of 16 bytes is shorter than a header"),
        (header(magic=b"HTTP") + b"abcd", r"begins with b'HTTP', not b'CSPS'"),
        (header(version=2) + b"abcd", rf"has wire version 2; this is version {VERSION}"),
        (header()[:-1] + b"!abcd", r"a header that arrived damaged: its checksum is [0-9a-f]{16}, not 21[0-9a-f]{14} as when"),
        (header(kind=0) + b"abcd", r"has kind 0 and dtype 3; one of them is unknown"),
        (header(dtype=99) + b"abcd", r"has kind 3 and dtype 99; one of them is unknown"),
        (header(dtype=0) + b"abcd", r"a PUSH of no dtype bytes 0 to 4 has 4 bytes"),
        (header() + b"abc", r"a PUSH of 4 bytes of payload came with 3"),
        (header(nbytes=3) + b"abc", r"a PUSH of float32 bytes 0 to 4 has 3 bytes"),
        (header(start=4, stop=0) + b"abcd", r"a PUSH of float32 bytes 4 to 0 has 4 bytes"),
        (header(start=0, stop=0, nbytes=0), r"a PUSH of float32 bytes 0 to 0 has 0 bytes"),
        (header(stop=2**64 - 1) + b"abcd", r"bytes 0 to 18446744073709551615 has 4 bytes"),
        (header(stop=2**31, nbytes=2**31), r"a PUSH of float32 bytes 0 to 2147483648 has 2147483648 bytes"),
        (header(kind=FrameKind.ACK) + b"abcd", r"an? ACK has 4 bytes of payload; the limit is 0"),
        (
            header(kind=FrameKind.GROUP, nbytes=MAX_JSON_BYTES + 1),
            r"a GROUP has 67108865 bytes of payload; the limit is 67108864",
        ),
    ],
)
def test_what_is_wrong_is_said(message, why):
    with pytest.raises(ProtocolError, match=why):
        decode(message)


def test_the_largest_partition_of_a_16_bit_type_may_come_as_sums_of_32_bits():
    largest = 2 * MAX_PARTITION_BYTES
    assert decode_header(header(stop=largest, nbytes=largest))[1] == largest
    assert largest + HEADER_BYTES == MAX_MESSAGE_BYTES
    with pytest.raises(ProtocolError, match=f"has {largest + 4} bytes"):
        decode_header(header(stop=largest + 4, nbytes=largest + 4))


@pytest.mark.parametrize("payload", [b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 5000])
def test_json_that_is_none_is_a_protocol_error(payload):
    with pytest.raises(ProtocolError, match="a GROUP message does not hold JSON"):
        decode(encode(Frame(FrameKind.GROUP, payload=payload))).json()


def test_a_number_that_does_not_fit_is_not_sent():
    with pytest.raises(struct.error):
        encode(Frame(FrameKind.ACK, group=2**32))


@given(
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 9),
    st.none() | st.sampled_from(["10.0.0.1:29600", "[fe80::1%br-lan]:0", "node-7.cluster:65535"]),
    st.none() | st.integers(1, 99),
    st.integers(1, MAX_FLOWS),
)
def test_a_hello_comes_back_as_it_was(rank, more, server, address, divisor, flows):
    members = tuple(range(rank + more + 1)) if divisor else None
    hello = WorkerHello(rank, rank + more + 1, server, address, members, divisor, flows - 1, flows)
    assert WorkerHello.from_record(json.loads(json.dumps(hello.to_record()))) == hello


@given(
    st.none()
    | st.integers()
    | st.lists(st.integers())
    | st.fixed_dictionaries(
        {
            name: st.none() | st.integers() | st.booleans() | st.text() | st.lists(st.integers())
            for name in ("rank", "world_size", "server", "control_address", "members", "divisor", "flow", "flows")
        }
    )
)
def test_any_record_is_a_hello_or_refused(record):
    try:
        hello = WorkerHello.from_record(record)
    except (ProtocolError, ConfigError):
        return
    assert 0 <= hello.rank < hello.world_size
    assert 0 <= hello.flow < hello.flows <= MAX_FLOWS


def test_a_rank_outside_its_world_is_refused():
    with pytest.raises(ConfigError, match="rank 2 is not below its world size of 2"):
        WorkerHello.from_record(WorkerHello(2, 2, 0).to_record())


@pytest.mark.parametrize(("flow", "flows"), [(0, 0), (2, 2), (0, MAX_FLOWS + 1)])
def test_a_flow_that_cannot_be_is_refused(flow, flows):
    with pytest.raises(ConfigError, match=f"a hello is of flow {flow} of {flows}; the limit is {MAX_FLOWS}"):
        WorkerHello.from_record(WorkerHello(0, 2, 0, flow=flow, flows=flows).to_record())


def test_a_world_of_more_ranks_than_there_can_be_is_refused_before_it_takes_memory():
    with pytest.raises(ConfigError, match="a hello says that there are 2147483647 ranks; the limit is 65536"):
        WorkerHello.from_record(WorkerHello(0, 2**31 - 1, 0).to_record())
    assert WorkerHello.from_record(WorkerHello(0, 65536, 0).to_record()).world_size == 65536


@pytest.mark.parametrize("address", ["nonsense", "a..b:5", "a:65536", ""])
def test_an_address_of_rank_0_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="the address of rank 0 in a hello"):
        WorkerHello.from_record(WorkerHello(0, 2, 0, address).to_record())


@pytest.mark.parametrize(("members", "divisor"), [((4,), 2), ((4, 6, 8), 2), ((4, 6), 0)])
def test_members_that_are_not_of_that_world_are_refused(members, divisor):
    with pytest.raises(ConfigError, match=r"rank 1 says that its world of 2 ranks has the members \(4.*\) and divisor [02]"):
        WorkerHello.from_record(WorkerHello(1, 2, 0, None, members, divisor).to_record())
