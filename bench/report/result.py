"""One row of a benchmark of training steps, validated when it is read. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..harness.arguments import CLIPS
from ..harness.measure import TOLERATED_DIFFERENCE

TRACKS = ("forward", "backward", "network", "wait")


@dataclass(frozen=True)
class Span:
    """An activity of one track, in seconds from the start of the step. A network task could have started at ``ready``."""

    track: str
    name: str
    start: float
    stop: float
    priority: int | None = None
    ready: float | None = None


@dataclass(frozen=True)
class StandsFor:
    """The real cluster for which a scaled row stands."""

    gradient_bytes: float
    compute_seconds: float
    bandwidth_bps: float | None
    host_cores: float | None


@dataclass(frozen=True)
class Result:
    """A result. Values are seconds per step unless the name says otherwise. ``low`` and ``high`` are from
    ``measure.median_interval``.

    None means not measured. ``clip`` is empty if loops did not clip, and ``transport`` if the row does not say it.
    """

    system: str
    model: str
    workers: int
    servers: int
    bandwidth_bps: float | None
    gradient_bytes: float | None
    link: str
    transport: str
    config: str
    emulated: bool
    simulated: bool
    rho: float | None
    median: float
    low: float | None
    high: float | None
    samples: tuple[float, ...]
    clip: str
    bound: float | None
    slowed_bound: float | None
    unclipped_bound: float | None
    bound_overhead: float | None
    fifo_bound: float | None
    efficiency: float | None
    speedup_vs_ddp: float | None
    speedup_vs_ddp_tuned: float | None
    possible_speedup_vs_ddp: float | None
    exposed: float | None
    cpu: float | None
    max_difference: float | None
    correct: bool | None
    simulated_seconds: float | None
    stands_for: StandsFor | None
    timeline: tuple[Span, ...]

    @property
    def mark(self) -> str:
        """The kind of the row if it is not simply measured."""
        words = [word for word, holds in (("EMULATED", self.emulated), ("simulated", self.simulated)) if holds]
        return ", ".join([*words, CLIPS[self.clip]] if self.clip else words)

    @property
    def wrong(self) -> bool:
        return self.correct is False or (self.max_difference is not None and self.max_difference > TOLERATED_DIFFERENCE)

    @property
    def disturbed(self) -> bool:
        """Whether the step was faster than the bound: the measurements behind the bound were disturbed."""
        return not self.simulated and self.bound is not None and self.high is not None and self.high < self.bound


def parse_result(row: object) -> Result:
    """Parse a row of ``bench train``, ``simulate`` or ``sweep``. Missing keys count as None.

    Raises:
        ValueError: the row lacks a required key, or a value has the wrong type; the message names it.
    """
    if not isinstance(row, dict):
        raise ValueError(f"is of type {type(row).__name__}, not an object")
    step = _mapping(row, "step_seconds")
    return Result(
        system=_text(row, "system"),
        model=_text(row, "model"),
        workers=_count(row, "workers"),
        servers=_count(row, "servers"),
        bandwidth_bps=_number(row, "bandwidth_bps"),
        gradient_bytes=_number(row, "gradient_bytes"),
        link=_text(row, "link", ""),
        transport=_text(row, "transport", ""),
        config=_text(row, "config", ""),
        emulated=_flag(row, "emulated"),
        simulated=_flag(row, "simulated"),
        rho=_positive(row, "rho"),
        median=_needed(step, "median"),
        low=_number(step, "low"),
        high=_number(step, "high"),
        samples=tuple(_finite(each, "step_samples") for each in row.get("step_samples") or ()),
        clip=_clip(row),
        bound=_number(row, "bound_seconds"),
        slowed_bound=_number(row, "slowed_bound_seconds"),
        unclipped_bound=_number(row, "unclipped_bound_seconds"),
        bound_overhead=_number(row, "bound_overhead_seconds"),
        fifo_bound=_number(row, "fifo_bound_seconds"),
        efficiency=_number(row, "efficiency"),
        speedup_vs_ddp=_number(row, "speedup_vs_ddp"),
        speedup_vs_ddp_tuned=_number(row, "speedup_vs_ddp_tuned"),
        possible_speedup_vs_ddp=_number(row, "possible_speedup_vs_ddp"),
        exposed=_number(row, "exposed_seconds"),
        cpu=_number(row, "cpu_seconds_per_step"),
        max_difference=_number(row, "max_difference"),
        correct=None if row.get("correct") is None else _flag(row, "correct"),
        simulated_seconds=_number(row, "simulated_seconds"),
        stands_for=_stands_for(row),
        timeline=tuple(_span(each) for each in row.get("timeline") or ()),
    )


def _stands_for(row: Mapping[str, Any]) -> StandsFor | None:
    if row.get("stands_for") is None:
        return None
    cluster = _mapping(row, "stands_for")
    needed = (_needed(cluster, key) for key in ("gradient_bytes", "compute_seconds"))
    return StandsFor(*needed, *(_number(cluster, key) for key in ("bandwidth_bps", "host_cores")))


def _span(entry: object) -> Span:
    if not isinstance(entry, dict):
        raise ValueError(f"timeline has {entry!r}, which is not an object")
    track, priority = _text(entry, "track"), entry.get("priority")
    if track not in TRACKS:
        raise ValueError(f"timeline has a track {track!r}; there are {', '.join(TRACKS)}")
    if priority is not None and not isinstance(priority, int):
        raise ValueError(f"timeline has a priority {priority!r}, which is not a whole number")
    start, stop = _needed(entry, "start"), _needed(entry, "stop")
    if stop < start:
        raise ValueError(f"timeline has {entry.get('name')!r} on {track}, which stops before it starts")
    return Span(track, _text(entry, "name", ""), start, stop, priority, _number(entry, "ready"))


def _text(record: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = record.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r}, not a text")
    return value


def _clip(record: Mapping[str, Any]) -> str:
    value = _text(record, "clip", "")
    if value and value not in CLIPS:
        raise ValueError(f"clip is {value!r}, not one of {', '.join(CLIPS)}")
    return value


def _flag(record: Mapping[str, Any], key: str) -> bool:
    value = record.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, not true or false")
    return value


def _count(record: Mapping[str, Any], key: str) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key} is {value!r}, not a whole number of at least 0")
    return value


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {value!r}, not an object")
    return value


def _number(record: Mapping[str, Any], key: str) -> float | None:
    return None if record.get(key) is None else _finite(record[key], key)


def _needed(record: Mapping[str, Any], key: str) -> float:
    return _finite(record.get(key), key)


def _positive(record: Mapping[str, Any], key: str) -> float | None:
    """A ratio for a logarithmic axis; None unless it is positive. With one worker there is no communication and no ratio."""
    value = _number(record, key)
    return value if value is None or value > 0 else None


def _finite(value: object, key: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{key} is {value!r}, not a finite number")
    return float(value)
