"""``commsched tune``: run a job that tunes itself, and print its trials on stderr while it trains. The lines of the table are
appended, never redrawn, so that it reads well in logs too."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ..core.errors import ConfigError
from ..core.standard_streams import say_error
from ..settings import Budget, Settings
from ..tuner.job import journal_path, require_writable
from ..tuner.result import Verdict, milliseconds, size
from ..tuner.searchers import make_searcher
from ..tuner.space import Space, fixed_by
from ..tuner.stats import MAX_PAIRS, STATED_PAIRS
from . import launch

#: The exit code if the job ended well but left no tuned file.
UNFINISHED = 3

#: The interval at which rank 0's journal is read. The journal is a file because it must outlive the job, and nothing notifies
#: this process when a file has grown.
LOOK_SECONDS = 0.5


def require_tunable(ranks: int, settings: Settings) -> None:
    """Check, before anything starts, that the job can be tuned.

    Raises:
        ConfigError: the job cannot be tuned; names the reason.
    """
    if ranks == 1:
        raise ConfigError("there is nothing to tune with -n 1: one rank sends nothing")
    if settings.disable:
        raise ConfigError("there is nothing to tune with disable=1: commsched sends nothing then")
    if settings.tune is None:
        raise ConfigError("--budget 0 leaves no time to tune; write a budget like 90s, 500steps or 20trials")
    fixed = fixed_by(settings)
    space = Space(settings.scheduler, sys.maxsize, fixed, settings.tune_policies)
    if space.dimensions == 0:
        raise ConfigError(f"{' and '.join(sorted(fixed))} are set, which leaves nothing to tune")
    make_searcher(settings.tune_by, space)  # raises if there is none of that name, or its library is missing
    if not settings.tune_out:
        raise ConfigError("--out names no file")
    result = _Result(settings)
    if result.path.suffix != ".toml":
        raise ConfigError(
            f"--out {result.path}: use a name like tuned.toml; the journal is then tuned.jsonl in the same directory"
        )
    if not result.path.parent.is_dir():
        raise ConfigError(f"--out {result.path}: directory {result.path.parent} does not exist")
    require_writable(result.path, f"--out {result.path}")
    result.read()
    if result.verdict is not None and result.verdict.finished and result.path.exists():
        raise ConfigError(
            f"{result.path} already exists, from {result.journal}: {result.verdict.sentence()}; remove both to search anew"
        )


def tune(
    ranks: int,
    servers: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    settings: Settings,
    *,
    then_stop: bool,
    use: str,
) -> int:
    """Run the job as ``launch.run`` does, and print its trials and verdicts, and then the command ``use``, which uses the
    result. Main thread only.

    Args:
        environ: the environment, which already holds the tuning settings of ``settings``.
        then_stop: end the job once tuning has ended.
        use: the command that runs the job with the tuned file.

    Returns:
        The exit code of the job, or 0 if it was stopped. If no tuned file was written, 3 instead of 0.
    """
    with tempfile.TemporaryFile(buffering=0) as end:
        # The file has no name, so that nothing is left, however this process ends.
        environ = {**environ, "COMMSCHED_TUNE_END": f"/proc/{os.getpid()}/fd/{end.fileno()}"}
        result = _Result(settings, end)
        result.read()
        before = result.trials
        if before:
            say_error(f"commsched: {result.journal} has {before} trials of an earlier run: tuning continues after them")
        result.forget_unfinished()
        known = result.verdict
        code = _run(ranks, servers, command, environ, result, then_stop, own_token=not settings.servers)
        result.say_new()
        why = result.end()
    if known is not None and result.verdict is known:  # the job has found nothing new to say
        say_error(known.sentence())
    if result.is_written:
        say_error(f"commsched: {result.path} is written; use it: {use}")
        return code
    because = "" if why is None or result.verdict is not None else f": {why}"
    is_over = why is not None or (result.verdict is not None and result.verdict.finished)
    goes_on = result.trials > (before if is_over else 0)  # a search that is over goes on from no trial of an earlier run
    again = f"; run the same command again to continue after {result.trials} trials" if goes_on else ""
    say_error(f"commsched: {result.path} was not written{because}{again}")
    return code or UNFINISHED


def _run(
    ranks: int,
    servers: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    result: _Result,
    then_stop: bool,
    own_token: bool,
) -> int:
    """Run the job and print a line for each of its trials and verdicts. Returns the job's exit code, or 0 if it was
    stopped."""
    ended, stopped = threading.Event(), threading.Event()
    main_thread = threading.get_ident()

    def follow() -> None:
        while not ended.wait(LOOK_SECONDS):
            result.say_new()
            if then_stop and not stopped.is_set() and (result.is_written or result.end() is not None):
                stopped.set()
                signal.pthread_kill(main_thread, signal.SIGTERM)  # as if another process had sent it

    follower = threading.Thread(target=follow, name="commsched-follow", daemon=True)
    follower.start()
    try:
        code = launch.run(ranks, servers, command, environ, own_token=own_token)
    finally:
        ended.set()
        follower.join()
    return 0 if stopped.is_set() and code == 128 + signal.SIGTERM else code


_COLUMNS = "{:>11} {:>10} {:>10}  {:8} {:>16} {:>8}  {}"

#: Printed once, above the lines.
HEADER = _COLUMNS.format("trial", "partition", "credit", "policy", "ms per step", "best", "left")

#: Windows of the longest comparison: those that decide, and those that say how large the gain is.
_MOST_COMPARED = 2 * (MAX_PAIRS + STATED_PAIRS)


class Table:
    """Formats each record of one search in a journal, in order, as a line. A journal may hold several searches: a job with
    pipeline stages has one for each group of tensors. The last column counts ``budget`` down, and says how long the rest of the
    search and its comparison may take."""

    def __init__(self, budget: Budget) -> None:
        self.verdict: Verdict | None = None
        self.trials = 0  # of the search
        self.best_seconds: float | None = None  # per step, in the search
        self._budget = budget
        self._counted = 0  # trials that did not fail
        self._windows = 0  # of the comparison
        self._steps = 0
        self._seconds = 0.0

    def line(self, record: Mapping[str, Any]) -> str:
        """The line of ``record``, a trial as ``journal.py`` writes it, with its number there. Windows of the comparison do not
        count as best: it has only two configurations, and the verdict reports their times."""
        searching, seconds = record["phase"] == "search", record["seconds"]
        self._seconds += record["took_seconds"]
        self._steps += record["spent_steps"]
        if searching:
            self.trials += 1
        else:
            self._windows += 1
        if record["status"] == "ok":
            if searching:
                self._counted += 1
                self.best_seconds = min(seconds, self.best_seconds or seconds)
            measured = f"{milliseconds(seconds)} +- {milliseconds(record['error_seconds'], like=seconds)}"
        else:
            measured = f"failed: {record['why']}"
        config = record["config"]
        return _COLUMNS.format(
            record["trial"] if searching else f"compared {self._windows}",
            size(config["partition_bytes"]),
            size(config["credit_bytes"]),
            config["policy"],
            measured,
            "" if self.best_seconds is None else milliseconds(self.best_seconds),
            self._left(searching),
        ).rstrip()

    def _left(self, searching: bool) -> str:
        """The rest of each limited budget, as ``SearchRun`` counts it. Trials are successful trials of the search. Steps and
        seconds also cover the comparison, for which the search leaves a part of them. The time is what the shortest of them
        leaves, if windows go on to take as long as before."""
        budget, parts, seconds = self._budget, [], []
        tried = self.trials + self._windows
        if budget.trials is not None:
            trials = max(0, budget.trials - self._counted) if searching else 0
            seconds.append((trials + max(0, _MOST_COMPARED - self._windows)) * self._seconds / tried)
            parts += [f"{trials} trial{'' if trials == 1 else 's'}"] if searching else []
        if budget.steps is not None:
            steps = max(0, budget.steps - self._steps)
            seconds.append(steps * self._seconds / self._steps)
            parts.append(f"{steps} steps")
        if budget.seconds is not None:
            seconds.append(max(0.0, budget.seconds - self._seconds))
        return ", ".join([*parts, *([f"about {min(seconds):.0f} s at most"] if seconds else [])])


class _Result:
    """Reads the tuned file and the journal beside it, which rank 0 writes, and ``end``, the file of the setting ``tune_end``.
    One thread at a time."""

    def __init__(self, settings: Settings, end: IO[bytes] | None = None) -> None:
        assert settings.tune_out is not None
        path = Path(settings.tune_out)
        with suppress(OSError):  # this process is in a directory that is gone
            path = path.relative_to(Path.cwd()) if Path.cwd() in path.parents else path
        self.path = path  # as messages show it
        self.journal = journal_path(str(self.path))
        self._budget = settings.tune or Budget()
        self._searches: dict[str, Table] = {}  # by key, as JSON
        self._last: Table | None = None  # the search of the journal's last line
        self._before = self._stamp()
        self._offset = 0  # bytes of the journal that have been read
        self._end = end
        self._has_said = False
        self._is_unreadable = False  # which was said

    @property
    def trials(self) -> int:
        """The number of trials of all searches, without the trials before a search was restarted."""
        return sum(search.trials for search in self._searches.values())

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the search that wrote the journal's last line; None if there is none."""
        return None if self._last is None else self._last.verdict

    def forget_unfinished(self) -> None:
        """Drop the verdicts of unfinished searches: they come from an earlier start that ended too early, not from this one."""
        for search in self._searches.values():
            if search.verdict is not None and not search.verdict.finished:
                search.verdict = None

    def end(self) -> str | None:
        """The reason why tuning has ended without a result; None if it has not ended."""
        assert self._end is not None
        self._end.seek(0)
        whole = self._end.read().decode(errors="replace").rpartition("\n")[0]
        return whole.splitlines()[-1] if whole else None

    @property
    def is_written(self) -> bool:
        """Whether the tuned file was written since this object was made."""
        return self._stamp() not in (None, self._before)

    def say_new(self) -> None:
        """Print a line for each new trial and verdict, below the table's header.

        Says once if the journal cannot be read. Then the job goes on, and its result does not depend on that.
        """
        if self._is_unreadable:
            return
        try:
            lines = self.read()
        except ConfigError as error:
            self._is_unreadable = True
            say_error(f"commsched: no further trials are shown: {error}")
            return
        for line in lines:
            if not self._has_said:
                self._has_said = True
                say_error(HEADER)
            say_error(line)

    def read(self) -> list[str]:
        """Read the journal on, and return a line for each new trial and verdict. An incomplete last line is left for the next
        call.

        Raises:
            ConfigError: the file is no journal, or cannot be read.
        """
        try:
            with self.journal.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"{self.journal} cannot be read: {error.strerror}") from error
        self._offset += len(whole) + len(newline)
        lines = []
        for text in whole.splitlines():
            try:
                record = json.loads(text)
                phase, key = record["phase"], json.dumps(record["key"], sort_keys=True)
                if phase == "restart" or key not in self._searches:
                    self._searches[key] = Table(self._budget)
                self._last = search = self._searches[key]
                if phase == "restart":
                    continue
                if phase == "verdict":
                    search.verdict = Verdict.from_record(record)
                    lines.append(search.verdict.sentence())
                else:
                    lines.append(search.line(record))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{self.journal} is not a journal of tuning; remove it, or give --out another name"
                ) from error
        return lines

    def _stamp(self) -> tuple[int, int] | None:
        """A stamp of the tuned file, which differs after each writing, since that replaces the file by a new one. None if there
        is no file, or it cannot be asked for."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns
