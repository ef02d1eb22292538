import socket
from pathlib import Path

import pytest

from commsched.tuner import link
from commsched.tuner.link import describe_link


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_is_called_so(host: str) -> None:
    assert describe_link(host) == "loopback"


def test_a_rate_is_part_of_it() -> None:
    assert describe_link("127.0.0.1", 25e6) == "loopback, at most 200 Mb/s"
    assert describe_link("127.0.0.1", 187_500) == "loopback, at most 1.5 Mb/s"


@pytest.mark.parametrize("host", ["192.0.2.77", "2001:db8::77"])
def test_an_address_that_no_interface_has_is_unknown(host: str) -> None:
    assert describe_link(host) == "unknown"


@pytest.fixture
def interfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory like /sys/class/net, and two interfaces: fast0 with 2001:db8::1, slow0 with 2001:db8::2."""
    addresses = tmp_path / "if_inet6"
    addresses.write_text(
        "20010db8000000000000000000000001 02 40 00 80    fast0\n20010db8000000000000000000000002 03 40 00 80    slow0\n"
    )
    monkeypatch.setattr(link, "_IPV6_ADDRESSES", addresses)
    monkeypatch.setattr(link, "_INTERFACES", tmp_path)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "fast0"), (3, "slow0")])
    for name in ("fast0", "slow0"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_the_interface_that_has_the_address_is_named_with_its_speed(interfaces: Path) -> None:
    (interfaces / "fast0" / "speed").write_text("10000\n")
    assert describe_link("2001:db8::1") == "fast0, 10000 Mb/s"
    assert describe_link("[2001:db8::1]", 125e6) == "fast0, 10000 Mb/s, at most 1000 Mb/s"


@pytest.mark.parametrize("speed", ["-1\n", "", None])
def test_a_speed_that_is_not_known_is_left_out(interfaces: Path, speed: str | None) -> None:
    if speed is not None:
        (interfaces / "slow0" / "speed").write_text(speed)
    assert describe_link("2001:db8::2") == "slow0"


def test_the_addresses_of_loopback_are_found() -> None:
    assert "127.0.0.1" in link._addresses_of("lo")
    assert link._addresses_of("nosuch0") == set()
