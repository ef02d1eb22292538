"""Connections between launchers, whose other end is the test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from commsched.cli.elastic import links
from commsched.cli.elastic.links import Came, Desk, Gone, Heard, Link, LinkLost, connect_to_host, listen_for_launchers
from commsched.cli.launch import Among
from commsched.control.elastic_messages import Closes, GiveUp, HostAnswer, LauncherHello, Over, Tell, to_line
from commsched.core.errors import ConfigError
from commsched.core.ports import free_port
from commsched.net.tls import identity_of

TOKEN = "a token of the tests"
HELLO = LauncherHello({"-n": 2}, 1, "10.0.0.2")


def among(security: str = "none", **changes: Any) -> Among:
    given: dict[str, Any] = {
        "address": f"127.0.0.1:{free_port()}",
        "token": TOKEN,
        "job": "",
        "room": 1,
        "host": None,
        "identity": identity_of(security, TOKEN, None),
        "fail_after_seconds": 60.0,
    }
    return Among(**{**given, **changes})


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    with one, other:
        yield one, other


class AtDesk:
    """A desk, and a launcher that it has admitted."""

    def __init__(self, security: str) -> None:
        self.among = among(security)
        listening = listen_for_launchers(self.among)
        assert listening is not None
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.desk = Desk(listening, self.among, self.events)

    def connect(self) -> Link:
        return connect_to_host(self.among, lambda own_host: HELLO, 60.0, lambda: False)


@pytest.fixture(params=["none", "tls"])
def at_desk(request: pytest.FixtureRequest) -> Iterator[AtDesk]:
    made = AtDesk(request.param)
    yield made
    made.desk.close()


def test_what_both_ends_say_arrives_in_order_and_until_the_end(at_desk: AtDesk) -> None:
    link = at_desk.connect()
    came = at_desk.events.get(timeout=60.0)
    assert isinstance(came, Came)
    assert (came.machine.host, came.machine.room, came.machine.settings) == ("10.0.0.2", 1, {"-n": 2})
    long = Tell(1, to_line(GiveUp("x" * 500_000)).decode())
    for message in (HostAnswer(), long, Over(3, "it is over")):
        came.machine.do(message)
    link.send(Closes())
    assert at_desk.events.get(timeout=60.0) == Heard(came.machine, Closes())
    closing_desk = threading.Thread(target=at_desk.desk.close)
    closing_desk.start()
    assert list(link.messages()) == [HostAnswer(), long, Over(3, "it is over")]
    link.close()
    closing_desk.join(60.0)
    assert at_desk.events.get(timeout=60.0) == Gone(came.machine, "it ended the connection")


def test_a_report_before_the_first_word_ends_the_connection() -> None:
    at_desk = AtDesk("none")
    link = connect_to_host(at_desk.among, lambda own_host: Closes(), 60.0, lambda: False)  # type: ignore[arg-type, return-value]
    assert list(link.messages()) == []
    assert at_desk.events.empty()
    link.close()
    at_desk.desk.close()


def test_a_launcher_that_waits_for_the_host_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(links, "_TELL_AFTER_SECONDS", -1.0)
    waited = iter([False, False, True])
    alone = among()
    with pytest.raises(ConfigError, match=f"no launcher of this job answers at control='{alone.address}'"):
        connect_to_host(alone, lambda own_host: HELLO, 60.0, lambda: next(waited))
    said = f"commsched run: waits for the launcher at {alone.address}, which hosts the job, for 60 s at most\n"
    assert capfd.readouterr().err == said


def test_strangers_do_not_keep_a_launcher_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_MAX_HANDSHAKES", 2)
    at_desk = AtDesk("none")
    host, _, port = at_desk.among.address.rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(5)]
    link = at_desk.connect()
    assert isinstance(at_desk.events.get(timeout=60.0), Came)
    link.close()
    at_desk.desk.close()
    for stranger in strangers:
        stranger.close()


def test_a_launcher_that_has_proved_itself_is_not_ended_for_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even between the moment when it is told so and the end of the handshake."""
    monkeypatch.setattr(links, "_MAX_HANDSHAKES", 1)
    at_desk = AtDesk("none")
    host, _, port = at_desk.among.address.rpartition(":")
    answer, told, go_on = links._LAUNCHERS.answer, threading.Event(), threading.Event()

    def answered(*arguments: Any) -> Any:
        answers = answer(*arguments)
        told.set()
        go_on.wait(60.0)
        return answers

    monkeypatch.setattr(links, "_LAUNCHERS", SimpleNamespace(answer=answered, begin=links._LAUNCHERS.begin))
    link = at_desk.connect()
    assert told.wait(60.0)
    strangers = [socket.create_connection((host, int(port))) for _ in range(3)]
    for stranger in strangers[:2]:
        while stranger.recv(1024):  # until it was ended
            pass
    go_on.set()
    came = at_desk.events.get(timeout=60.0)
    came.machine.link.send(HostAnswer(""))
    assert next(link.messages()) == HostAnswer("")
    link.close()
    for stranger in strangers:
        stranger.close()
    at_desk.desk.close()


def test_a_silent_launcher_is_lost(pair: tuple[socket.socket, socket.socket]) -> None:
    with closing(Link(pair[0], 0.1)) as link, pytest.raises(LinkLost, match=r"it was silent for 0\.1 s"):
        list(link.messages())


@pytest.mark.parametrize("said", [b"{}\n", b"\xff\n", b"x" * (2**20 + 2**17)], ids=["kind", "bytes", "length"])
def test_what_is_no_message_ends_the_connection(pair: tuple[socket.socket, socket.socket], said: bytes) -> None:
    with closing(Link(pair[0], 60.0)) as link:
        writing = threading.Thread(target=pair[1].sendall, args=(said,))
        writing.start()
        with pytest.raises(LinkLost, match="is no message"):
            list(link.messages())
        writing.join(60.0)


def test_who_can_listen_at_the_address_hosts() -> None:
    meeting = among()
    first = listen_for_launchers(meeting)
    assert first is not None
    with first:
        assert listen_for_launchers(meeting) is None
    assert listen_for_launchers(among(address="192.0.2.1:29600")) is None
    assert listen_for_launchers(among(address="no-such-host.invalid:29600")) is None


def test_the_second_launcher_of_a_machine_does_not_host_at_another_address_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = among()
    first = listen_for_launchers(meeting)
    assert first is not None
    port = first.getsockname()[1]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in ("127.0.0.1", "127.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **keywords: found)
    with first:
        assert listen_for_launchers(meeting) is None


@pytest.mark.parametrize("address", ["0.0.0.0:29600", "[::]:29600", "127.0.0.1:0"])
def test_an_address_that_no_other_machine_can_use_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="give an address of one machine, and a port"):
        listen_for_launchers(among(address=address))
