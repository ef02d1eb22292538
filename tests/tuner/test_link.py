import socket
from pathlib import Path

import pytest

from commsched.tuner import link
from commsched.tuner.link import advise_faster, describe_link, faster_networks


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
        "fe800000000000000000000000000001 02 40 20 80    fast0\n00000000000000000000000000000001 01 80 10 80       lo\n"
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


@pytest.fixture
def cards(interfaces: Path) -> Path:
    """Both are real cards that are up, one ten times as fast as the other."""
    for name, speed in (("fast0", "10000\n"), ("slow0", "1000\n")):
        (interfaces / name / "device").mkdir()
        (interfaces / name / "operstate").write_text("up\n")
        (interfaces / name / "speed").write_text(speed)
    return interfaces


def test_the_networks_of_a_faster_card_are_found(cards: Path) -> None:
    assert faster_networks("2001:db8::2") == {"2001:db8::/64": "2001:db8::1 (fast0, 10000 Mb/s)"}
    assert faster_networks("2001:db8::1") == {}  # it is the fastest
    assert faster_networks("127.0.0.1") == faster_networks("192.0.2.77") == {}
    (cards / "slow0" / "speed").write_text("5001\n")
    assert faster_networks("2001:db8::2") == {}  # less than twice as fast


@pytest.mark.parametrize(
    ("interface", "file", "text"),
    [("fast0", "operstate", "down\n"), ("fast0", "speed", "-1\n"), ("slow0", "speed", "-1\n"), ("fast0", "device", None)],
)
def test_what_is_down_or_made_by_software_or_of_unknown_speed_is_no_faster_card(
    cards: Path, interface: str, file: str, text: str | None
) -> None:
    if text is None:
        (cards / interface / file).rmdir()
    else:
        (cards / interface / file).write_text(text)
    assert faster_networks("2001:db8::2") == {}


def test_only_a_network_of_all_ranks_is_advised(cards: Path) -> None:
    mine = faster_networks("2001:db8::2")
    theirs = {"2001:db8::/64": "2001:db8::3 (fast0, 10000 Mb/s)", "10.0.0.0/8": "10.0.0.3 (fast1, 10000 Mb/s)"}
    assert advise_faster("2001:db8::2", [mine, theirs]) == (
        "gradients travel by 2001:db8::2 (slow0, 1000 Mb/s), but every rank has a faster card in 2001:db8::/64, where rank 0 "
        "is at 2001:db8::1 (fast0, 10000 Mb/s): set control to that address, or host on every rank to its own"
    )
    assert advise_faster("2001:db8::2", [mine, theirs, {}]) is None
    assert advise_faster("2001:db8::2", [{}, theirs]) is None
