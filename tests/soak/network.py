"""Networks that fail: links that swallow everything, for good or for a while, slow links, and bits that flip on the way.

Links are those of network namespaces on this machine (EMULATED), so it needs root; bits flip in a relay on loopback.
"""

from __future__ import annotations

import argparse
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from bench.harness.cluster import Cluster
from tests.jobs.job import clean_environ

from .jobs import TOKEN, all_hold, by_hand, end, start_by_hand

FAIL_AFTER = 3.0
#: Settings of two ranks on two hosts.
WAYS = {
    "ps tcp": {"COMMSCHED_TRANSPORT": "ps"},
    "ps grpc": {"COMMSCHED_TRANSPORT": "ps", "COMMSCHED_LANE": "grpc"},
    "gloo": {"COMMSCHED_TRANSPORT": "gloo"},
}


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Hosts:
    """Two hosts with a rank each; the second can be cut off."""

    def __init__(self, cluster: Cluster) -> None:
        self._bridge = cluster.namespace("b").replace("host-b", "bridge")
        self.prefixes = [["ip", "netns", "exec", cluster.namespace(host)] for host in ("a", "b")]
        self.addresses = [cluster.address(host) for host in ("a", "b")]

    def cut(self) -> None:
        """Frames to and from the second host vanish; nobody is told."""
        _ip("-n", self._bridge, "link", "set", "port2", "nomaster")

    def heal(self) -> None:
        _ip("-n", self._bridge, "link", "set", "port2", "master", "bridge")


def _with_hosts(way: str, rate: str | None, act: Callable[[Hosts], None], steps: int) -> tuple[int, str, float]:
    """Train, ``act`` once both ranks are in the middle of it: exit code, what was said, seconds since."""
    with Cluster(["a", "b"], rate) as cluster:
        hosts = Hosts(cluster)
        environ = {"COMMSCHED_CONTROL": f"{hosts.addresses[0]}:29600", "COMMSCHED_FAIL_AFTER": str(FAIL_AFTER), **WAYS[way]}
        ranks = start_by_hand([str(steps), "--at", "50"], prefixes=hosts.prefixes, hosts=hosts.addresses, **environ)
        try:
            heard = ""
            for rank in ranks:
                assert rank.stdout is not None
                for line in rank.stdout:
                    heard += line
                    if "reached" in line or "raised" in line:
                        break
            began = time.monotonic()
            act(hosts)
            code, said = end(ranks, 120)
            return code, heard + said, time.monotonic() - began
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def black_hole(way: str) -> str | None:
    code, said, seconds = _with_hosts(way, None, Hosts.cut, 10_000_000)
    raised = dict(re.findall(r"^(\d) raised (.*)", said, re.M))
    named = [str(1 - int(rank)) in re.findall(r"rank (\d)", text)[:1] for rank, text in raised.items()]
    if code in (0, 124) or len(raised) < 2 or not all(named):
        return f"exit code {code} after {seconds:.1f} s; {raised or said[-300:]}"
    return None if seconds < FAIL_AFTER + 4 else f"it took {seconds:.1f} s"


def cut_and_heal(way: str) -> str | None:
    def act(hosts: Hosts) -> None:
        hosts.cut()
        time.sleep(FAIL_AFTER / 2)
        hosts.heal()

    return _exact(_with_hosts(way, None, act, 1000))


def slow_link(way: str) -> str | None:
    return _exact(_with_hosts(way, "10mbit", lambda hosts: None, 120))


def _exact(ended: tuple[int, str, float]) -> str | None:
    code, said, _ = ended
    weights = re.findall(r"^\d weights (\w+)", said, re.M)
    return None if code == 0 and len(weights) == 2 and len(set(weights)) == 1 else f"exit code {code}: {said[-300:]}"


class Relay:
    """Passes bytes on between workers and a parameter server, and flips a bit of what goes one way after ``after`` bytes."""

    def __init__(self, target: str, after: int, from_server: bool) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._after, self._from_server = after, from_server
        self.flipped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            for source, sink, flips in ((client, server, not self._from_server), (server, client, self._from_server)):
                threading.Thread(target=self._pass, args=(source, sink, flips), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, flips: bool) -> None:
        passed = 0
        try:
            while data := source.recv(2**16):
                if flips and passed <= self._after < passed + len(data) and not self.flipped.is_set():
                    self.flipped.set()
                    changed = bytearray(data)
                    changed[self._after - passed] ^= 4
                    data = bytes(changed)
                passed += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for end_ in (source, sink):
                end_.close()


def flipped_bit(lane: str, after: int, from_server: bool) -> str | None:
    environ = clean_environ(COMMSCHED_TOKEN=TOKEN, COMMSCHED_LANE=lane)
    server = subprocess.Popen(
        [sys.executable, "-m", "commsched", "server", "--bind", "127.0.0.1:0"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    relay = Relay(server.stdout.readline().rsplit(" ", 1)[1].strip(), after, from_server)
    try:
        code, said = by_hand(["200"], COMMSCHED_SERVERS=relay.address, COMMSCHED_LANE=lane)
    finally:
        relay.close()
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=20)
    if not relay.flipped.is_set():
        return "no bit was flipped"
    if code == 0:
        return f"nobody noticed: {said[-300:]}"
    raised = re.findall(r"raised (.*)", said)
    return None if raised and all("rank" in text or "server" in text for text in raised) else f"exit code {code}: {said[-300:]}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flips", type=int, default=5, help="for each lane and direction")


def run(args: argparse.Namespace) -> bool:
    """A row for each; whether all is as promised."""
    trials: dict[str, Callable[[], str | None]] = {}
    for way in WAYS:
        trials[f"black hole, {way}"] = partial(black_hole, way)
        trials[f"cut for {FAIL_AFTER / 2:g} s and healed, {way}"] = partial(cut_and_heal, way)
        trials[f"10 Mbit/s, {way}"] = partial(slow_link, way)
    for lane in ("tcp", "grpc"):
        for flip in range(args.flips):
            after = 20_000 + 7_919 * flip
            trials[f"bit of byte {after} to a server, {lane}"] = partial(flipped_bit, lane, after, False)
            trials[f"bit of byte {after} from a server, {lane}"] = partial(flipped_bit, lane, after, True)
    return all_hold("network fault", trials)
