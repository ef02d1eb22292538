"""The rate of the network itself, measured with plain TCP between neighbours in a ring. All ranks send and receive at once.

No system under test takes part, so that no system lowers the bound by which it is judged.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from commsched import Session, TransportError
from commsched.control.rendezvous import own_host
from commsched.settings import Settings

from .cluster import BURST_BYTES

#: Bytes that are not counted: the bursts that both ends of a shaped link let through, and the start of TCP.
SKIPPED_BYTES = 4 * BURST_BYTES
#: Number of consecutive stretches of a transfer that are timed separately.
STRETCHES = 3
#: Least number of counted bytes in each stretch; fewer would measure single reads.
MIN_BYTES = 1_000_000
#: Counted bytes in each stretch if no rate is known beforehand (loopback).
UNSHAPED_BYTES = 64_000_000

_CHUNK_BYTES = 256 * 1024
_NONCE_BYTES = 16
_TIMEOUT_SECONDS = 60.0


def measure_flows(session: Session, host: str, counted_bytes: int) -> list[float]:
    """Bytes per second to each rank from its predecessor in the ring (rank - 1), by rank. Collective.

    Other activity of the machine can only slow a link down, and too low a rate would flatter every system. Therefore the best
    of a few stretches counts: the stretch with the greatest median over the ranks.

    Args:
        host: the address at which the others reach this rank.
        counted_bytes: bytes of each stretch, in addition to the bytes skipped at the beginning.

    Raises:
        TransportError: a neighbour did not connect or sent nothing for a minute; the message names both neighbours.
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
    """The share of a link's nominal rate that is payload, from :func:`measure_flows` and each rank's nominal rate.

    A flow passes two links and shows the rate of the slower one. The result is the median, because a disturbed flow carries no
    information.
    """
    return median(flow / min(nominal_rates[rank - 1], nominal_rates[rank]) for rank, flow in enumerate(flows))


def _accept(listener: socket.socket, nonce: bytes) -> socket.socket:
    """Accept the connection that sends the nonce; all others are closed."""
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
    """Bytes per second of each stretch, after the skipped bytes."""
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


_LINK_SECONDS = 0.5
_MESSAGE_SECONDS = 0.05  # transfer time of the bytes that measure the cost of messages
_MESSAGE_BYTES = (1_000_000, 16_000_000)


@dataclass(frozen=True)
class Network:
    """The rates of the network, the same on every rank. A rate is the payload in bytes per second of a host's link, for every
    system.

    Separate servers take no part in the measurement. Their rates are inferred from the workers' rates, because all links are
    made alike.
    """

    worker_rates: list[float]
    server_rates: list[float]

    @property
    def message_bytes(self) -> int:
        """Number of bytes to send when measuring the cost of messages."""
        least, most = _MESSAGE_BYTES
        return max(least, min(most, round(_MESSAGE_SECONDS * min(self.worker_rates + self.server_rates))))


def own_address() -> str:
    """The address at which the other ranks reach this one."""
    job = Settings.load({}, os.environ)
    return "127.0.0.1" if job.control is None else own_host(job, job.control)


def measure_network(session: Session, host: str, nominal_rates: Sequence[float] | None, servers: int, capped: bool) -> Network:
    """Measure the rates of the network. Collective.

    Args:
        host: the address at which the others reach this rank.
        nominal_rates: configured rate of each host's link in bytes per second, workers before servers; None means not shaped.
        capped: whether the transport itself keeps to these rates, on a faster network.
    """
    if capped and nominal_rates:
        rates = list(nominal_rates)
    else:
        rates = _host_rates(session, host, nominal_rates, servers)
    return Network(rates[: session.world_size], rates[session.world_size :])


def _host_rates(session: Session, host: str, nominal: Sequence[float] | None, servers: int) -> list[float]:
    if nominal is None:
        return [median(measure_flows(session, host, UNSHAPED_BYTES))] * (session.world_size + servers)
    flows = measure_flows(session, host, max(MIN_BYTES, round(_LINK_SECONDS * min(nominal))))
    share = payload_share(flows, nominal[: session.world_size])
    return [share * rate for rate in nominal]
