"""A timeline of every task and every layer, in the Chrome trace event format: chrome://tracing and Perfetto open it.

Each rank is a process in the timeline. Some of its tracks show the engine (forward, backward, update, wait); the others show
the network. There a task appears three times: ``queue`` from ready to start, ``send`` from start to sent, ``reply`` from sent
to done. Events that overlap get lanes of their own, because viewers draw overlapping events of one track as nested.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..core.interfaces import Observer
from ..core.manifest import Manifest
from ..core.plan import Partition
from ..core.task import CommTask

log = logging.getLogger("commsched")

#: About 100 MB of JSON, which viewers can still open.
MAX_EVENTS = 200_000

_TRACKS = ("forward", "backward", "update", "wait", "queue", "send", "reply")  # from top to bottom
_LONGEST_NAME = 200
_MAX_NAMES = 8


class _Task(NamedTuple):
    """The recorded fields of a CommTask. The task itself is not kept, because it holds the gradient's memory."""

    group: int
    step: int
    partition: Partition
    priority: int
    ready_at: float
    started_at: float
    sent_at: float
    done_at: float


class _Event(NamedTuple):
    """One bar in the timeline, in nanoseconds of rank 0's clock."""

    track: str
    name: str
    start: int
    stop: int
    args: dict[str, Any]


class TraceObserver(Observer):
    """Collects the timeline of one rank in memory and writes ``trace.rank{rank}.json`` when closed.

    Never raises, and never blocks on the disk while training runs. If the directory or the file cannot be written, or after
    ``most_events`` tasks and spans, one warning is logged and training goes on.

    Args:
        directory: created, readable by its owner only, if it does not exist. An existing file of this rank is replaced.
        clock_offset_seconds: rank 0's ``time.monotonic`` minus this process's.
    """

    def __init__(
        self, directory: str | Path, rank: int, clock_offset_seconds: float = 0.0, *, most_events: int = MAX_EVENTS
    ) -> None:
        self.path = Path(directory) / f"trace.rank{rank}.json"
        self._rank = rank
        self._clock_offset_seconds = clock_offset_seconds
        self._room = most_events
        self._lock = threading.Lock()
        self._recording = True
        self._closed = False
        self._failed = False  # a warning has been logged; there must be no second one
        self._names: dict[int, list[str]] = {}
        self._tasks: list[_Task] = []
        self._spans: list[tuple[str, str, float, float]] = []
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # if this run is killed, an old file must not pass for its own
        except OSError as error:
            self._recording = False
            self._give_up(error)

    def add_group(self, index: int, manifest: Manifest) -> None:
        """Set the names of a group's tensors. Call it before the group's first task is done."""
        self._names[index] = [_shown(spec.name) for spec in manifest.tensors]

    def on_task(self, task: CommTask) -> None:  # it carries its step, and the time when it became ready
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
        """Write the file. Idempotent; later events are not recorded."""
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
        """Merge the files of all ranks that have closed; see :func:`merge`. Called on rank 0 when all ranks have closed."""
        if self._failed:
            return
        try:
            merge(self.path.parent)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._failed = True
        log.warning("no timeline of rank %d in %s: %s", self._rank, self.path.parent, error)

    # --- from the recorded events to the file ---

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
        more = [f"and {len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
        args = {
            "step": task.step,
            "partition": task.partition.index,
            "tensors": names[:_MAX_NAMES] + more,
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
        # Whole nanoseconds: two adjacent events must not overlap by a rounding error.
        begin, end = (round((time + self._clock_offset_seconds) * 1e9) for time in (start, stop))
        return _Event(track, name, begin, max(begin, end), args)


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
    """Write the whole file or nothing, so that a reader never sees half a file. The draft is a new file with a random name: in
    a directory that other users may write to, a predictable name could be a link to one of our files."""
    unfinished = path.with_suffix(f".{secrets.token_hex(8)}.unfinished")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with open(descriptor, "w", encoding="utf-8") as file:
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
    """Distribute ``events`` over the fewest lanes on which no two overlap. Each event takes the first free lane (greedy
    interval colouring)."""
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
    """``name`` as it is written to the file: of bounded length, and text that any JSON reader accepts."""
    text = name.encode("utf-8", "replace").decode()
    return text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 1] + "…"
