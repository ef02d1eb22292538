"""Descriptions of the network that a rank uses, so that a result tuned on one network is not used on another. Also detects
whether the hosts of a job share a faster network."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Interface, IPv6Interface, ip_address
from pathlib import Path

#: linux/sockios.h: requests for an interface's address and for its network mask.
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
#: The parameter server's rate between processes of one machine, in bytes per second, as measured on two cores.
LOOPBACK_RATE = 1.5e9

#: Processor time of a rank per partition over the parameter server, in seconds. Processes that share a machine pay it with
#: computation: with 2 ranks on 2 cores, steps of 49 partitions took 12 to 15 ms longer than steps of 10.
PROCESSOR_SECONDS = 0.3e-3

#: Cores of a machine for each rank there up to which its messages take processor time from its computation: one computes, and
#: one is for the threads that carry messages.
CORES_OF_A_RANK = 2

_LOOPBACK = "loopback"
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_INTERFACES = Path("/sys/class/net")


def describe_link(host: str, rate: float | None = None) -> str:
    """``loopback``, or the interface with the address ``host`` and its speed if the system knows it: ``eth0, 10000 Mb/s``.
    ``host`` is a name or an address of this machine. Each call on one machine returns the same text.

    Traffic shaping beyond the interface (``tc``, switches) is not visible here. ``rate``, the setting in bytes per second, is
    included.
    """
    text = _describe(host)
    return text if rate is None else f"{text}, at most {rate * 8 / 1e6:g} Mb/s"


def _describe(host: str) -> str:
    interface, speed = _find(host)
    return f"{interface}, {speed} Mb/s" if speed > 0 else interface


def describe_interfaces() -> list[str]:
    """This machine's interfaces but loopback, with their addresses and speeds: ``eth0: 10.0.0.7/24, 10000 Mb/s``."""
    found = []
    for _, name in socket.if_nameindex():
        addresses = [str(address) for address in _addresses_in_networks(name) if not address.is_link_local]
        if addresses and not all(ip_address(address.partition("/")[0]).is_loopback for address in addresses):
            speed = _megabits_per_second(name)
            known = f"{speed} Mb/s" if speed > 0 else "speed unknown to the system"
            found.append(f"{name}: {', '.join(addresses)}, {known}{'' if _is_card(name) else ' (made by software)'}")
    return found


def known_rate(host: str) -> float | None:
    """Bytes per second of the network at the address ``host``: of a card that reports its speed, or of loopback. None if it is
    not known."""
    interface, speed = _find(host)
    if interface == _LOOPBACK:
        return LOOPBACK_RATE
    return speed * 1e6 / 8 if speed > 0 and _is_card(interface) else None


def least_rate(host: str, workers: int) -> float | None:
    """Bytes per second that each of ``workers`` has at least at the address ``host``. None if nothing is certain.

    On loopback the processes share the machine, so the rate falls with their number. A quarter of the measured rate is certain:
    there a message takes time for the threads that handle it, not for its bytes.
    """
    interface, _ = _find(host)
    return LOOPBACK_RATE / (2 * workers) if interface == _LOOPBACK else None


def faster_networks(host: str) -> dict[str, str]:
    """This machine's networks on cards at least twice as fast as the card with the address ``host``. Maps each network to a
    description of this machine's card in it. Empty if the system does not know the speed of ``host``'s card.

    Only cards that are up count. Interfaces made by software do not count, because the speed that they report is not real.
    """
    used, speed = _find(host)
    if speed <= 0:
        return {}
    found = {}
    for _, other in socket.if_nameindex():
        faster = _megabits_per_second(other)
        if other != used and faster >= 2 * speed and _is_card(other):
            for address in _addresses_in_networks(other):
                if not address.is_link_local:
                    found[str(address.network)] = f"{address.ip} ({other}, {faster} Mb/s)"
    return found


def advise_faster(host: str, faster: Sequence[Mapping[str, str]]) -> str | None:
    """Advice for the user if all ranks share a faster network; otherwise None.

    ``host`` is the address of rank 0, and ``faster[r]`` is the result of :func:`faster_networks` on rank ``r``.
    """
    for network, by in faster[0].items():
        if all(network in others for others in faster):
            return (
                f"gradients travel by {host} ({_describe(host)}), but every rank has a faster card in {network}, where rank 0 "
                f"is at {by}: set control to that address, or host on every rank to its own"
            )
    return None


def _find(host: str) -> tuple[str, int]:
    """The interface with the address ``host``, ``loopback`` or ``unknown``, and its speed in Mbit/s; 0 or less is not known."""
    addresses = _addresses(host)
    if any(ip_address(address).is_loopback for address in addresses):
        return _LOOPBACK, 0
    found = next((name for _, name in socket.if_nameindex() if addresses & _addresses_of(name)), None)
    return ("unknown", 0) if found is None else (found, _megabits_per_second(found))


def _is_card(interface: str) -> bool:
    directory = _INTERFACES / interface
    is_real = any((directory / made_of).exists() for made_of in ("device", "bonding"))
    try:
        return is_real and (directory / "operstate").read_text().strip() == "up"
    except OSError:
        return False


def _addresses(host: str) -> set[str]:
    """The addresses of ``host``, without the zone of link-local addresses."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_DGRAM)
    except OSError:
        return set()
    return {str(where[4][0]).partition("%")[0] for where in found}


def _addresses_of(interface: str) -> set[str]:
    return {str(address.ip) for address in _addresses_in_networks(interface)}


def _addresses_in_networks(interface: str) -> Iterator[IPv4Interface | IPv6Interface]:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:  # OSError: no IPv4 address
        asked = struct.pack("256s", interface.encode()[:15])
        address, mask = (socket.inet_ntoa(fcntl.ioctl(asker, what, asked)[20:24]) for what in (_SIOCGIFADDR, _SIOCGIFNETMASK))
        yield IPv4Interface((address, mask))
    with suppress(OSError):  # a machine without IPv6
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, _, prefix, *_, name = line.split()
            if name == interface:
                yield IPv6Interface((int(digits, 16), int(prefix, 16)))


def _megabits_per_second(interface: str) -> int:
    """The speed of ``interface``; 0 or less means unknown, as for most virtual interfaces."""
    try:
        return int((_INTERFACES / interface / "speed").read_text())
    except (OSError, ValueError):
        return 0
