"""Results as tables: the columns as text, and Markdown. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..harness.measure import MIN_SAMPLES
from .group import Group, groups
from .result import Result

MISSING = "-"


@dataclass(frozen=True)
class Column:
    heading: str
    text: Callable[[Result], str]
    numeric: bool = True


def _fixed(value: float | None, digits: int, unit: float = 1.0) -> str:
    return MISSING if value is None else f"{value / unit:.{digits}f}"


def milliseconds(seconds: float | None) -> str:
    return _fixed(seconds, 1, 1e-3)


def step(result: Result) -> str:
    """The median and its confidence interval, or the range if there are too few steps for an interval."""
    if result.low is None or result.high is None or len(result.samples) == 1:
        return milliseconds(result.median)
    word = " range" if 0 < len(result.samples) < MIN_SAMPLES else ""
    return f"{milliseconds(result.median)} [{milliseconds(result.low)}, {milliseconds(result.high)}]{word}"


def efficiency(result: Result) -> str:
    return _fixed(result.efficiency, 3) + (" DISTURBED" if result.disturbed else "")


def difference(result: Result) -> str:
    shown = MISSING if result.max_difference is None else f"{result.max_difference:.1e}"
    return shown + (" WRONG" if result.wrong else "")


def rate(bits_per_second: float | None) -> str:
    if bits_per_second is None:
        return MISSING
    return f"{bits_per_second / 1e9:.3g} Gbit/s" if bits_per_second >= 1e9 else f"{bits_per_second / 1e6:.3g} Mbit/s"


def link(result: Result) -> str:
    if result.simulated:
        return f"{rate(result.bandwidth_bps)}, {result.link}"
    return result.link or rate(result.bandwidth_bps)


def stands_for(result: Result) -> str:
    real = result.stands_for
    if real is None:
        return MISSING
    cores = "" if real.host_cores is None else f", {real.host_cores:.2g} cores"
    return f"{real.gradient_bytes / 1e6:.4g} MB, {milliseconds(real.compute_seconds)} ms, {rate(real.bandwidth_bps)}{cores}"


def model(result: Result) -> str:
    """The model with its mark, so that a row that is cited alone says what it is."""
    return f"{result.model} ({result.mark})" if result.mark else result.model


_WHERE = (
    Column("model", model, numeric=False),
    Column("workers", lambda r: str(r.workers)),
    Column("servers", lambda r: str(r.servers)),
    Column("link", link, numeric=False),
    Column("rho", lambda r: _fixed(r.rho, 2)),
    Column("system", lambda r: r.system, numeric=False),
    Column("transport", lambda r: r.transport or MISSING, numeric=False),
)
_STEP = Column("ms/step [low, high]", step)
_BOUND = Column("T* ms", lambda r: milliseconds(r.bound))
_EFFICIENCY = Column("efficiency", efficiency)
_SPEEDUP = Column("speed-up vs DDP", lambda r: _fixed(r.speedup_vs_ddp, 2))
_POSSIBLE = Column("possible", lambda r: _fixed(r.possible_speedup_vs_ddp, 2))
_CPU = Column("CPU s/step", lambda r: _fixed(r.cpu, 3))
_DIFFERENCE = Column("max difference", difference)

#: Columns for the README and the docs.
SHORT = (*_WHERE, _STEP, _BOUND, _EFFICIENCY, _SPEEDUP, _POSSIBLE, _CPU, _DIFFERENCE)

#: All columns.
LONG = (
    *_WHERE,
    Column("ran with", lambda r: r.config or MISSING, numeric=False),
    _STEP,
    Column("steps", lambda r: str(len(r.samples)) if r.samples else MISSING),
    _BOUND,
    Column("T* slowed ms", lambda r: milliseconds(r.slowed_bound)),
    Column("T* without clipping ms", lambda r: milliseconds(r.unclipped_bound)),
    Column("T* with overhead ms", lambda r: milliseconds(r.bound_overhead)),
    Column("FIFO bound ms", lambda r: milliseconds(r.fifo_bound)),
    Column("simulated ms", lambda r: milliseconds(r.simulated_seconds)),
    _EFFICIENCY,
    _SPEEDUP,
    Column("vs tuned DDP", lambda r: _fixed(r.speedup_vs_ddp_tuned, 2)),
    _POSSIBLE,
    Column("exposed ms", lambda r: milliseconds(r.exposed)),
    _CPU,
    _DIFFERENCE,
    Column("stands for", stands_for, numeric=False),
)


#: Markdown's special characters. A bracket alone is not special: only ``](`` makes a link.
_MARKUP = re.compile(r"[\\`*<>|~]|(?<=])\(|\b_|_\b")


def markdown(results: Iterable[Result]) -> str:
    return "\n".join(_table(group) for group in groups(results))


def _table(group: Group) -> str:
    lines = [
        [column.heading for column in SHORT],
        ["---:" if column.numeric else ":---" for column in SHORT],
        *([_escape(column.text(result)) for column in SHORT] for result in group.results),
    ]
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"**{_escape(group.full_title)}**\n\n{rows}"


def _escape(text: str) -> str:
    """Escape markup in ``text``, so that a name shows as it is and a cell remains one cell."""
    return " ".join(_MARKUP.sub(r"\\\g<0>", text).split())
