from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.control import messages
from commsched.control.messages import PROTOCOL, Member, Message, decode, encode
from commsched.core.errors import ProtocolError

text = st.text(max_size=20)
counts = st.integers(0, 2**63 - 1)
seconds = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | seconds | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
configs = st.dictionaries(text, json_values, max_size=3)
steps = st.dictionaries(counts, counts, max_size=3)
errors = st.dictionaries(text, text, max_size=3)
members = st.builds(Member, st.sampled_from(["rank", "server"]), counts, counts, text, counts, text)

every_message = st.one_of(
    st.builds(messages.Hello, text, st.just(PROTOCOL), members, seconds),
    st.builds(messages.Ping, seconds),
    st.builds(messages.Gather, text, text),
    st.builds(messages.ReportFailure, errors),
    st.builds(messages.Leave),
    st.builds(messages.Part),
    st.builds(messages.Released, counts),
    st.builds(messages.Disconnect),
    st.builds(messages.Propose, configs, configs),
    st.builds(messages.Prepared, steps),
    st.builds(messages.ToRank0, text, text),
    st.builds(messages.Announce, text, text),
    st.builds(messages.FromRank, counts, text, text),
    st.builds(messages.Announced, text, text),
    st.builds(messages.Heartbeat),
    st.builds(messages.Welcome, text, counts),
    st.builds(messages.Ready, text),
    st.builds(messages.Pong, seconds, seconds),
    st.builds(messages.GatherPart, text, st.lists(st.tuples(counts, text), max_size=3).map(tuple)),
    st.builds(messages.AskMissing, text),
    st.builds(messages.Missing, text, steps),
    st.builds(messages.Failed, errors),
    st.builds(messages.Left, steps),
    st.builds(messages.Parting, counts),
    st.builds(messages.End),
    st.builds(messages.Prepare),
    st.builds(messages.Commit, configs, steps, configs),
)


@given(every_message)
def test_a_message_survives_the_way(message: Message) -> None:
    assert decode(encode(message)) == message


def test_every_message_is_tried_above() -> None:
    assert {type(message) for message in _one_of_each()} == set(messages._KINDS.values())


def _one_of_each() -> list[Message]:
    member = Member("rank", 0, 1, "h", 1)
    return [
        messages.Hello("1", PROTOCOL, member, 1.0),
        messages.Ping(1.0),
        messages.Gather("t", "1"),
        messages.ReportFailure({}),
        messages.Leave(),
        messages.Part(),
        messages.Released(1),
        messages.Parting(1),
        messages.Disconnect(),
        messages.Propose({}),
        messages.Prepared({}),
        messages.ToRank0("t", "1"),
        messages.Announce("t", "1"),
        messages.FromRank(0, "t", "1"),
        messages.Announced("t", "1"),
        messages.Heartbeat(),
        messages.Welcome("h", 1),
        messages.Ready("h:1"),
        messages.Pong(1.0, 2.0),
        messages.GatherPart("t", ((1, "1"),)),
        messages.AskMissing("t"),
        messages.Missing("t", {1: 3}),
        messages.Failed({}),
        messages.Left({0: 0}),
        messages.End(),
        messages.Prepare(),
        messages.Commit({}, {}),
    ]


def is_refused_or_a_message(data: bytes) -> None:
    try:
        message = decode(data)
    except ProtocolError as error:
        assert "rank 0 runs" in str(error) or "not a message of the control channel" in str(error)  # noqa: PT017
    else:
        assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    is_refused_or_a_message(data)


@given(json_values)
def test_any_json_is_a_message_or_a_protocol_error(value: object) -> None:
    is_refused_or_a_message(json.dumps(value).encode())


@given(st.sampled_from(_one_of_each()), st.data())
def test_a_message_with_a_wrong_field_is_a_message_or_a_protocol_error(message: Message, data: st.DataObject) -> None:
    record = json.loads(encode(message))
    key = data.draw(st.sampled_from(sorted(record)) | text)
    record[key] = data.draw(json_values)
    is_refused_or_a_message(json.dumps(record).encode())


@given(st.sampled_from(_one_of_each()), st.data())
def test_a_message_with_a_flipped_bit_is_a_message_or_a_protocol_error(message: Message, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    is_refused_or_a_message(bytes(damaged))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"message":"Parting","rank":-1}',
        b'{"message":"Parting","rank":true}',
        b'{"message":"Parting","rank":9223372036854775808}',
        b'{"message":"Parting","rank":' + b"9" * 5000 + b"}",
        b'{"message":"Left","ranges":[[0]]}',
        b'{"message":"GatherPart","tag":"t","runs":{"0":"1"}}',
        b'{"message":"GatherPart","tag":"t","runs":[[1]]}',
        b'{"message":"GatherPart","tag":"t","runs":[["1","1"]]}',
        b'{"message":"Ping","sent_at":NaN}',
        b'{"message":"Ping","sent_at":1' + b"0" * 400 + b"}",
        b'{"message":"Give","tag":"\\ud800","value":""}',
        b'{"message":"Held","steps":[[0]]}',
        b'{"message":"Held","steps":[[[],0]]}',
        b'{"message":"Held","steps":{"0":1}}',
        b'{"message":["Beat"]}',
        b'{"message":"Beat","more":1}',
        b'{"message":"Welcome","host":"h"}',
    ],
)
def test_what_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="that are not a message of the control channel"):
        decode(data)


def test_the_hello_of_another_protocol_names_both_versions_whatever_else_is_in_it() -> None:
    data = json.dumps({"message": "Hello", "version": "9.9.9", "protocol": 99, "new_field": []}).encode()
    with pytest.raises(ProtocolError, match=r"hello of commsched 9\.9\.9 \(control protocol 99\), but rank 0 runs commsched"):
        decode(data)


@given(st.sets(st.integers(0, 40)))
def test_ranks_survive_as_ranges(ranks: set[int]) -> None:
    ranges = messages.ranges_of(ranks)
    assert messages.ranks_in(ranges) == sorted(ranks)
    assert all(last + 1 not in ranges for last in ranges.values()), "neighbours share a range"


def test_numbers_that_are_no_rank_take_no_time() -> None:
    assert messages.ranks_in({2: 3, 2**61: 2**62}) == [2, 3]
