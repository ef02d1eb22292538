"""Starts and asks witnesses, which keep a busy process from being taken for a dead one: see ``witness.py``."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from ..net.rpc import DaemonExecutor, listen
from . import witness
from .liveness import heartbeat_seconds

log = logging.getLogger("commsched")

Peer = TypeVar("Peer", bound=Hashable)


class Witness:
    """The witness of this process, from construction to :meth:`close`. It ends with this process in any case.

    ``address`` is the ``host:port`` at which others ask it. It is empty if there can be no witness; then heartbeats must
    suffice.
    """

    def __init__(self, host: str) -> None:
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None
        if not sys.executable or getattr(sys, "frozen", False) or not os.path.exists("/proc/self/status"):
            return  # a frozen program is its own interpreter: this would start the program once more
        try:
            with listen(f"{host}:0") as listening:
                command = [sys.executable, "-IS", witness.__file__, str(listening.fileno()), str(os.getpid())]
                no = subprocess.DEVNULL
                fds = [listening.fileno()]
                self._process = subprocess.Popen(command, pass_fds=fds, stdin=no, stdout=no, stderr=no)
                self.address = f"{host}:{listening.getsockname()[1]}"
        except Exception as error:
            log.debug("this process has no witness: %s", error)

    @property
    def process_id(self) -> int | None:
        """The witness's process number; None if there is no witness."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """End the witness. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def process_runs(address: str, within_seconds: float) -> bool:
    """Ask the witness at ``address``. False if it answers no, or does not answer in time."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), within_seconds) as asked:
            answer = b""
            while len(answer) < len(witness.RUNS) and (more := asked.recv(len(witness.RUNS))):
                answer += more
    except (OSError, ValueError):
        return False
    return answer == witness.RUNS


class Doubts(Generic[Peer]):
    """Asks the witnesses of silent peers, each in a thread of its own.

    Args:
        on_runs: called, from such a thread, when a witness reports that the peer's process runs.
    """

    def __init__(self, fail_after_seconds: float, on_runs: Callable[[Peer], None]) -> None:
        self._fail_after_seconds = fail_after_seconds
        self._on_runs = on_runs
        self._executor = DaemonExecutor("commsched-control-doubt")
        self._changed = threading.Condition()  # guards all below
        self._asked: set[Peer] = set()
        self._warn_again_at: dict[Peer, float] = {}
        self._closed = False

    def ask(self, peer: Peer, name: str, address: str) -> None:
        """Ask the witness of the silent ``peer``, unless it is being asked already. Never blocks; any thread."""
        with self._changed:
            if not address or peer in self._asked or self._closed:
                return
            self._asked.add(peer)
        try:
            self._executor.submit(self._ask, peer, name, address)
        except RuntimeError:
            pass  # this was closed meanwhile, or no thread can be started

    def close(self) -> None:
        """Ask no more witnesses. Idempotent; a question in progress ends by itself."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._executor.shutdown(wait=False)

    def _ask(self, peer: Peer, name: str, address: str) -> None:
        runs = process_runs(address, self._fail_after_seconds / 2)
        if runs:
            self._on_runs(peer)
        with self._changed:
            if runs and not self._closed:
                self._warn(peer, name)
            self._changed.wait_for(lambda: self._closed, heartbeat_seconds(self._fail_after_seconds))
            self._asked.discard(peer)

    def _warn(self, peer: Peer, name: str) -> None:
        now = time.monotonic()
        if now >= self._warn_again_at.get(peer, 0.0):
            self._warn_again_at[peer] = now + self._fail_after_seconds
            log.warning(
                "%s does not answer, but its process runs: one call may hold the interpreter's lock for long; waiting for it",
                name,
            )
