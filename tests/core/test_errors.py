import copy
import json
import os

import pytest

from commsched.core import errors
from commsched.core.errors import CommschedError, ConfigError, PeerLost, TransportError, error_text, from_record, to_record

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CommschedError) and kind is not CommschedError
]


def test_the_hierarchy() -> None:
    assert {kind.__name__: kind.__base__.__name__ for kind in KINDS} == {
        "ConfigError": "CommschedError",
        "UnsupportedError": "CommschedError",
        "ManifestMismatch": "CommschedError",
        "OrderMismatch": "CommschedError",
        "RanksDiverged": "CommschedError",
        "ProtocolError": "CommschedError",
        "TransportError": "CommschedError",
        "PeerLost": "TransportError",
        "PeerTimeout": "TransportError",
        "ClosedError": "CommschedError",
    }
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_survives_the_way_to_a_peer(kind: type[CommschedError]) -> None:
    arrived = from_record(json.loads(json.dumps(to_record(kind("rank 2 is gone")))))
    assert type(arrived) is kind
    assert str(arrived) == "rank 2 is gone"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad data"), "ValueError: bad data"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (PeerLost("rank 2 is gone"), "PeerLost: rank 2 is gone"),
        (ValueError("\n\n"), "ValueError"),
        (ValueError(os.fsdecode(b"no caf\xe9.txt")), r"ValueError: no caf\udce9.txt"),
        (Unspeakable(), "Unspeakable: <exception str() failed>"),
    ],
)
def test_an_error_is_named_by_its_type_and_what_it_says(error: BaseException, text: str) -> None:
    assert error_text(error) == text


def test_an_error_of_the_users_code_becomes_a_transport_error_that_names_it() -> None:
    arrived = from_record(to_record(ZeroDivisionError("division by zero")))
    assert type(arrived) is TransportError
    assert str(arrived) == "ZeroDivisionError: division by zero"
    assert str(from_record(to_record(KeyboardInterrupt()))) == "KeyboardInterrupt"


def test_a_name_that_is_no_text_survives_the_way_to_a_peer() -> None:
    record = to_record(ConfigError(os.fsdecode(b"no caf\xe9.txt"), tensor="caf\udce9"))
    assert json.loads(json.dumps(record).encode()) == record
    assert all(value.encode() for value in record.values())
    assert str(from_record(record)) == r"no caf\udce9.txt"


def test_a_kind_we_do_not_know_becomes_a_transport_error() -> None:
    arrived = from_record({"type": "PeerAsleep", "message": "rank 1 sleeps"})
    assert type(arrived) is TransportError
    assert str(arrived) == "rank 1 sleeps"


def test_an_empty_record_still_is_an_error() -> None:
    assert type(from_record({})) is TransportError
    assert str(from_record({})) == "no message"


def test_a_lost_peer_is_a_transport_error() -> None:
    with pytest.raises(TransportError, match="rank 2 is gone"):
        raise PeerLost("rank 2 is gone")


def test_what_an_error_is_about_travels_with_it() -> None:
    error = PeerLost("rank 2 is gone", rank=2, step=7, tensor="layer0.weight")
    arrived = from_record(json.loads(json.dumps(to_record(error))))
    assert (arrived.rank, arrived.server, arrived.step, arrived.tensor) == (2, None, 7, "layer0.weight")
    assert to_record(arrived) == to_record(error)
    assert vars(copy.copy(error)) == vars(error)


@pytest.mark.parametrize("rank", ["-1", "one", "", "1" * 5000, "\u0661"])
def test_a_number_that_is_none_is_not_known(rank: str) -> None:
    assert from_record({"type": "PeerLost", "message": "m", "rank": rank}).rank is None
