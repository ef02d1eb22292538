"""The rules of the trace event format, as far as Perfetto and chrome://tracing need them to show a timeline whole."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def read_trace(path: Path) -> list[Event]:
    """The events of a file.

    Raises:
        AssertionError: a viewer would not show one of them, or show it elsewhere. Names the event.
    """

    def not_json(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=not_json)
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = document["traceEvents"]
    for event in events:
        _require_fields(event)
    tracks = _require_nested([event for event in events if event["ph"] == "X"])
    _require_paired([event for event in events if event["ph"] in "stf"], tracks)
    _require_counted([event for event in events if event["ph"] == "C"])
    return events


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _require_fields(event: Event) -> None:
    assert event["ph"] in ("X", "M", "C", "s", "t", "f"), event
    assert isinstance(event["name"], str), event
    assert type(event["pid"]) is int, event
    assert type(event["tid"]) is int, event
    assert event["ph"] == "M" or _is_number(event["ts"]), event
    if event["ph"] == "M":
        assert event["name"] in _METADATA, event
        assert event["args"].keys() == {"sort_index" if event["name"].endswith("sort_index") else "name"}, event
    elif event["ph"] == "X":
        assert _is_number(event["dur"]), event
        assert event["dur"] >= 0, event
        assert isinstance(event["cat"], str), event
        assert isinstance(event["args"], dict), event


def _nanoseconds(microseconds: float) -> int:
    return round(1000 * microseconds)


def _require_nested(bars: list[Event]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """By process and thread: begin and end of the bars, in order. Bars of one thread may stand within each other only."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for bar in bars:
        begin = _nanoseconds(bar["ts"])
        tracks[bar["pid"], bar["tid"]].append((begin, begin + _nanoseconds(bar["dur"])))
    for track, times in tracks.items():
        around: list[int] = []  # ends
        for begin, end in sorted(times, key=lambda time: (time[0], -time[1])):
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1], (
                f"on track {track} a bar from {begin} to {end} ns crosses one to {around[-1]}"
            )
            around.append(end)
    return tracks


def _require_paired(points: list[Event], tracks: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
    """An arrow has one begin and one end, in the order of time. Each of its points is within a bar, or else it is not shown."""
    arrows: dict[tuple[str, str, str], list[Event]] = defaultdict(list)
    for point in points:
        assert isinstance(point["id"], str), point
        arrows[point["cat"], point["name"], point["id"]].append(point)
        at = _nanoseconds(point["ts"])
        bars = tracks[point["pid"], point["tid"]]
        assert any(begin <= at < end for begin, end in bars), f"no bar is there: {point}"
    for points in arrows.values():
        kinds = "".join(point["ph"] for point in points)
        assert kinds == "s" + "t" * (len(points) - 2) + "f", f"{kinds}: {points}"
        assert points[-1]["bp"] == "e", points[-1]  # it ends in the bar around it, not in the next one
        assert all(one["ts"] <= other["ts"] for one, other in pairwise(points)), points


def _require_counted(counts: list[Event]) -> None:
    counters: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for count in counts:
        assert count["args"], count
        assert all(_is_number(value) and value >= 0 for value in count["args"].values()), count
        counters[count["pid"], count["name"]].append(count)
    for each in counters.values():
        assert all(one["ts"] <= other["ts"] for one, other in pairwise(each))
        assert not any(each[-1]["args"].values()), f"a counter is not back at 0: {each[-1]}"
