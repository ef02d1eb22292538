"""From what one rank recorded to events in the Chrome trace event format. Pure."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..core.errors import and_more
from ..core.plan import Partition

TRACKS = ("step", "forward", "backward", "update", "wait", "queue", "send", "reply")  # from top to bottom
_LONGEST_NAME = 200
_MAX_NAMES = 8

#: The flow of a gradient has this name in viewers.
_FLOW = {"name": "gradient to forward", "cat": "flow"}


class Task(NamedTuple):
    """The recorded fields of a CommTask. The task itself is not kept, because it holds the gradient's memory."""

    group: int
    step: int
    partition: Partition
    priority: int
    ready_at: float
    started_at: float
    sent_at: float
    done_at: float


class Span(NamedTuple):
    """The engine's work on ``name``; see ``Observer.on_span``."""

    track: str
    name: str
    start: float
    stop: float


class Begun(NamedTuple):
    """The beginning of a step of a group."""

    group: int
    step: int
    at: float


class _Event(NamedTuple):
    """One bar in the timeline, in nanoseconds of rank 0's clock."""

    track: str
    name: str
    start: int
    stop: int
    args: dict[str, Any]


class RankRecord:
    """The events that one rank recorded.

    Args:
        names: by group, the names of its tensors.
        offset_seconds: rank 0's ``time.monotonic`` minus this process's.
        released_at: by group, when it was released, of those that were.
    """

    def __init__(
        self,
        rank: int,
        names: Mapping[int, Sequence[str]],
        tasks: Sequence[Task],
        spans: Sequence[Span],
        begun: Sequence[Begun],
        offset_seconds: float,
        released_at: Mapping[int, float],
    ) -> None:
        self._rank = rank
        self._names = names
        self._tasks = tasks
        self._spans = spans
        self._begun: dict[int, list[Begun]] = defaultdict(list)
        for each in begun:
            self._begun[each.group].append(each)
        self._offset_seconds = offset_seconds
        self._released_at = released_at

    def in_file(self) -> Iterator[dict[str, Any]]:
        """The events of the file."""
        readers = _Readers(self._spans)
        events = [*self._steps(), *self._spans_as_events()]
        ways = [self._task_events(task, readers) for task in self._tasks]
        events += [event for way in ways for event in way]
        yield {"ph": "M", "pid": self._rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {self._rank}"}}
        yield {"ph": "M", "pid": self._rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": self._rank}}
        tid = 0
        others = sorted({event.track for event in events} - set(TRACKS))
        places: dict[int, int] = {}  # of each event's object: its track
        for track in (*TRACKS, *others):
            for number, lane in enumerate(_lanes(event for event in events if event.track == track), 1):
                tid += 1
                places |= {id(event): tid for event in lane}
                yield from self._lane(tid, track if number == 1 else f"{track} {number}", lane)
        yield from self._credit()
        yield from self._flows(ways, {(each.track, each.name, each.start): each for each in events}, readers, places)

    def _lane(self, tid: int, name: str, lane: list[_Event]) -> Iterator[dict[str, Any]]:
        where = {"pid": self._rank, "tid": tid}
        yield {"ph": "M", **where, "name": "thread_name", "args": {"name": shown(name)}}
        yield {"ph": "M", **where, "name": "thread_sort_index", "args": {"sort_index": tid}}
        for event in lane:
            times = {"ts": event.start / 1000, "dur": (event.stop - event.start) / 1000}  # microseconds
            yield {"ph": "X", **where, "name": event.name, "cat": shown(event.track), **times, "args": event.args}

    # --- steps ---

    def _trained(self) -> list[int]:
        """The groups with several steps, and tensors of the user's. The largest comes first."""
        groups = [group for group, steps in self._begun.items() if len(steps) > 1 and not _is_internal(self._names.get(group))]
        return sorted(groups, key=lambda group: -len(self._names.get(group, ())))

    def _steps(self) -> Iterator[_Event]:
        """A bar from each step's first gradient to the next step's."""
        last = max([*(task.done_at for task in self._tasks), *(span.stop for span in self._spans)], default=0.0)
        for group in self._trained():
            steps = self._begun[group]
            end_of_last = max(min(last, self._released_at.get(group, last)), steps[-1].at)
            for each, end in zip(steps, [*(following.at for following in steps[1:]), end_of_last]):
                yield self._event("step", f"step {each.step}", each.at, end, {"step": each.step, "group": group})

    def _spans_as_events(self) -> Iterator[_Event]:
        starts = {group: [each.at for each in self._begun[group]] for group in self._trained()}
        for span in self._spans:
            args: dict[str, Any] = {}
            for group, at in starts.items():  # the first that is trained at that time: the largest
                if at[0] <= span.start < self._released_at.get(group, float("inf")):
                    args = {"step": self._begun[group][bisect_right(at, span.start) - 1].step}
                    break
            yield self._event(span.track, shown(span.name), span.start, span.stop, args)

    # --- tasks ---

    def _task_events(self, task: Task, readers: _Readers) -> list[_Event]:
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
        reader = readers.first(names[0], task.ready_at, self._next_step_at(task))
        if reader is not None:
            args["needed_by"] = shown(reader.name)
            args["needed_ms_after_ready"] = round(1e3 * (reader.start - task.ready_at), 3)
        name = names[0] + and_more(len(names) - 1)
        return [
            self._event("queue", name, task.ready_at, task.started_at, args),
            self._event("send", name, task.started_at, task.sent_at, args),
            self._event("reply", name, task.sent_at, task.done_at, args),
        ]

    def _next_step_at(self, task: Task) -> float:
        steps = self._begun.get(task.group, [])
        place = bisect_right(steps, task.step, key=lambda each: each.step)
        return steps[place].at if place < len(steps) else float("inf")

    def _credit(self) -> Iterator[dict[str, Any]]:
        """A counter of the bytes that are committed to the network and not sent."""
        changes: defaultdict[int, int] = defaultdict(int)
        for task in self._tasks:
            changes[self._nanoseconds(task.started_at)] += task.partition.nbytes
            changes[self._nanoseconds(task.sent_at)] -= task.partition.nbytes
        used = 0
        for at, change in sorted(changes.items()):
            used += change
            where = {"ph": "C", "pid": self._rank, "tid": 0, "ts": at / 1000}
            yield {**where, "name": "credit in use", "args": {"bytes": used}}

    # --- flows ---

    def _flows(
        self,
        found: Sequence[Sequence[_Event]],
        bars: Mapping[tuple[str, str, int], _Event],
        readers: _Readers,
        places: Mapping[int, int],
    ) -> Iterator[dict[str, Any]]:
        """Arrows from each gradient to the forward that needed its average."""
        for number, (task, way) in enumerate(zip(self._tasks, found), 1):
            tensor = way[0].args["tensors"][0]
            stops = [(event, event.start) for event in way]
            gradient = readers.gradient(tensor, task.ready_at)
            if gradient is not None and (bar := self._bar(bars, gradient)) is not None:
                middle = (bar.start + bar.stop) // 2  # at its end another bar may begin
                stops.insert(0, (bar, min(middle, way[0].start)))
            reader = readers.first(tensor, task.ready_at, self._next_step_at(task))
            if reader is not None and (bar := self._bar(bars, reader)) is not None and bar.stop > way[-1].stop:
                # A forward that waits for the average begins before it is there. No arrow may lead back in time.
                stops.append((bar, max(bar.start, way[-1].stop)))
            for place, (bar, at) in enumerate(stops):
                kind = {"ph": "s"} if place == 0 else {"ph": "f", "bp": "e"} if place == len(stops) - 1 else {"ph": "t"}
                where = {"pid": self._rank, "tid": places[id(bar)], "ts": at / 1000}
                yield {**_FLOW, **kind, "id": f"{self._rank}.{number}", **where}

    def _bar(self, bars: Mapping[tuple[str, str, int], _Event], span: Span) -> _Event | None:
        return bars.get((span.track, shown(span.name), self._nanoseconds(span.start)))

    def _event(self, track: str, name: str, start: float, stop: float, args: dict[str, Any]) -> _Event:
        # Whole nanoseconds: two adjacent events must not overlap by a rounding error.
        begin, end = self._nanoseconds(start), self._nanoseconds(stop)
        return _Event(track, name, begin, max(begin, end), args)

    def _nanoseconds(self, seconds: float) -> int:
        return round((seconds + self._offset_seconds) * 1e9)


class _Readers:
    """Finds the bar of the engine in which a tensor's gradient was made, and the one that read its average."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._forward: defaultdict[str, list[Span]] = defaultdict(list)
        self._waits: defaultdict[str, list[Span]] = defaultdict(list)
        self._backward: defaultdict[str, list[Span]] = defaultdict(list)
        kinds = {"forward": self._forward, "wait": self._waits, "backward": self._backward}
        for span in sorted(spans, key=lambda span: span.start):
            if span.track in kinds:
                kinds[span.track][shown(span.name)].append(span)

    def first(self, tensor: str, after: float, before: float) -> Span | None:
        """The forward of the layer of ``tensor``, or else the first wait for it, that begins between these times."""
        for spans in (self._forward.get(tensor), self._forward.get(_layer_of(tensor)), self._waits.get(tensor)):
            place = bisect_left(spans, after, key=lambda span: span.start) if spans else 0
            if spans and place < len(spans) and spans[place].start < before:
                return spans[place]
        return None

    def gradient(self, tensor: str, at: float) -> Span | None:
        """The last backward of ``tensor`` that had ended by then."""
        spans = self._backward.get(tensor, [])
        place = bisect_right(spans, at, key=lambda span: span.start)
        return spans[place - 1] if place else None


def _layer_of(tensor: str) -> str:
    """The layer that holds ``tensor``: ``blocks.0.norm1`` of ``blocks.0.norm1.weight``."""
    return tensor.rpartition("/" if "/" in tensor else ".")[0]


def _is_internal(names: Sequence[str] | None) -> bool:
    """Whether these are tensors of a plugin's own, not gradients."""
    return bool(names) and all(name.startswith("commsched.") for name in names or ())


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


def shown(name: str) -> str:
    """``name`` as it is written to the file: of bounded length, and text that any JSON reader accepts."""
    text = name.encode("utf-8", "replace").decode()
    return text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 1] + "…"
