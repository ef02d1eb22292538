"""Processes that end with the ``with`` block that started them, whatever ends the block."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from . import termination

#: Number of bytes of a process's output that an error message quotes.
_TAIL_BYTES = 2000


class JobFailed(Exception):
    """A process of a benchmark failed or took too long; the message ends with the end of its output."""


@dataclass(frozen=True, eq=False)
class Process:
    """A process started by :class:`Processes`. ``name`` is used in messages."""

    name: str
    popen: subprocess.Popen[bytes]
    errors: IO[bytes]
    pidfd: int  # becomes readable when the process ends

    @property
    def pid(self) -> int:
        return self.popen.pid

    def first_line(self, timeout_seconds: float) -> str:
        """The first line that the process prints.

        Raises:
            JobFailed: the process ended without a line, or printed none within ``timeout_seconds``.
        """
        assert self.popen.stdout is not None, "started without says_line"
        line = b""
        deadline = time.monotonic() + timeout_seconds
        while not line.endswith(b"\n"):
            readable = select.select([self.popen.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not readable:
                raise JobFailed(f"{self.name} printed no line within {timeout_seconds:g} s{self.tail()}")
            if not (character := os.read(self.popen.stdout.fileno(), 1)):
                raise JobFailed(f"{self.name} ended without printing a line{self.tail()}")
            line += character
        return line.decode(errors="replace").rstrip("\n")

    def tail(self) -> str:
        """The end of the process's output, to append to a message."""
        self.errors.seek(0)
        text = self.errors.read()[-_TAIL_BYTES:].decode(errors="replace").strip()
        return f":\n{text}" if text else ""


class Processes:
    """Starts processes. When the block ends, it kills the processes that still run, with their children.

    Each process leads a session of its own, so that a signal from the terminal reaches only the benchmark. Not thread-safe.
    """

    def __init__(self) -> None:
        self._all: list[Process] = []

    def start(self, name: str, argv: Sequence[str], environ: Mapping[str, str], says_line: bool = False) -> Process:
        """Start ``argv``. Its output is kept for messages. With ``says_line``, its stdout is kept for
        :meth:`Process.first_line` instead."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        with termination.deferred():
            popen = subprocess.Popen(
                argv,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if says_line else errors,
                stderr=errors,
                start_new_session=True,
            )
            process = Process(name, popen, errors, os.pidfd_open(popen.pid))
            self._all.append(process)
        return process

    def wait(self, wanted: Sequence[Process], timeout_seconds: float) -> None:
        """Return when each of ``wanted`` has ended with code 0.

        Raises:
            JobFailed: any process of this object ended with another code, or ``timeout_seconds`` passed; the message names the
                process.
        """
        deadline = time.monotonic() + timeout_seconds
        running = {process.pidfd: process for process in self._all}
        waiting = set(wanted)
        while waiting:
            ended = select.select(list(running), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ended:
                late = min(waiting, key=self._all.index)
                raise JobFailed(f"{late.name} did not end within {timeout_seconds:g} s{late.tail()}")
            for pidfd in ended:
                process = running.pop(pidfd)
                if code := process.popen.wait():
                    how = f"ended with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
                    raise JobFailed(f"{process.name} {how}{process.tail()}")
                waiting.discard(process)

    def stop(self) -> None:
        """Kill all processes that still run, including their children. Idempotent."""
        for process in self._all:
            if process.popen.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._all:
            process.popen.wait()
            if process.popen.stdout is not None:
                process.popen.stdout.close()
            process.errors.close()
            os.close(process.pidfd)
        self._all.clear()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with termination.deferred():
            self.stop()
