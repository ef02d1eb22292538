"""Processes that end with the ``with`` block that started them, whatever ends the block.

SIGINT and SIGTERM become exceptions that can be deferred, so that every started process is cleaned up. Signals belong to the
process; therefore their state here is global.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import IO

_deferrals = 0
_pending: int | None = None


@contextmanager
def signals_handled() -> Iterator[None]:
    """In this block SIGINT raises KeyboardInterrupt and SIGTERM raises SystemExit(143), except inside :func:`signals_deferred`.

    Outside the main thread it does nothing, because Python delivers signals to the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """A signal that arrives in this block is raised at the end of the block. Use it for steps that must not be interrupted."""
    global _deferrals, _pending
    _deferrals += 1
    try:
        yield
    finally:
        _deferrals -= 1
        if _deferrals == 0 and _pending is not None:
            number, _pending = _pending, None
            _raise(number)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _pending
    if _deferrals:
        _pending = _pending or number
    else:
        _raise(number)


def _raise(number: int) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


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
        with signals_deferred():
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
        with signals_deferred():
            self.stop()
