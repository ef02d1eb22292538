"""The rate of the network itself: plain TCP between neighbours in a ring, all ranks sending and receiving at once.

No system under test has a part in it, so that none lowers the bar it is judged by.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from commsched.core.errors import TransportError

from ..cluster import BURST_BYTES

if TYPE_CHECKING:
    from commsched.session import Session

#: Not counted: what both ends of a shaped link let through at once, and the start of TCP.
SKIPPED_BYTES = 4 * BURST_BYTES
#: Stretches of a transfer that are timed by themselves, one after another.
STRETCHES = 3
#: Of those counted in each: fewer would measure single reads.
LEAST_BYTES = 1_000_000
#: Counted in each, where no rate is known beforehand (loopback).
UNSHAPED_BYTES = 64_000_000

_CHUNK_BYTES = 256 * 1024
_NONCE_BYTES = 16
_TIMEOUT_SECONDS = 60.0


def measure_flows(session: Session, host: str, counted_bytes: int) -> list[float]:
    """Bytes per second from each rank's predecessor in the ring (rank - 1) to it, by rank. Collective.

    What else the machine does only ever takes from a link, and a rate that is too low would flatter every system, so the best
    of a few stretches counts: that with the greatest median over the ranks.

    Args:
        host: the address at which the others reach this rank.
        counted_bytes: of each stretch, beyond those at the beginning that are skipped.

    Raises:
        TransportError: a neighbour did not connect, or sent nothing for a minute; names it.
    """
    successor = (session.rank + 1) % session.world_size
    predecessor = (session.rank - 1) % session.world_size
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((host, 0)))
        listener.settimeout(_TIMEOUT_SECONDS)
        nonce = secrets.token_hex(_NONCE_BYTES)
        meetings = session.gather([host, listener.getsockname()[1], nonce])
        try:
            outgoing = stack.enter_context(socket.create_connection(tuple(meetings[successor][:2]), _TIMEOUT_SECONDS))
            outgoing.sendall(bytes.fromhex(meetings[successor][2]))
            incoming = stack.enter_context(_accept(listener, bytes.fromhex(nonce)))
            session.gather("connected")
            with ThreadPoolExecutor(1, "bench-link") as sender:
                sending = sender.submit(_send, outgoing, SKIPPED_BYTES + STRETCHES * counted_bytes)
                rates = _receive(incoming, counted_bytes)
                sending.result()
        except OSError as error:
            raise TransportError(
                f"rank {session.rank} could not measure the link from rank {predecessor} and to rank {successor}: {error}"
            ) from error
    return best_stretch(session.gather(rates))


def best_stretch(rates_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """The rates of all ranks in the stretch with the greatest median."""
    return list(max(zip(*rates_by_rank, strict=True), key=median))


def payload_share(flows: Sequence[float], nominal_rates: Sequence[float]) -> float:
    """How much of a link's nominal rate is payload, from :func:`measure_flows` and each rank's nominal rate.

    Of two links in a row, the slower one is what a flow shows. The median, since a flow that was disturbed tells nothing.
    """
    return median(flow / min(nominal_rates[rank - 1], nominal_rates[rank]) for rank, flow in enumerate(flows))


def _accept(listener: socket.socket, nonce: bytes) -> socket.socket:
    """The connection that shows the nonce; a stranger's is closed."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(_TIMEOUT_SECONDS)
        if secrets.compare_digest(connection.recv(len(nonce), socket.MSG_WAITALL), nonce):
            return connection
        connection.close()


def _send(connection: socket.socket, total_bytes: int) -> None:
    chunk = memoryview(bytes(_CHUNK_BYTES))
    left = total_bytes
    while left > 0:
        connection.sendall(chunk[: min(left, len(chunk))])
        left -= len(chunk)


def _receive(connection: socket.socket, counted_bytes: int) -> list[float]:
    """Bytes per second of each stretch, after those skipped."""
    buffer = bytearray(_CHUNK_BYTES)
    began, rates = 0.0, []
    for wanted in [SKIPPED_BYTES, *[counted_bytes] * STRETCHES]:
        received = 0
        while received < wanted:
            count = connection.recv_into(buffer, min(len(buffer), wanted - received))
            if count == 0:
                raise ConnectionError(f"the connection ended {wanted - received} bytes too early")
            received += count
        now = perf_counter()
        rates.append(wanted / (now - began))
        began = now
    return rates[1:]
