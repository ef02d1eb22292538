"""What rank 0 does for a job of many ranks, and what each rank needs: counts, processor time, threads, descriptors and memory.

Three parts. The roster, the pure part of the control channel, runs in virtual time with all heartbeats, until a rank that has
become silent is named. Rank 0's real control channel serves members that are threads of other processes. And jobs of the numpy
plugin, a process for each rank, train. Processor time is that of rank 0's process, or of all processes of a job together; other
load of the machine does not count.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import starmap
from pathlib import Path

from commsched.control.client import ControlClient
from commsched.control.liveness import heartbeat_seconds
from commsched.control.messages import Gather, Member
from commsched.control.server import ControlServer
from tests.control.virtual_job import VirtualJob

from . import members
from .jobs import CONFIGURATIONS, TOKEN, Struck

_ROSTER = (
    "ranks",
    "join: CPU ms",
    "heartbeats/s",
    "their CPU ms/s",
    "gather: CPU ms",
    "MB sent",
    "a silent rank is named after s",
    "",
)
_CHANNEL = (
    "ranks",
    "joined after s",
    "join: CPU s",
    "threads",
    "descriptors",
    "MB",
    "idle: CPU ms/s",
    "heartbeat: CPU us",
    "gather of equal values: CPU ms",
    "of others",
    "message to rank 0: CPU us",
    "announcement to one rank",
)
_JOB = (
    "job",
    "ranks",
    "joined after s",
    "ended after s",
    "CPU s",
    "threads of rank 0, others",
    "descriptors",
    "MB",
    "refused",
    "",
)

_SECONDS = 60.0  # of virtual time
_IDLE_SECONDS = 6.0
_MEMBERS_OF_A_PROCESS = 64


# --- the roster in virtual time ---


def roster(size: int) -> bool:
    """A row; whether the silent rank was named in time, and heartbeats leave most of a core."""
    began = time.process_time()
    job = VirtualJob(size)
    join = time.process_time() - began
    job.received = 0
    began = time.process_time()
    alive = job.pass_time(_SECONDS) is None
    beats, beating = job.received / _SECONDS, (time.process_time() - began) / _SECONDS
    began = time.process_time()
    nbytes = 0
    for rank in range(size):
        for send in job.put(rank, Gather("addresses", f'"10.0.{rank // 256}.{rank % 256}:40000"')):
            nbytes += len(send.connections) * sum(len(value) for _, value in getattr(send.message, "runs", ()))
    gather = time.process_time() - began
    silent_since = job.now
    named_at = job.pass_time(60.0, silent={size - 1})
    named = named_at is not None and str(job.roster.failure).startswith(f"rank {size - 1} ")
    late = (named_at or 0.0) - silent_since
    print(
        f"| {size} | {1e3 * join:.0f} | {beats:.0f} | {1e3 * beating:.1f} | {1e3 * gather:.0f} | {nbytes / 1e6:.2f} | "
        f"{late:.1f} | {'ok' if alive and named else 'FAILS'} |",
        flush=True,
    )
    return alive and named


# --- rank 0's control channel ---


def channel(size: int) -> bool:
    """A row: what ``size`` members cost rank 0's process."""
    threads, files, memory, began, cpu = _threads(), _files(), _memory(), time.monotonic(), time.process_time()
    server = ControlServer("127.0.0.1:0", TOKEN, size, **members.TIMES)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.soak.members", server.address, TOKEN]
            + [str(each) for each in (first, min(_MEMBERS_OF_A_PROCESS, size - first), size)]
        )
        for first in range(1, size, _MEMBERS_OF_A_PROCESS)
    ]
    try:
        client = ControlClient(server.address, TOKEN, Member.rank(0, size), server=server, **members.TIMES)
        client.gather_next("begin")
        joined, cpu_joined = time.monotonic() - began, time.process_time() - cpu
        grown = _threads() - threads, _files() - files, _memory() - memory
        cpu = time.process_time()
        time.sleep(_IDLE_SECONDS)
        idle = (time.process_time() - cpu) / _IDLE_SECONDS

        def spent(act: Callable[[], object]) -> float:
            began = time.process_time()
            act()
            return time.process_time() - began

        client.gather_next("rank 0 was idle")
        equal = spent(lambda: client.gather_next("equal " * 20))
        unequal = spent(lambda: client.gather_next("rank 0's" + "." * 100))
        sent = spent(lambda: client.gather_next("sent")) - equal

        def announce() -> None:
            for _ in range(members.MESSAGES):
                client.announce("scale", "x" * 100)
            client.gather_next("announced")

        announced = spent(announce) - equal
        client.leave()
        client.wait_until_all_left()
        client.close()
    finally:
        server.close()
        for process in processes:
            process.wait(60)
    messages = members.MESSAGES * (size - 1)
    beats = 2 * size / heartbeat_seconds(members.TIMES["fail_after_seconds"], size)
    print(
        f"| {size} | {joined:.1f} | {cpu_joined:.2f} | {grown[0]} | {grown[1]} | {grown[2]:.0f} | {1e3 * idle:.0f} | "
        f"{1e6 * idle / beats:.0f} | {1e3 * equal:.0f} | {1e3 * unequal:.0f} | {1e6 * sent / messages:.0f} | "
        f"{1e6 * announced / messages:.0f} |",
        flush=True,
    )
    return all(process.returncode == 0 for process in processes)


