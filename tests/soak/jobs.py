"""Jobs that are struck while they run: how each is started, what its ranks say, and whether what happened is as promised."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.jobs.job import ROOT, clean_environ, gone

RANK = ROOT / "tests" / "soak" / "rank.py"

#: The secret of jobs that are started by hand.
TOKEN = "soak" * 16

#: Name -> options of ``commsched run``. ``mpi`` is started by mpiexec.
CONFIGURATIONS: Mapping[str, tuple[str, ...]] = {
    "ps tcp": ("--transport", "ps", "--hierarchy", "off"),
    "ps tcp, 3 flows": ("--transport", "ps", "--hierarchy", "off", "--flows", "3"),
    "ps grpc": ("--transport", "ps", "--lane", "grpc"),
    "ps tcp + 1 server": ("--transport", "ps", "--servers", "1"),
    "ps grpc + 2 servers": ("--transport", "ps", "--lane", "grpc", "--servers", "2"),
    "gloo": ("--transport", "gloo"),
    "gloo static": ("--transport", "gloo", "--order", "static"),
    "hierarchy": ("--transport", "ps", "--hierarchy", "on"),
    "mpi": (),
}


@dataclass
class Said:
    """What the ranks of a job have said so far."""

    pids: dict[int, int] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    weights: dict[int, str] = field(default_factory=dict)
    raised: dict[int, str] = field(default_factory=dict)


class Struck:
    """A job in the background; leaving the block ends all of it.

    Args:
        name: a key of ``CONFIGURATIONS``.
        ranks: how many.
        arguments: of ``rank.py``.
        fail_after: seconds.
    """

    def __init__(self, name: str, ranks: int, arguments: Sequence[str], fail_after: float = 2.0, **environ: str) -> None:
        self.name = name
        self.ranks = ranks
        self.said = Said()
        self.errors = ""
        self.started_at = 0.0
        self._directory = Path(tempfile.mkdtemp(prefix="commsched-soak-"))
        command = [sys.executable, str(RANK), *arguments]
        settings = {"COMMSCHED_FAIL_AFTER": str(fail_after), "COMMSCHED_JOIN_WITHIN": str(max(20, 4 * ranks)), **environ}
        if name == "mpi":
            mpiexec = str(Path(sys.executable).parent / "mpiexec")
            self._command = [mpiexec, "-n", str(ranks), *command]
            settings |= {"COMMSCHED_TRANSPORT": "mpi", "COMMSCHED_HIERARCHY": "off"}
            settings |= {"COMMSCHED_RENDEZVOUS": str(self._directory / "control.json")}
        else:
            launcher = [sys.executable, "-m", "commsched", "run", "-n", str(ranks)]
            self._command = [*launcher, *CONFIGURATIONS[name], "--", *command]
        self._environ = clean_environ(**settings)
        self._changed = threading.Condition()

    def __enter__(self) -> Struck:
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            ["env", "--default-signal=HUP,INT,TERM", *self._command],
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read_out, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self.said.pids.values(), *self.servers()]:
            _kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        for reader in self._readers:
            reader.join(5)
        shutil.rmtree(self._directory, ignore_errors=True)

    def wait_until_joined(self) -> bool:
        return self._wait_for(lambda: len(self.said.pids) == self.ranks)

    def wait_until_reached(self, rank: int) -> bool:
        return self._wait_for(lambda: rank in self.said.reached)

    def wait_until_ended(self, timeout_seconds: float) -> int | None:
        """The launcher's exit code; None: it still runs."""
        try:
            code = self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        for reader in self._readers:
            reader.join(5)
        return code

    def servers(self) -> list[int]:
        """Process ids of parameter servers."""
        return [pid for pid in _children(self.process.pid) if b"server" in _command_line(pid)]

    def left_over(self, ranks: Iterable[int], within_seconds: float = 3.0) -> list[int]:
        """Those of ``ranks`` that still run after that long."""
        deadline = time.monotonic() + within_seconds
        pids = {rank: self.said.pids[rank] for rank in ranks if rank in self.said.pids}
        return [rank for rank, pid in pids.items() if not gone(pid, max(0.05, deadline - time.monotonic()))]

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            match = re.match(r"(\d+) (pid|reached|weights|raised) (.*)", line)
            if match is None:
                continue
            rank, what, rest = int(match[1]), match[2], match[3]
            with self._changed:
                if what == "pid":
                    self.said.pids[rank] = int(rest)
                elif what == "reached":
                    self.said.reached.add(rank)
                elif what == "weights":
                    self.said.weights[rank] = rest
                else:
                    self.said.raised[rank] = rest
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors = (self.errors + line)[-20_000:]

    def _wait_for(self, condition: object) -> bool:
        assert callable(condition)
        timeout_seconds = max(60.0, 4.0 * self.ranks)  # many processes on few cores take long to start
        with self._changed:
            return bool(
                self._changed.wait_for(lambda: condition() or not self._readers[0].is_alive(), timeout_seconds) and condition()
            )


