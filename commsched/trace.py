"""A timeline of every task and every layer, in the Chrome trace event format: chrome://tracing and Perfetto open it.

Each rank is a process in the picture. Its tracks are what the engine did (forward, backward, update, wait) and what the
network did, where a task appears three times: ``queue`` from ready to start, ``send`` from start to sent, ``reply`` from
sent to done. Things that overlap stand on lanes of their own, for viewers draw a track's events as nested.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .core.manifest import Manifest
from .core.plan import Partition
from .core.task import CommTask

log = logging.getLogger("commsched")

#: About 100 MB of JSON: what viewers still open.
MOST_EVENTS = 200_000

_TRACKS = ("forward", "backward", "update", "wait", "queue", "send", "reply")  # from top to bottom
_LONGEST_NAME = 200
_MOST_NAMES = 8


class _Task(NamedTuple):
    """What is kept of a CommTask; not the task itself, which holds the gradient's memory."""

    group: int
    step: int
    partition: Partition
    priority: int
    ready_at: float
    started_at: float
    sent_at: float
    done_at: float


class _Event(NamedTuple):
    """One bar in the picture, in nanoseconds of rank 0's clock."""

    track: str
    name: str
    start: int
    stop: int
    args: dict[str, Any]


class TraceObserver:
    """Collects the timeline of one rank in memory and writes ``trace.rank{rank}.json`` when closed.

    Never raises and never blocks on the disk while training runs: if the directory or the file cannot be written, or after
    ``most_events`` tasks and spans, one warning is logged and training goes on.

    Args:
        directory: made, readable by its owner only, if it is not there. A file of this rank in it is replaced.
        clock_offset_seconds: added to this process's ``time.monotonic`` gives rank 0's.
    """

    def __init__(
        self, directory: str | Path, rank: int, clock_offset_seconds: float = 0.0, *, most_events: int = MOST_EVENTS
    ) -> None:
        self.path = Path(directory) / f"trace.rank{rank}.json"
        self._rank = rank
        self._clock_offset_seconds = clock_offset_seconds
        self._room = most_events
        self._lock = threading.Lock()
        self._recording = True
        self._closed = False
        self._failed = False  # a warning has been logged: it is to be the only one
        self._names: dict[int, list[str]] = {}
        self._tasks: list[_Task] = []
        self._spans: list[tuple[str, str, float, float]] = []
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # of an earlier run: must not pass for this one's if this one is killed
        except OSError as error:
            self._recording = False
            self._give_up(error)

    def add_group(self, index: int, manifest: Manifest) -> None:
        """Tell the names of the tensors of a group before its first task is done."""
        self._names[index] = [_shown(spec.name) for spec in manifest.tensors]

    def on_step(self, group: int, step: int, at: float) -> None:
        """Not in the picture: every task names its step."""

    def on_ready(self, group: int, tensor: int, at: float) -> None:
        """Not in the picture: every task has a moment from which it is ready."""

    def on_task(self, task: CommTask) -> None:
        times = task.ready_at, task.started_at, task.sent_at, task.done_at
        self._keep(self._tasks, _Task(task.group, task.step, task.partition, task.priority, *times))

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        self._keep(self._spans, (track, name, start, stop))

    def _keep(self, kept: list[Any], event: Any) -> None:
        with self._lock:
            if not self._recording:
                return
            if self._room > 0:
                self._room -= 1
                kept.append(event)
                return
            self._recording = False
            events = len(self._tasks) + len(self._spans)
        log.warning("the timeline of rank %d is full (%d tasks and spans); it ends here", self._rank, events)

    def close(self) -> None:
        """Write the file. Idempotent; what happens later is not recorded."""
        with self._lock:
            self._recording = False
            tasks, self._tasks = self._tasks, []
            spans, self._spans = self._spans, []
            closed, self._closed = self._closed, True
        if closed or self._failed:
            return
        try:
            _write(self.path, self._in_file(tasks, spans))
        except OSError as error:
            self._give_up(error)

    def merge(self) -> None:
        """Put the files of all ranks that have closed into one; see :func:`merge`. For rank 0, when all have."""
        if self._failed:
            return
        try:
            merge(self.path.parent)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._failed = True
        log.warning("no timeline of rank %d in %s: %s", self._rank, self.path.parent, error)

    # --- from what was kept to what is written ---

    def _in_file(self, tasks: list[_Task], spans: list[tuple[str, str, float, float]]) -> Iterator[dict[str, Any]]:
        events = [self._event(track, _shown(name), start, stop, {}) for track, name, start, stop in spans]
        for task in tasks:
            events += self._task_events(task)
        yield {"ph": "M", "pid": self._rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {self._rank}"}}
        yield {"ph": "M", "pid": self._rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": self._rank}}
        tid = 0
        others = sorted({event.track for event in events} - set(_TRACKS))
        for track in (*_TRACKS, *others):
            for number, lane in enumerate(_lanes(event for event in events if event.track == track), 1):
                tid += 1
                yield from self._lane(tid, track if number == 1 else f"{track} {number}", lane)

    def _lane(self, tid: int, name: str, lane: list[_Event]) -> Iterator[dict[str, Any]]:
        where = {"pid": self._rank, "tid": tid}
        yield {"ph": "M", **where, "name": "thread_name", "args": {"name": _shown(name)}}
        yield {"ph": "M", **where, "name": "thread_sort_index", "args": {"sort_index": tid}}
        for event in lane:
            times = {"ts": event.start / 1000, "dur": (event.stop - event.start) / 1000}  # microseconds
            yield {"ph": "X", **where, "name": event.name, "cat": _shown(event.track), **times, "args": event.args}

    def _task_events(self, task: _Task) -> list[_Event]:
        known = self._names.get(task.group, [])
        names = [known[tensor] if tensor < len(known) else f"tensor {tensor}" for tensor in task.partition.tensors]
        more = [f"and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
        args = {
            "step": task.step,
            "partition": task.partition.index,
            "tensors": names[:_MOST_NAMES] + more,
            "bytes": task.partition.nbytes,
            "priority": task.priority,
            "group": task.group,
        }
        name = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        return [
            self._event("queue", name, task.ready_at, task.started_at, args),
            self._event("send", name, task.started_at, task.sent_at, args),
            self._event("reply", name, task.sent_at, task.done_at, args),
        ]

    def _event(self, track: str, name: str, start: float, stop: float, args: dict[str, Any]) -> _Event:
        # Whole nanoseconds: two events that touch must not overlap by a rounding error.
        begin, end = (round((time + self._clock_offset_seconds) * 1e9) for time in (start, stop))
        return _Event(track, name, begin, max(begin, end), args)


def merge(directory: str | Path) -> Path:
    """Put the timelines of all ranks in ``directory`` into its ``trace.json``; the path of that.

    A rank's file that cannot be read is left out, with a warning.

    Raises:
        FileNotFoundError: there is no timeline.
        OSError: ``trace.json`` cannot be written.
    """
    found = {int(match[1]): path for path in Path(directory).iterdir() if (match := _OF_A_RANK.fullmatch(path.name))}
    if not found:
        raise FileNotFoundError(f"there is no trace.rank*.json in {directory}")
    target = Path(directory) / "trace.json"
    _write(target, (event for _, path in sorted(found.items()) for event in _read(path)))
    return target


_OF_A_RANK = re.compile(r"trace\.rank(\d+)\.json")


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        if not isinstance(events, list):
            raise TypeError("traceEvents is no list")
        return events
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the timeline %s is left out: it cannot be read: %s", path, error)
        return []


def _write(path: Path, events: Iterable[dict[str, Any]]) -> None:
    """All or nothing: a reader never sees half a file."""
    unfinished = path.with_suffix(".unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
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


def _lanes(events: Iterable[_Event]) -> list[list[_Event]]:
    """The fewest lanes on which no two events overlap; each takes the first that is free (greedy interval colouring)."""
    lanes: list[list[_Event]] = []
    free: list[int] = []  # a heap: the topmost lane first
    busy: list[tuple[int, int]] = []  # a heap of (until, lane)
    for event in sorted(events, key=lambda event: (event.start, event.stop)):
        while busy and busy[0][0] <= event.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(len(lanes))
            lanes.append([])
        lane = heapq.heappop(free)
        lanes[lane].append(event)
        heapq.heappush(busy, (event.stop, lane))
    return lanes


def _shown(name: str) -> str:
    """A name as it may stand in the file: of bounded length, and text that any JSON reader takes."""
    text = name.encode("utf-8", "replace").decode()
    return text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 1] + "…"
