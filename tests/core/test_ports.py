"""Ports for processes that will listen later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from commsched.core import ports
from commsched.core.ports import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_for_later_is_none_that_the_system_gives_to_connections(host: str) -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
        try:
            listening.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        port = free_port(host)
        assert port >= 20_000  # Ray gives some below to its workers
        assert not low <= port <= high or (low, high) == (1024, 65535)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ("32768\t60999\n", [*range(20_000, 32_768), *range(61_000, 65_536)]),
        ("1024 65535", [*range(20_000, 65_536)]),  # the system gives out all, so any is as good as another
        (None, [*range(20_000, 32_768)]),  # unknown: the range of most systems
    ],
)
def test_the_ports_to_choose_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None, chosen: list[int]
) -> None:
    offered: list[list[int]] = []

    def choose(all_ports: list[int]) -> int:
        offered.append(list(all_ports))
        return free

    with socket.create_server(("127.0.0.1", 0)) as listening:
        free = listening.getsockname()[1]
    if given is not None:
        (tmp_path / "range").write_text(given)
    monkeypatch.setattr(ports, "Path", lambda name: tmp_path / "range")
    monkeypatch.setattr(ports.secrets, "choice", choose)
    assert free_port() == free
    assert offered == [chosen]


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        offered = iter([taken.getsockname()[1], other := free_port()])
        monkeypatch.setattr(ports.secrets, "choice", lambda _: next(offered))
        assert free_port() == other


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")
