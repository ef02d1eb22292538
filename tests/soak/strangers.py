"""Processes that have no token: garbage, silence and many connections, at every port of a job. The job trains exactly."""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tests.jobs.job import clean_environ, listening

from .jobs import TOKEN, Struck, all_hold, by_hand, end, free_address, start_by_hand

HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def openings(rng: random.Random) -> bytes:
    """What a stranger says first."""
    kinds = (
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),  # TLS
        HTTP2,
        HTTP2 + rng.randbytes(100),
        HTTP2 + struct.pack(">I", 2**24 - 1)[1:] + rng.randbytes(20),
        b"CSPS" + rng.randbytes(rng.randrange(60)),
        b"CSHS" + rng.randbytes(rng.randrange(60)),
        rng.randbytes(rng.randrange(1, 5000)),
        b"\0" * rng.randrange(1, 5000),
    )
    return rng.choice(kinds)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextmanager
def silent(port: int, count: int) -> Iterator[None]:
    """``count`` connections that stay and say nothing; fewer, if no more are taken."""
    with ExitStack() as stack:
        for _ in range(count):
            try:
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 2))
            except OSError:
                break
        yield


@contextmanager
def crowd(port: int, count: int) -> Iterator[None]:
    """``count`` connections that say nothing; each comes back as soon as it is ended."""
    ended = threading.Event()

    def stand() -> None:
        while not ended.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), 2) as stranger:
                    stranger.settimeout(0.5)
                    while not ended.is_set():
                        try:
                            if not stranger.recv(100):
                                break
                        except TimeoutError:
                            continue
            except OSError:
                ended.wait(0.02)

    threads = [threading.Thread(target=stand, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1)  # until they stand there
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(5)


def garbage(name: str, connections: int, seed: int) -> str | None:
    """Strangers at every port of a running job. What is wrong; None: nothing."""
    rng = random.Random(seed)
    with Struck(name, 2, ["4000", "--at", "20"]) as job:
        if not (job.wait_until_joined() and job.wait_until_reached(0)):
            return f"it did not start: {job.errors[-300:]}"
        pids = [*job.said.pids.values(), *job.servers()]
        ports = sorted({port for pid in pids for _, port in listening(pid)})
        before = {pid: descriptors(pid) for pid in pids}
        for _ in range(connections):
            with socket.socket() as stranger:
                stranger.settimeout(2)
                try:
                    stranger.connect(("127.0.0.1", rng.choice(ports)))
                    stranger.sendall(openings(rng))
                    if rng.random() < 0.3:
                        stranger.recv(100)
                except OSError:
                    continue
        time.sleep(6)  # a handshake's limit
        grown = {pid: descriptors(pid) - count for pid, count in before.items() if Path(f"/proc/{pid}").exists()}
        code = job.wait_until_ended(180)
        weights = set(job.said.weights.values())
    if code != 0 or len(weights) != 1:
        return f"exit code {code}, raised {job.said.raised}, {job.errors[-300:]}"
    if any(growth > 8 for growth in grown.values()):
        return f"descriptors stay open: {sorted(grown.values())}"
    return None


def handshakes(lane: str, strangers: int) -> str | None:
    """Silent strangers fill a parameter server before its workers come."""
    environ = clean_environ(COMMSCHED_TOKEN=TOKEN, COMMSCHED_LANE=lane)
    server = subprocess.Popen(
        [sys.executable, "-m", "commsched", "server", "--bind", "127.0.0.1:0"], env=environ, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().rsplit(" ", 1)[1].strip()
        with crowd(int(address.rpartition(":")[2]), strangers):
            began = time.monotonic()
            code, said = by_hand(["60"], COMMSCHED_SERVERS=address, COMMSCHED_LANE=lane)
            seconds = time.monotonic() - began
        return (
            None if code == 0 else f"with {strangers} strangers the job ended with {code} after {seconds:.0f} s: {said[-300:]}"
        )
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(10)
        assert server.stdout is not None
        server.stdout.close()


def idle_control(strangers: int) -> str | None:
    """More idle connections at the control port than rank 0 may have descriptors."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))

    control = free_address()
    ranks = start_by_hand(["3000", "--at", "20"], before=limit, COMMSCHED_CONTROL=control, COMMSCHED_HOST="127.0.0.1")
    try:
        out = ranks[0].stdout
        assert out is not None
        for line in out:
            if "reached" in line:
                break
        with silent(int(control.rpartition(":")[2]), strangers):
            code, said = end(ranks)
        return None if code == 0 else f"{strangers} idle connections end the job: {said[-300:]}"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--connections", type=int, default=600, help="for each configuration")
    parser.add_argument("--seed", type=int, default=1)


def run(args: argparse.Namespace) -> bool:
    """A line for each attack; whether the job survives all of them."""
    attacks: dict[str, Callable[[], str | None]] = {
        **{f"garbage, {name}": partial(garbage, name, args.connections, args.seed) for name in ("ps tcp", "ps grpc", "gloo")},
        **{
            f"{count} silent strangers who come back, {lane} server": partial(handshakes, lane, count)
            for lane in ("tcp", "grpc")
            for count in (64, 400)
        },
        "1000 idle connections at the control port, 512 descriptors": partial(idle_control, 1000),
    }
    return all_hold("attack", attacks)