def _threads() -> int:
    return _status("Threads")


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _memory() -> float:
    return _status("VmRSS") / 1024


def _status(name: str, pid: int | str = "self") -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# --- jobs ---


def job(configuration: str, ranks: int, steps: int) -> bool:
    """A row: a job that trains, and what its ranks needed when all were in the middle of it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with Struck(configuration, ranks, [str(steps), "--at", "5"], 10.0) as struck:
        began = time.monotonic()
        started = struck.wait_until_joined()
        joined = time.monotonic() - began
        needs: dict[int, tuple[int, int, int]] = {}
        done = threading.Event()

        def look() -> None:  # the most that each rank has at a time
            while not done.wait(0.5):
                for rank, pid in struck.said.pids.items():
                    try:
                        found = _status("Threads", pid), len(os.listdir(f"/proc/{pid}/fd")), _status("VmRSS", pid) // 1024
                    except (OSError, StopIteration):
                        continue  # it has ended
                    needs[rank] = tuple(map(max, needs.get(rank, found), found))  # type: ignore[assignment]

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        code = struck.wait_until_ended(500.0)
        seconds = time.monotonic() - began
        done.set()
        looking.join()
        weights = set(struck.said.weights.values())
        holds = started and code == 0 and len(weights) == 1 and len(struck.said.weights) == ranks
        again = struck.errors.count("refused a connection")
        why = "ok" if holds else f"FAILS: exit code {code}; {struck.said.raised}; {struck.errors[-300:]}"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    others = [needs[rank] for rank in needs if rank] or [(0, 0, 0)]
    each = " | ".join(f"{of_0}, {max(of)}" for of_0, of in zip(needs.get(0, (0, 0, 0)), zip(*others)))
    print(f"| {configuration} | {ranks} | {joined:.0f} | {seconds:.0f} | {cpu:.0f} | {each} | {again} | {why} |", flush=True)
    return holds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    numbers = {"type": int, "nargs": "*", "metavar": "N"}
    parser.add_argument("--roster", **numbers, default=[64, 512, 4096], help="members in virtual time")
    parser.add_argument("--channel", **numbers, default=[16, 64, 256, 512], help="members of a real control channel")
    parser.add_argument("--job", **numbers, default=[64], help="ranks of a job, each a process")
    some = ["ps tcp", "ps tcp + 1 server", "hierarchy"]
    parser.add_argument("--configurations", nargs="+", default=some, choices=list(CONFIGURATIONS), help="of these jobs")
    parser.add_argument("--steps", type=int, default=50)


def run(args: argparse.Namespace) -> bool:
    """A table for each part; whether all is as promised."""
    rosters, channels = partial(map, roster, args.roster), partial(map, channel, args.channel)
    jobs = partial(starmap, job, ((name, ranks, args.steps) for ranks in args.job for name in args.configurations))
    holds = True
    for columns, sizes, rows in ((_ROSTER, args.roster, rosters), (_CHANNEL, args.channel, channels), (_JOB, args.job, jobs)):
        if sizes:
            print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
            holds &= False not in list(rows())
    return holds
