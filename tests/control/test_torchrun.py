"""How ranks meet in torchrun's store, and what a stranger gets who can reach it."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from commsched import ConfigError, PeerLost, PeerTimeout
from commsched.control import rendezvous
from commsched.control.rendezvous import Endpoint
from commsched.control.torchrun import StorePlace, TorchrunStore, store_place
from commsched.core.world import World
from commsched.net.sealed import OneTimeKey
from commsched.settings import Settings

PLACE = StorePlace("127.0.0.1", 29500)
ENDPOINT = Endpoint("10.0.0.1:4711", "ab" * 32)
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
APART = World(1, 4, 1, 2, "torchrun")


class Values:
    """A store in memory, as torch's is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: dict[str, str] = {}
        self.gone = False
        self.looked = threading.Event()  # set by each look at a value

    def set(self, key: str, value: str) -> None:
        with self.access():
            self.values[key] = value

    def get(self, key: str) -> bytes:
        self.looked.set()
        with self.access():
            return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        with self.access():
            return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self.access():
            self.values[key] = str(int(self.values.get(key, 0)) + amount)
            return int(self.values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.access():
            if self.values.get(key, "") == expected:
                self.values[key] = desired
            return self.values[key].encode()

    @contextmanager
    def access(self) -> Iterator[None]:
        with self.lock:
            if self.gone:
                raise RuntimeError("connection reset")
            yield

    def has(self, part: str) -> bool:
        with self.lock:
            return any(part in key for key in self.values)


def end_of(values: Values, **settings: object) -> TorchrunStore:
    return TorchrunStore(values, PLACE, Settings.load({"join_within": 60, **settings}, {}))


@contextmanager
def finding(values: Values, rank: int = 1, **settings: object) -> Iterator[Future[Endpoint]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(end_of(values, **settings).find, rank)


def until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    while not condition():
        waited.wait(0.01)


def test_every_rank_finds_rank_0_and_the_store_never_holds_the_token() -> None:
    values = Values()
    with finding(values, 1) as early, finding(values, 2) as another, end_of(values).offered(ENDPOINT, 4):
        assert early.result(60) == another.result(60) == ENDPOINT
        with finding(values, 3) as late:
            assert late.result(60) == ENDPOINT
        held = json.dumps(values.values)
        assert ENDPOINT.address in held
        assert ENDPOINT.token not in held
    assert values.values["offer"] == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "commsched-meeting"]


TOKEN = "a long secret that nobody guesses"


@contextmanager
def a_port() -> Iterator[tuple[socket.socket, Endpoint]]:
    """A port of this process, at which it does not listen yet."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        yield port, Endpoint(f"127.0.0.1:{port.getsockname()[1]}", TOKEN)


def test_a_token_that_is_set_stays_at_home() -> None:
    values = Values()
    token = TOKEN
    with a_port() as (port, endpoint), end_of(values, token=token).offered(endpoint, 2):
        port.listen()
        assert end_of(values, token=token).find(1) == endpoint
        with pytest.raises(ConfigError, match="a token is set on rank 0, and not on this rank: set the same COMMSCHED_TOKEN"):
            end_of(values).find(1)
    with end_of(values).offered(ENDPOINT, 2):
        with pytest.raises(ConfigError, match="a token is set on this rank, and not on rank 0: set the same COMMSCHED_TOKEN"):
            end_of(values, token=token).find(1)
    assert not values.has("question")


def test_an_offer_of_an_earlier_round_is_passed_over() -> None:
    """Whether its ranks had asked or not."""
    values = Values()
    with end_of(values).offered(ENDPOINT, 4), finding(values, 1) as earlier:
        assert earlier.result(60) == ENDPOINT
        stale = values.values["offer"]
    values.set("offer", stale)  # its rank 0 was killed
    with finding(values, 1) as asked_before, finding(values, 2) as not_asked_before:
        until(lambda: values.has("question/2"))
        new = Endpoint("10.0.0.2:1", "cd" * 32)
        with end_of(values).offered(new, 4):
            assert asked_before.result(60) == not_asked_before.result(60) == new


def test_an_offer_of_an_earlier_round_is_passed_over_if_the_token_is_set() -> None:
    values = Values()
    with a_port() as (_, earlier), a_port() as (port, new):
        with end_of(values, token=TOKEN).offered(earlier, 2):
            stale = values.values["offer"]
        values.set("offer", stale)  # its rank 0 was killed
        with pytest.raises(PeerTimeout, match=f"rank 1 waited 0.2 s .*:29500: rank 0 does not answer at {earlier.address}"):
            end_of(values, token=TOKEN, join_within=0.2).find(1)
        values.looked.clear()
        with finding(values, 1, token=TOKEN) as rank_1:
            assert values.looked.wait(20)
            port.listen()
            with end_of(values, token=TOKEN).offered(new, 2):
                assert rank_1.result(20) == new


def test_a_stranger_who_asks_first_keeps_the_rank_out() -> None:
    values = Values()
    with end_of(values).offered(ENDPOINT, 2):
        meeting = json.loads(values.values["offer"])[0]
        values.set(f"{meeting}/question/1", f"{OneTimeKey().public:x}")
        with pytest.raises(PeerTimeout, match=r"rank 1 waited 0.2 s .*:29500: another process has asked as rank 1"):
            end_of(values, join_within=0.2).find(1)


def test_a_stranger_who_asks_instead_is_noticed() -> None:
    values = Values()
    with finding(values) as rank:
        values.set("offer", json.dumps(["m", ENDPOINT.address, f"{OneTimeKey().public:x}"]))
        until(lambda: values.has("question/1"))
        key = OneTimeKey()  # of rank 0, which finds the stranger's key
        letter = key.seal(b"\0" * 32, OneTimeKey().public, "token of m for rank 1")
        values.set("m/reply/1", letter.hex())
        with pytest.raises(ConfigError, match=r"the answer to rank 1 in .* another program writes to that store"):
            rank.result(60)


@pytest.mark.parametrize("garbage", ["", "x", "[", "[" * 100_000, "[1, 2, 3]", '["m", "nowhere", ""]', "{}", '["m"]', "1"])
def test_an_offer_of_no_rank_of_ours_is_ignored(garbage: str) -> None:
    values = Values()
    values.set("offer", garbage)
    with pytest.raises(PeerTimeout, match="rank 0 does not say where it listens"):
        end_of(values, join_within=0.1).find(1)


def test_a_question_of_no_rank_of_ours_stops_nobody_else() -> None:
    values = Values()
    with end_of(values).offered(ENDPOINT, 4):
        meeting = json.loads(values.values["offer"])[0]
        for rank, question in ((1, "no key"), (2, "1")):
            values.set(f"{meeting}/question/{rank}", question)
        with finding(values, 3) as rank_3:
            assert rank_3.result(60) == ENDPOINT


def test_a_store_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    values = Values()
    caplog.set_level(logging.INFO, "commsched")
    with end_of(values).offered(ENDPOINT, 2):
        values.gone = True
        with pytest.raises(PeerLost, match=r"rank 1 cannot use torchrun's store at 127.0.0.1:29500 any more: connection reset"):
            end_of(values).find(1)
    assert set(caplog.messages) == {"rank 0 cannot use torchrun's store any more: connection reset"}


@pytest.mark.parametrize(
    ("world", "settings", "without"),
    [
        (World(1, 4, 1, 4, "torchrun"), {}, ""),  # on one machine there is the file
        (World(1, 4, 1, 2, "srun"), {}, ""),
        (APART, {"control": "10.0.0.1:1"}, ""),
        (APART, {}, "TORCHELASTIC_USE_AGENT_STORE"),
        (APART, {}, "MASTER_PORT"),
        (APART, {}, "MASTER_ADDR"),
    ],
)
def test_where_no_store_is_needed_or_there_is_none(world: World, settings: dict[str, str], without: str) -> None:
    environ = {key: value for key, value in AGENT.items() if key != without}
    assert store_place(world, Settings.load(settings, {}), environ) is None
    assert store_place(APART, Settings(), AGENT) == ("node0", 29500)


def test_rank_0_listens_where_it_reaches_the_store(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    address, token = end_of(Values()).where_to_listen()
    assert address == "127.0.0.1:0"
    assert len(token) == 64
    assert caplog.messages == [
        "rank 0 listens at 127.0.0.1, by MASTER_ADDR='127.0.0.1', which ranks on other machines cannot reach"
    ]
    assert end_of(Values(), host="fd00::1").where_to_listen().address == "[fd00::1]:0"
    monkeypatch.setattr(rendezvous, "stands_for_loopback", lambda host: True)
    with pytest.raises(ConfigError, match="MASTER_ADDR='node0': on rank 0's machine the name node0 stands for a loopback"):
        TorchrunStore(Values(), StorePlace("node0", 1), Settings()).where_to_listen()


def test_what_rank_0_needs_a_token_for() -> None:
    with pytest.raises(ConfigError, match="servers is set, but no token: set the same COMMSCHED_TOKEN"):
        end_of(Values(), servers="10.0.0.9:1").where_to_listen()
    with pytest.raises(ConfigError, match="the token has 1 of at least 16 characters"):
        end_of(Values(), token="x", host="10.0.0.1").where_to_listen()
