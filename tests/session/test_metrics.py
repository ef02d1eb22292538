"""Prometheus metrics of a rank, as its server shows them."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest

from commsched.cli.main import main
from commsched.core.errors import ConfigError
from commsched.core.world import World
from commsched.session import metrics
from commsched.session.local import local_sessions
from commsched.session.metrics import GAUGES, MOST_REQUESTS, serve_metrics
from commsched.session.opening import open_session
from commsched.settings import Settings

STATS: dict[str, Any] = {**dict.fromkeys(GAUGES), "rank": 3, "steps": 7, "step_seconds": 0.25, "layers": []}


def port_of(caplog: pytest.LogCaptureFixture) -> int:
    [line] = [message for message in caplog.messages if message.startswith("metrics are at http://127.0.0.1:")]
    return int(line.removesuffix("/metrics").rpartition(":")[2])


def shown(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]


def test_what_is_known_is_shown_and_nothing_when_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="commsched"):
        end = serve_metrics("127.0.0.1:0", 1, lambda: STATS)
    port = port_of(caplog)
    try:
        assert shown(port) == ['commsched_steps{rank="3"} 7.0', 'commsched_step_seconds{rank="3"} 0.25']
    finally:
        end()
    with pytest.raises(urllib.error.URLError):
        shown(port)
    assert not [thread for thread in threading.enumerate() if thread.name == "commsched-metrics"]


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0"])
def test_strangers_take_a_few_threads_at_most_and_no_lines(
    address: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They connect and say nothing, or go away in the middle."""
    if ":" in address.rpartition(":")[0] and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(metrics._Handler, "timeout", 0.2)
    before = set(threading.enumerate())
    with caplog.at_level(logging.INFO, logger="commsched"):
        end = serve_metrics(address, 0, lambda: STATS)
    [line] = caplog.messages
    url = line.removeprefix("metrics are at ")
    where = address.rpartition(":")[0].strip("[]"), int(url.removesuffix("/metrics").rpartition(":")[2])
    try:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(socket.create_connection(where, timeout=60)) for _ in range(MOST_REQUESTS + 4)]
            assert [each.recv(1) for each in silent] == [b""] * len(silent)  # refused, or given up after the time
            more = [each for each in threading.enumerate() if each not in before and each.name != "commsched-metrics"]
            assert len(more) <= MOST_REQUESTS
        for each in more:
            each.join(60)
        with socket.create_connection(where, timeout=60) as reset:
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            reset.sendall(b"GET ")
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert b"commsched_steps" in answer.read()
    finally:
        end()
    assert capfd.readouterr() == ("", "")


def test_every_number_is_one_of_the_statistics() -> None:
    sessions = local_sessions(2)
    try:
        assert set(GAUGES) <= sessions[0].stats().keys()
    finally:
        for session in sessions:
            session.abort("the test is over")


def test_each_rank_of_a_machine_has_a_port_of_its_own_and_one_that_is_taken_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serve_metrics(f"127.0.0.1:{port - 1}", 1, lambda: STATS)()
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith(f"no metrics at 127.0.0.1:{port}: ")


@pytest.mark.parametrize(
    ("text", "address"), [("9400", "127.0.0.1:9400"), ("0.0.0.0:9400", "0.0.0.0:9400"), ("[::1]:9400", "[::1]:9400")]
)
def test_a_port_alone_is_for_this_machine_only(text: str, address: str) -> None:
    assert Settings.load({}, {"COMMSCHED_METRICS": text}).metrics == address


def test_what_is_no_port_is_refused() -> None:
    for text in ("99999", "here", ":9400"):
        with pytest.raises(ConfigError, match=r"is not a port; write it like 9400, 0\.0\.0\.0:9400 or \[::\]:9400"):
            Settings.load({"metrics": text}, {})


def test_a_library_that_is_missing_has_its_pip_line_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=r'pip install "commsched\[metrics\]"'):
        open_session(World(0, 2, 0, 2), Settings.load({"metrics": 9400}, {}))
    assert main(["run", "-n", "2", "--metrics", "9400", "--", "true"]) == 2
    assert 'pip install "commsched[metrics]"' in capsys.readouterr().err