def culprit(message: str) -> str | None:
    """The process that an error names first: "rank 1", "server 0"; None: it names none."""
    match = re.search(r"\b(rank|server) (\d+)\b", message)
    return None if match is None else f"{match[1]} {match[2]}"


def strike(pid: int, number: int) -> bool:
    """Send a signal; whether there was somebody to get it."""
    return _kill(pid, number)


def _kill(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
        return True
    except ProcessLookupError:
        return False


def _children(parent: int) -> list[int]:
    """All descendants."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, todo = [], [parent]
    while todo:
        children = [pid for pid, its_parent in parents.items() if its_parent == todo[-1]]
        todo.pop()
        found += children
        todo += children
    return found


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def all_hold(heading: str, trials: Mapping[str, Callable[[], str | None]]) -> bool:
    """Run each of ``trials``, which says what is wrong, and print a row for it; whether none said anything."""
    print(f"| {heading} | seconds | |\n|---|---|---|")
    holds = True
    for name, trial in trials.items():
        began = time.monotonic()
        why = trial()
        holds &= why is None
        print(f"| {name} | {time.monotonic() - began:.1f} | {'ok' if why is None else f'FAILS: {why}'} |", flush=True)
    return holds


# --- ranks that no launcher starts ---


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def by_hand(arguments: Sequence[str], **environ: str) -> tuple[int, str]:
    """Two ranks on loopback, to their end."""
    return end(start_by_hand(arguments, COMMSCHED_CONTROL=free_address(), COMMSCHED_HOST="127.0.0.1", **environ))


def start_by_hand(
    arguments: Sequence[str],
    *,
    prefixes: Sequence[Sequence[str]] = ((), ()),
    hosts: Sequence[str] = (),
    before: Callable[[], None] | None = None,
    **environ: str,
) -> list[subprocess.Popen[str]]:
    """A rank for each of ``prefixes``, which stand before its command; ``hosts``: the address of each."""
    settings = {"COMMSCHED_TOKEN": TOKEN, "COMMSCHED_TRANSPORT": "ps", "COMMSCHED_JOIN_WITHIN": "30", **environ}
    started = []
    for rank, prefix in enumerate(prefixes):
        world = {"RANK": str(rank), "WORLD_SIZE": str(len(prefixes)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own = {"COMMSCHED_HOST": hosts[rank]} if hosts else {}
        started.append(
            subprocess.Popen(
                [*prefix, sys.executable, "-m", "tests.soak.rank", *arguments],
                env=clean_environ(**settings, **world, **own),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=before,
            )
        )
    return started


def end(ranks: Sequence[subprocess.Popen[str]], timeout_seconds: float = 90.0) -> tuple[int, str]:
    """The greatest exit code, and all that they said; 124: they did not end."""
    said: list[str] = []
    deadline = time.monotonic() + timeout_seconds
    try:
        for rank in ranks:
            said.append(rank.communicate(timeout=max(0.1, deadline - time.monotonic()))[0])
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.kill()
            rank.wait()
        return 124, "it did not end"
    return max(abs(rank.returncode) for rank in ranks), "".join(said)
