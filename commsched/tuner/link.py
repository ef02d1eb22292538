"""The network that a rank uses, in words: so that what was tuned on one is not used on another."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's address
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_INTERFACES = Path("/sys/class/net")


def describe_link(host: str, rate: float | None = None) -> str:
    """``loopback``, or the interface with the address ``host`` (a name or an address of this machine) and its speed where the
    system knows it: ``eth0, 10000 Mb/s``. The same at each call on one machine.

    What shapes traffic beyond the interface (``tc``, switches) is not seen, but ``rate``, the setting, in bytes per second.
    """
    text = _describe(host)
    return text if rate is None else f"{text}, at most {rate * 8 / 1e6:g} Mb/s"


def _describe(host: str) -> str:
    addresses = _addresses(host)
    if any(ip_address(address).is_loopback for address in addresses):
        return "loopback"
    for _, interface in socket.if_nameindex():
        if addresses & _addresses_of(interface):
            speed = _megabits_per_second(interface)
            return f"{interface}, {speed} Mb/s" if speed > 0 else interface
    return "unknown"


def _addresses(host: str) -> set[str]:
    """Without the zone of link-local ones."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_DGRAM)
    except OSError:
        return set()
    return {str(where[4][0]).partition("%")[0] for where in found}


def _addresses_of(interface: str) -> set[str]:
    found = set()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:  # OSError: it has none
        answer = fcntl.ioctl(asker, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.add(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):  # a machine without IPv6
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            if name == interface:
                found.add(str(ip_address(int(digits, 16))))
    return found


def _megabits_per_second(interface: str) -> int:
    """0 or less: not known, as of most virtual interfaces."""
    try:
        return int((_INTERFACES / interface / "speed").read_text())
    except (OSError, ValueError):
        return 0
