"""The trials of a search, kept in a file so that a restarted job continues where it was.

JSON lines, each flushed to the disk before the next trial begins::

    {"schema": 1, "key": {...}, "phase": "search", "trial": 3, "config": {...}, "status": "ok", "seconds": 0.41,
     "error_seconds": 0.004, "steps": 10, "rejected": 0, "took_seconds": 5.4, "spent_steps": 13,
     "why": null}

``phase`` is "search", or "compare" for the windows of the comparison at the end. A failed trial has the status "failed", the
reason in ``why``, and no seconds. ``trial`` counts all trials of both phases. Once tuning has ended, a line of the phase
"verdict" holds the fields of ``result.Verdict`` and its ``sentence``. A line of the phase "restart" invalidates the lines
before it. If a job trains several models in turn, one file holds the lines of all of them, under different keys.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from ..core.errors import ConfigError, error_text
from ..core.scheduler import SchedulerConfig
from .result import Verdict
from .trials import Window

SCHEMA = 1
_BEGINNING = b'{"schema": '

_open_here: set[str] = set()  # paths of journals: the file lock excludes other processes only
_open_here_lock = threading.Lock()

Phase = Literal["search", "compare"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One window, or the reason why there is none (``why``). ``took_seconds`` is the time since the previous trial.
    ``spent_steps`` is the number of steps that count against the budget, including those that the window left out."""

    phase: Phase
    config: SchedulerConfig
    window: Window | None
    took_seconds: float
    spent_steps: int
    why: str | None = None

    def to_record(self) -> dict[str, Any]:
        window = self.window
        return {
            "phase": self.phase,
            "config": self.config.to_record(),
            "status": "ok" if window is not None else "failed",
            "seconds": window and window.seconds,
            "error_seconds": window and window.error_seconds,
            "steps": window and window.steps,
            "rejected": window and window.rejected,
            "took_seconds": self.took_seconds,
            "spent_steps": self.spent_steps,
            "why": self.why,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trial:
        window = None
        if record["status"] == "ok":
            seconds, error = float(record["seconds"]), float(record["error_seconds"])
            window = Window(seconds, error, int(record["steps"]), int(record["rejected"]))
            if (defect := window.defect()) is not None:
                raise ValueError(defect)
        config = SchedulerConfig(**record["config"])
        return cls(record["phase"], config, window, record["took_seconds"], record["spent_steps"], record["why"])


class Journal:
    """Opens or creates the file ``path``. :attr:`trials` and :attr:`verdict` are its contents.

    ``key`` identifies the search, in JSON values: its job (``result.JobKey``) and its settings. An incomplete last line, left
    by a process that was killed, is dropped. Not thread-safe.

    Args:
        beside_others: accept a file that holds only other searches, and keep them. Otherwise a file that is not empty must hold
            this search.

    Raises:
        ConfigError: the file is of a search with another key (names the difference), is no journal, is in use by another
            job, or cannot be written.
    """

    def __init__(self, path: str | Path, key: Mapping[str, Any], *, beside_others: bool = False) -> None:
        self.path = Path(path)
        self._beside_others = beside_others
        self._key = json.loads(json.dumps(key))  # as it reads back from the file
        self.trials: list[Trial] = []
        self.verdict: Verdict | None = None
        self._lines = 0
        self._real_path = os.path.realpath(self.path)
        with _open_here_lock:
            if self._real_path in _open_here:
                raise ConfigError(f"the journal of tuning {str(self.path)!r} is in use by another session of this process")
            _open_here.add(self._real_path)
        try:
            self._open()
        except BaseException:
            self._forget()
            raise

    def _open(self) -> None:
        try:
            self._file: IO[bytes] = open(self.path, "ab+", buffering=0)  # noqa: SIM115 - closed in close
        except OSError as error:
            raise ConfigError(f"the journal of tuning {str(self.path)!r} cannot be written: {error.strerror}") from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    @property
    def result(self) -> Verdict | None:
        """The verdict of a search that has finished; otherwise None."""
        return self.verdict if self.verdict is not None and self.verdict.finished else None

    def _lock(self) -> None:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by this process; a forked child does not hold it
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ConfigError(f"the journal of tuning {str(self.path)!r} is in use by another job") from error
            # Otherwise the file system has no locks: continue without one.

    def _read(self) -> None:
        self._file.seek(0)
        whole, end, torn = self._file.read().rpartition(b"\n")
        keys = [self._read_line(number, line) for number, line in enumerate(whole.splitlines(), 1)]
        if keys and self._key not in keys and not self._beside_others:
            self._refuse(keys[0])
        if torn and torn[: len(_BEGINNING)] != _BEGINNING[: len(torn)]:
            raise self._foreign(whole.count(b"\n") + 1 + bool(end), "not whole")
        self._file.truncate(len(whole + end))
        self._lines = len(self.trials)

    def _read_line(self, number: int, line: bytes) -> Mapping[str, Any]:
        """Apply the line if it belongs to this search. Returns the line's key."""
        try:
            record = json.loads(line)
            if record["schema"] != SCHEMA:
                raise ValueError(f"schema {record['schema']!r} instead of {SCHEMA}")
            key: Mapping[str, Any] = dict(record["key"])
            if key != self._key:
                return key
            if record["phase"] == "restart":
                self.trials, self.verdict = [], None
            elif record["phase"] == "verdict":
                self.verdict = Verdict.from_record(record)
            else:
                self.trials.append(Trial.from_record(record))
            return key
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._foreign(number, error_text(error)) from error

    def _foreign(self, number: int, why: str) -> ConfigError:
        return ConfigError(
            f"{str(self.path)!r}, line {number}, is not a line of a journal of tuning ({why}); remove the file to search anew"
        )

    def _refuse(self, key: Mapping[str, Any]) -> None:
        for name in dict.fromkeys((*self._key, *key)):
            if key.get(name) != self._key.get(name):
                raise ConfigError(
                    f"the journal {str(self.path)!r} is of another search: {name} is {key.get(name)!r} there and "
                    f"{self._key.get(name)!r} here; remove it to search anew, or name another file"
                )

    def add(self, trial: Trial) -> None:
        """Append ``trial``; returns when it is on the disk.

        Raises:
            OSError: the line could not be written.
        """
        self._write({**trial.to_record(), "trial": self._lines})
        self._lines += 1
        self.trials.append(trial)

    def end(self, verdict: Verdict) -> None:
        """Append ``verdict``; returns when it is on the disk.

        Raises:
            OSError: the line could not be written.
        """
        self._write({"phase": "verdict", **asdict(verdict), "sentence": verdict.sentence()})
        self.verdict = verdict

    def start_over(self) -> None:
        """Invalidate all trials so far. Their lines stay in the file.

        Raises:
            OSError: the line could not be written.
        """
        self._write({"phase": "restart"})
        self.trials, self.verdict, self._lines = [], None, 0

    def _write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps({"schema": SCHEMA, "key": self._key, **record}, allow_nan=False).encode() + b"\n"
        while line:
            line = line[self._file.write(line) :]
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Idempotent."""
        if not self._file.closed:
            self._file.close()
            self._forget()

    def _forget(self) -> None:
        with _open_here_lock:
            _open_here.discard(self._real_path)
