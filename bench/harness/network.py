"""The rate of the network itself, measured with plain TCP between neighbours in a ring. All of them send and receive at once.
And the same traffic as a load, beside which computation is slower.

No system under test takes part, so that no system lowers the bound by which it is judged.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import NamedTuple

from commsched import Session, TransportError
from commsched.control.rendezvous import own_host, reached_at
from commsched.core.world import detect_world
from commsched.settings import Settings

from .cluster import BURST_BYTES

#: Bytes that are not counted: the bursts that both ends of a shaped link let through, and the start of TCP.
SKIPPED_BYTES = 4 * BURST_BYTES
#: Number of consecutive stretches of a transfer that are timed separately.
STRETCHES = 3
#: Least number of counted bytes in each stretch. A stretch also counts bytes that the link saved up in a pause, or that waited
#: at the receiver for a packet that was sent again, and the best stretch is one that gained by them. Links of 25 Mbit/s seemed
#: 2 % faster than they are with stretches of 1.6 MB, and 0.2 % with so many bytes.
MIN_BYTES = 32 * BURST_BYTES
#: Counted bytes in each stretch if no rate is known beforehand (loopback).
UNSHAPED_BYTES = 64_000_000

_CHUNK_BYTES = 256 * 1024
#: Bytes of a call that is a load. They are many, because calls of Python would slow down computation more than the bytes do.
_LOAD_BYTES = 1024 * 1024
_NONCE_BYTES = 16
_TIMEOUT_SECONDS = 60.0


def measure_flows(session: Session, host: str, counted_bytes: int, ring: Sequence[int] | None = None) -> list[float]:
    """Bytes per second to each rank of the ring from the one before it. Collective: all ranks of the session call it.

    Other activity of the machine can only slow a link down, and too low a rate would flatter every system. Therefore the best
    of a few stretches counts: the stretch with the greatest median over the ranks.

    Args:
        host: the address at which the others reach this rank.
        counted_bytes: bytes of each stretch, in addition to the bytes skipped at the beginning.
        ring: the ranks that send and receive; None means all.

    Raises:
        TransportError: a neighbour did not connect or sent nothing for a minute; the message names it.
    """
    ring = range(session.world_size) if ring is None else ring
    rates = None
    with ExitStack() as stack:
        flows = _meet(session, host, ring, stack)
        if flows is not None:
            with ThreadPoolExecutor(1, "bench-link") as sender:
                sending = sender.submit(_send, flows.outgoing, SKIPPED_BYTES + STRETCHES * counted_bytes)
                with _failing(session, f"receive from rank {flows.before}"):
                    rates = _receive(flows.incoming, counted_bytes)
                with _failing(session, f"send to rank {flows.behind}"):
                    sending.result()
    return best_stretch([each for each in session.gather(rates) if each is not None])


@contextmanager
def traffic(session: Session, host: str) -> Iterator[None]:
    """In this block the links carry plain TCP in both directions, as fast as they can. Collective.

    Args:
        host: the address at which the others reach this rank.

    Raises:
        TransportError: see :func:`measure_flows`.
    """
    ring = one_of_each_machine(session, host)
    ended = threading.Event()
    with ExitStack() as stack:
        flows = _meet(session, host, ring, stack)
        if flows is None:
            yield
            return
        with ThreadPoolExecutor(2, "bench-link") as pool:
            sending, receiving = pool.submit(_send_until, flows.outgoing, ended), pool.submit(_discard, flows.incoming)
            try:
                yield
            finally:
                ended.set()
            with _failing(session, f"send to rank {flows.behind}"):
                sending.result()
            with _failing(session, f"receive from rank {flows.before}"):
                receiving.result()


def one_of_each_machine(session: Session, host: str) -> list[int]:
    """The first rank on each machine, or all ranks if they are on one machine. Collective.

    A flow between ranks of one machine does not show the rate of its link, and several flows to one machine share it.
    """
    first: dict[str, int] = {}
    for rank, machine in enumerate(session.gather(reached_at(host).machine)):
        first.setdefault(machine, rank)
    return list(first.values()) if len(first) > 1 else list(range(session.world_size))


class _Flows(NamedTuple):
    """The connections of a rank of the ring to the rank behind it and from the rank before it."""

    outgoing: socket.socket
    behind: int
    incoming: socket.socket
    before: int


def _meet(session: Session, host: str, ring: Sequence[int], stack: ExitStack) -> _Flows | None:
    """Connect each rank of the ring with its neighbours; None if this rank is not in it. ``stack`` closes the connections.
    Collective."""
    if session.rank not in ring:
        session.gather(None)
        session.gather("connected")
        return None
    with _failing(session, f"listen at {host}"):
        listener = stack.enter_context(socket.create_server((host, 0)))
    listener.settimeout(_TIMEOUT_SECONDS)
    nonce = secrets.token_hex(_NONCE_BYTES)
    meetings = session.gather([host, listener.getsockname()[1], nonce])
    place = ring.index(session.rank)
    before, behind = ring[place - 1], ring[(place + 1) % len(ring)]
    with _failing(session, f"connect to rank {behind}"):
        outgoing = stack.enter_context(socket.create_connection(tuple(meetings[behind][:2]), _TIMEOUT_SECONDS))
        outgoing.sendall(bytes.fromhex(meetings[behind][2]))
    with _failing(session, f"accept a connection from rank {before}"):
        incoming = stack.enter_context(_accept(listener, bytes.fromhex(nonce)))
    session.gather("connected")
    return _Flows(outgoing, behind, incoming, before)


@contextmanager
def _failing(session: Session, what: str) -> Iterator[None]:
    """Says what this rank could not do when it measured the network."""
    try:
        yield
    except OSError as error:
        raise TransportError(f"rank {session.rank} could not {what} to measure the network: {error}") from error


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


def _send_until(connection: socket.socket, ended: threading.Event) -> None:
    chunk = bytes(_LOAD_BYTES)
    while not ended.is_set():
        connection.sendall(chunk)
    connection.shutdown(socket.SHUT_WR)


def _discard(connection: socket.socket) -> None:
    buffer = bytearray(_LOAD_BYTES)
    while connection.recv_into(buffer, _LOAD_BYTES, socket.MSG_WAITALL):
        pass


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
    system. There is one of each worker; if workers share machines, and there are several machines, one of each machine.

    Separate servers take no part in the measurement. Their rates are inferred from the workers' rates: links that are shaped
    here are made alike, and others are taken to be as fast as the fastest.
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
    job, world = Settings.load({}, os.environ), detect_world(os.environ)
    if job.control is not None:
        return own_host(job, job.control)
    if world.one_machine or "MASTER_ADDR" not in os.environ:
        return "127.0.0.1"
    return own_host(job, f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '0')}")  # torchrun's


def measure_network(
    session: Session,
    host: str,
    nominal_rates: Sequence[float] | None,
    servers: int,
    capped: bool,
    flow_rate: float | None = None,
) -> Network:
    """Measure the rates of the network. Collective.

    Args:
        host: the address at which the others reach this rank.
        nominal_rates: configured rate of each host's link in bytes per second, workers before servers; None means not shaped.
        capped: whether the transport itself keeps to these rates, on a faster network.
        flow_rate: rate of each connection in bytes per second, if links are shaped so. It does not limit what is returned.
    """
    if nominal_rates is None:
        workers = _unknown_rates(session, host)
        return Network(workers, [max(workers)] * servers)
    rates = list(nominal_rates)
    if not capped:
        of_one = [min(rate, flow_rate or rate) for rate in rates[: session.world_size]]
        share = payload_share(measure_flows(session, host, max(MIN_BYTES, round(_LINK_SECONDS * min(of_one)))), of_one)
        rates = [share * rate for rate in rates]
    return Network(rates[: session.world_size], rates[session.world_size :])


def _unknown_rates(session: Session, host: str) -> list[float]:
    flows = measure_flows(session, host, UNSHAPED_BYTES, one_of_each_machine(session, host))
    # A flow has the rate of the slower of two links, so a link is at least as fast as the faster of its two flows.
    return [max(flow, after) for flow, after in zip(flows, [*flows[1:], flows[0]])]
