"""A timeline of every task and every layer, in the Chrome trace event format: chrome://tracing and Perfetto open it.

Each rank is a process in the timeline. Some of its tracks show the engine (forward, backward, update, wait); the others show
the network. There a task appears three times: ``queue`` from ready to start, ``send`` from start to sent, ``reply`` from sent
to done. Arrows lead from a gradient over these to the forward that needed its average, and a counter shows the credit in use. A
step is a bar from its first gradient to the next step's. Events that overlap get lanes of their own, because viewers draw
overlapping events of one track as nested.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.interfaces import SessionObserver
from ..core.manifest import Manifest
from ..core.task import CommTask
from .trace_events import Begun, RankRecord, Span, Task, shown

log = logging.getLogger("commsched")

#: About 100 MB of JSON, which viewers can still open.
MAX_EVENTS = 200_000


class TraceObserver(SessionObserver):
    """Collects the timeline of one rank in memory and writes ``trace.rank{rank}.json`` when closed.

    Never raises, and never blocks on the disk while training runs. If the directory or the file cannot be written, or after
    ``most_events`` tasks and spans, one warning is logged and training goes on.

    Args:
        directory: created, readable by its owner only, if it does not exist. An existing file of this rank is replaced.
        clock_offset_seconds: rank 0's ``time.monotonic`` minus this process's.
        steps: the first and the last step of which anything is recorded; None means all.
        about: facts about the job, for whoever gets the file.
    """

    def __init__(
        self,
        directory: str | Path,
        rank: int,
        clock_offset_seconds: float = 0.0,
        *,
        most_events: int = MAX_EVENTS,
        steps: tuple[int, int] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(directory) / f"trace.rank{rank}.json"
        self._rank = rank
        self._clock_offset_seconds = clock_offset_seconds
        self._room = most_events
        self._lock = threading.Lock()
        self._recording = True
        self._closed = False
        self._failed = False  # a warning has been logged; there must be no second one
        self._steps = steps
        self.about = dict(about or {})
        self._names: dict[int, list[str]] = {}
        self._nbytes: dict[int, int] = {}  # by group
        self._main = -1  # the largest group that has begun a step, and was not released
        self._in_main_step = steps is None or steps[0] == 0  # whether it is in one of the steps to record
        self._tasks: list[Task] = []
        self._spans: list[Span] = []
        self._begun: list[Begun] = []
        self._released_at: dict[int, float] = {}  # by group
        self._shown: set[int] = set()  # groups with a step or a task that is recorded
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # if this run is killed, an old file must not pass for its own
            for path in self.path.parent.iterdir() if rank == 0 else ():
                # An earlier run may have had more ranks, whose files must not pass for this run's either.
                if path.name == "trace.json" or _OF_A_RANK.fullmatch(path.name):
                    with suppress(OSError):  # it is somebody else's
                        path.unlink()
        except OSError as error:
            self._recording = False
            self._give_up(error)

    def add_group(self, index: int, manifest: Manifest) -> None:
        """Set the names of a group's tensors. Call it before the group's first task is done."""
        self._names[index] = [shown(spec.name) for spec in manifest.tensors]
        self._nbytes[index] = manifest.nbytes

    def on_step(self, group: int, step: int, at: float) -> None:
        if self._steps is not None:
            with self._lock:
                if step > 0 and self._nbytes.get(group, 0) >= self._nbytes.get(self._main, 0):  # it is no single broadcast
                    self._main = group
                if group == self._main or self._main < 0:
                    self._in_main_step = self._is_wanted(step)
        # One step more than is recorded: it ends the last bar.
        if self._steps is None or self._steps[0] <= step <= self._steps[1] + 1:
            self._keep(self._begun, Begun(group, step, at), group)

    def on_release(self, group: int, at: float) -> None:
        with self._lock:
            if group in self._shown:
                self._released_at.setdefault(group, at)
            else:  # one of very many values, maybe, each of which is averaged once
                self._names.pop(group, None)
                self._nbytes.pop(group, None)
            if group == self._main:
                self._main = -1  # the next group that begins a step takes its place

    def on_task(self, task: CommTask) -> None:  # it carries its step, and the time when it became ready
        if self._is_wanted(task.step):
            times = task.ready_at, task.started_at, task.sent_at, task.done_at
            self._keep(self._tasks, Task(task.group, task.step, task.partition, task.priority, *times), task.group)

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        if self._in_main_step:
            self._keep(self._spans, Span(track, name, start, stop))

    def _is_wanted(self, step: int) -> bool:
        return self._steps is None or self._steps[0] <= step <= self._steps[1]

    def _keep(self, kept: list[Any], event: Any, group: int | None = None) -> None:
        with self._lock:
            if not self._recording:
                return
            if self._room > 0:
                self._room -= 1
                kept.append(event)
                if group is not None:
                    self._shown.add(group)
                return
            self._recording = False
            events = len(self._tasks) + len(self._spans)
        log.warning("the timeline of rank %d is full (%d tasks and spans); it ends here", self._rank, events)

    def close(self) -> None:
        """Write the file. Idempotent; later events are not recorded."""
        with self._lock:
            self._recording = False
            tasks, self._tasks = self._tasks, []
            spans, self._spans = self._spans, []
            begun, self._begun = self._begun, []
            released_at, self._released_at = self._released_at, {}
            closed, self._closed = self._closed, True
        if closed or self._failed:
            return
        try:
            offset = self._clock_offset_seconds
            recorded = RankRecord(self._rank, self._names, tasks, spans, begun, offset, released_at)
            _write(self.path, recorded.in_file(), self._about())
        except OSError as error:
            self._give_up(error)

    def merge(self) -> None:
        """Merge the files of all ranks that have closed; see :func:`merge`. Called on rank 0 when all ranks have closed."""
        if self._failed:
            return
        try:
            merge(self.path.parent)
        except OSError as error:
            self._give_up(error)

    def _about(self) -> dict[str, Any]:
        # Other tools' traces can be laid beside this one by it.
        began = time.time() - (time.monotonic() + self._clock_offset_seconds)
        return {**self.about, "rank": self._rank, "unix_seconds_at_time_0": round(began, 6)}

    def _give_up(self, error: OSError) -> None:
        self._failed = True
        log.warning("no timeline of rank %d in %s: %s", self._rank, self.path.parent, error)


def merge(directory: str | Path) -> Path:
    """Merge the timelines of all ranks in ``directory`` into its ``trace.json``, and return the path of that file.

    A rank's file that cannot be read is left out, with a warning.

    Raises:
        FileNotFoundError: there is no timeline.
        OSError: ``trace.json`` cannot be written.
    """
    found = {int(match[1]): path for path in Path(directory).iterdir() if (match := _OF_A_RANK.fullmatch(path.name))}
    if not found:
        raise FileNotFoundError(f"there is no trace.rank*.json in {directory}")
    target = Path(directory) / "trace.json"
    files = [_read(path) for _, path in sorted(found.items())]
    about: dict[str, Any] = next((each["otherData"] for each in files if isinstance(each.get("otherData"), dict)), {})
    _write(target, (event for each in files for event in each["traceEvents"]), about)
    return target


_OF_A_RANK = re.compile(r"trace\.rank(\d+)\.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():  # in a directory that others may write to, it could be a pipe
            raise ValueError("it is no file")
        return read_file(path)
    except (OSError, ValueError) as error:
        log.warning("the timeline %s is left out: it cannot be read: %s", path, error)
        return {"traceEvents": []}


def read_file(path: Path) -> dict[str, Any]:
    """The timeline in ``path``, with its list ``traceEvents``.

    Raises:
        OSError, ValueError: it cannot be read, or is no timeline.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError("it has no list of traceEvents")
    return document


def _write(path: Path, events: Iterable[dict[str, Any]], about: Mapping[str, Any]) -> None:
    """Write the whole file or nothing, so that a reader never sees half a file. The draft is a new file with a random name: in
    a directory that other users may write to, a predictable name could be a link to one of our files."""
    unfinished = path.with_suffix(f".{secrets.token_hex(8)}.unfinished")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
            for number, event in enumerate(events):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")
        os.replace(unfinished, path)
    except OSError:
        try:
            unfinished.unlink(missing_ok=True)
        except OSError:
            pass
        raise
