"""Ports: those that the system gives out, and free ones for processes that will listen later."""

from __future__ import annotations

import errno
import secrets
import socket
from pathlib import Path

_LOWEST = 20_000


def given_out() -> tuple[int, int]:
    """The first and the last of the ports that the system gives to connections, and to whoever listens at any free port."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:
        return 32768, 65535
    return low, high


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which a process may listen later, at ``host``, an address of this machine. It is none of those that the system
    itself gives out: a connection might get it before that. Ray gives ports from 10,002 to 19,999 to its workers.

    Raises:
        OSError: the address is not this machine's.
    """
    low, high = given_out()
    ports = [port for port in range(_LOWEST, 65536) if not low <= port <= high] or range(_LOWEST, 65536)
    while True:
        port = secrets.choice(ports)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        return port
