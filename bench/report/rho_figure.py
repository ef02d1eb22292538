"""Efficiency and speed-up of each system over the ratio of communication to computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, log
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..harness.figures import BOUND_COLOUR, NOTE_COLOUR, new_figure
from .group import Group, look, systems
from .result import Result

#: A value and the ends of its confidence interval.
Estimate = tuple[float, float, float]

_MAX_TICKS = 7
_MIN_FRACTION = 1 / 32
_SIDE_BY_SIDE = 1.025


def rho_figure(group: Group) -> Figure | None:
    """The figure of ``group``; None if no result has both a rho and an efficiency."""
    drawn = [[result for result in at if result.rho is not None and result.efficiency] for at in group.at_rho]
    drawn = [at for at in drawn if at]
    if not drawn:
        return None
    figure = new_figure(3.6)
    left, right = figure.subplots(1, 2)
    _efficiency(left, drawn)
    _speedup(right, drawn)
    for axes in (left, right):
        _rho_axis(axes, [at[0].rho or 1.0 for at in drawn])
    figure.suptitle(group.full_title, fontsize=10)
    handles = {label: handle for axes in (left, right) for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(list(handles.values()), list(handles), loc="outside right center")
    return figure


def best(results: Sequence[Result]) -> Result:
    """The result of the fastest setting of one system."""
    return min(results, key=lambda result: result.median)


def _efficiency(axes: Axes, drawn: Sequence[Sequence[Result]]) -> None:
    axes.axhline(1, color=BOUND_COLOUR, linewidth=1.2, label="bound T*")
    fifo = [
        (at[0].rho, median(result.bound / result.fifo_bound for result in at if result.bound and result.fifo_bound))
        for at in drawn
        if any(result.bound and result.fifo_bound for result in at)
    ]
    if fifo:
        axes.plot(*zip(*fifo), color=NOTE_COLOUR, linestyle=(0, (1, 2)), label="bound of FIFO order")
    _draw(axes, drawn, _efficiency_of)
    axes.set_ylabel("efficiency T*/T (1 is the bound)")
    axes.set_ylim(0, max(1.05, axes.get_ylim()[1]))


def _efficiency_of(result: Result) -> Estimate | None:
    return None if result.efficiency is None else _around(result.efficiency, result)


def _speedup(axes: Axes, drawn: Sequence[Sequence[Result]]) -> None:
    limits = [
        (at[0].rho, max(result.possible_speedup_vs_ddp for result in at if result.possible_speedup_vs_ddp))
        for at in drawn
        if any(result.possible_speedup_vs_ddp for result in at)
    ]
    axes.set_ylabel("speed-up against DDP (times)")
    if not limits:
        axes.text(0.5, 0.5, "DDP was not measured", transform=axes.transAxes, ha="center", color=NOTE_COLOUR)
        axes.set_yticks([])
        return
    axes.axhline(1, color=look("ddp").colour, linewidth=0.8)
    axes.plot(*zip(*limits), color=BOUND_COLOUR, linestyle="--", marker="_", label="possible: T(DDP) / T*")
    _draw(axes, [[result for result in at if result.system != "ddp"] for at in drawn], _speedup_of)
    axes.set_ylim(min(0.9, axes.get_ylim()[0]), max(1.1, axes.get_ylim()[1]))


def _speedup_of(result: Result) -> Estimate | None:
    return None if result.speedup_vs_ddp is None else _around(result.speedup_vs_ddp, result)


def _around(value: float, result: Result) -> Estimate:
    """``value`` with the ends of its interval. It is inversely proportional to the step time."""
    low, high = result.low or result.median, result.high or result.median
    return value, value * result.median / high, value * result.median / low


def _draw(axes: Axes, drawn: Sequence[Sequence[Result]], estimate: Callable[[Result], Estimate | None]) -> None:
    """Draw a line through the fastest setting of each system at each rho, and a faint point for every other setting."""
    names = systems(result for at in drawn for result in at)
    for place, name in enumerate(names):
        aside = _SIDE_BY_SIDE ** (place - (len(names) - 1) / 2)
        own = [[result for result in at if result.system == name and estimate(result)] for at in drawn]
        fastest = [best(results) for results in own if results]
        points = [(result.rho or 1.0, found) for result in fastest if (found := estimate(result))]
        if not points:
            continue
        style = look(name)
        value = [each[0] for _, each in points]
        below, above = [each[0] - each[1] for _, each in points], [each[2] - each[0] for _, each in points]
        axes.errorbar(
            [rho * aside for rho, _ in points],
            value,
            yerr=(below, above),
            color=style.colour,
            marker=style.marker,
            markersize=5,
            linestyle=style.line,
            linewidth=1.3,
            elinewidth=0.9,
            capsize=2,
            label=name,
        )
        others = [result for results in own for result in results if result not in fastest]
        values = [found[0] for result in others if (found := estimate(result))]
        axes.plot([(result.rho or 1.0) * aside for result in others], values, style.marker, color=style.colour, ms=3, alpha=0.4)


def _rho_axis(axes: Axes, values: Sequence[float]) -> None:
    low, high = min(values) / 1.3, max(values) * 1.3
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(_ticks(low, high) or sorted({float(f"{value:.2g}") for value in values})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("rho = communication / computation")
    axes.grid(axis="y")


def _ticks(low: float, high: float) -> list[float]:
    """Ticks at powers of 2, or of 10 if powers of 2 would be too many or too long; empty if they are too few to read a
    scale."""
    for base in (2.0, 10.0) if low > _MIN_FRACTION else (10.0,):
        powers = range(ceil(log(low, base)), floor(log(high, base)) + 1)
        if len(powers) <= _MAX_TICKS:
            return [base**power for power in powers] if len(powers) > 1 else []
    return []
