"""The distribution of the times of counted steps, and measured step times against simulated ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ..harness.figures import BOUND_COLOUR, NOTE_COLOUR, new_figure
from .group import Group, look, systems
from .result import Result

_COLUMNS = 3
_GOLDEN = 0.618034

#: Attribute, name, colour, line.
_BOUNDS: tuple[tuple[str, str, str, Literal["-", ":"]], ...] = (
    ("bound", "bound T*", BOUND_COLOUR, "-"),
    ("fifo_bound", "bound of FIFO order", NOTE_COLOUR, ":"),
)


def distribution_figure(group: Group) -> Figure | None:
    """The figure of ``group``; None if no result has the times of several steps."""
    drawn = [[result for result in at if len(result.samples) > 1] for at in group.at_rho]
    drawn = [at for at in drawn if at]
    if not drawn:
        return None
    columns = min(_COLUMNS, len(drawn))
    rows = ceil(len(drawn) / columns)
    tallest = max(map(len, drawn))
    figure = new_figure(0.8 + rows * (0.7 + 0.28 * tallest))
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, at in zip(panels, drawn):
        _panel(axes, at)
    for axes in panels[len(drawn) :]:
        axes.set_axis_off()
    figure.suptitle(group.full_title, fontsize=10)
    keys = [Line2D([], [], color=colour, linestyle=line, label=text) for _, text, colour, line in _BOUNDS]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys))
    return figure


def _panel(axes: Axes, results: Sequence[Result]) -> None:
    for place, result in enumerate(results):
        for attribute, _, colour, line in _BOUNDS:
            if (bound := getattr(result, attribute)) is not None:
                # The bound is drawn in its own row only, because a system that uses other hosts has another bound.
                axes.plot([1e3 * bound] * 2, [place - 0.5, place + 0.5], color=colour, linestyle=line, linewidth=1)
        style = look(result.system)
        times = [1e3 * seconds for seconds in result.samples]
        # The golden ratio spreads the points evenly, and in the same way in every report.
        heights = [place + ((index * _GOLDEN) % 1 - 0.5) * 0.5 for index in range(len(times))]
        axes.boxplot(
            [times],
            positions=[place],
            orientation="horizontal",
            widths=0.62,
            showfliers=False,
            whis=0,
            showcaps=False,
            boxprops={"color": style.colour, "linewidth": 0.9},
            medianprops={"color": style.colour, "linewidth": 2},
        )
        axes.plot(times, heights, style.marker, color=style.colour, markersize=3, alpha=0.6, markeredgewidth=0)
    axes.set_yticks(range(len(results)), [_name(result, results) for result in results])
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.grid(axis="x")
    axes.margins(x=0.08)
    axes.set_xlabel("ms per step")
    rho = results[0].rho
    axes.set_title("" if rho is None else f"rho {rho:.2g}", loc="left")


def _name(result: Result, beside: Sequence[Result]) -> str:
    alone = sum(other.system == result.system for other in beside) == 1
    return result.system if alone or not result.config else f"{result.system}, {result.config}"


_BAND = 0.05


def simulation_figure(results: Sequence[Result]) -> Figure | None:
    """The figure; None if no measured row was simulated."""
    pairs = compared(results)
    if not pairs:
        return None
    figure = new_figure(4.6)
    axes = figure.subplots()
    axes.set_aspect("equal")
    times = [1e3 * seconds for result, simulated in pairs for seconds in (result.median, simulated)]
    ends = [min(times) / 1.2, max(times) * 1.2]
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.fill_between(ends, [(1 - _BAND) * end for end in ends], [(1 + _BAND) * end for end in ends], color="#E8E8E8", lw=0)
    axes.plot(ends, ends, color=BOUND_COLOUR, linewidth=0.8, label=f"equal, and {_BAND:.0%} around it")
    for name in systems(result for result, _ in pairs):
        own = [(1e3 * result.median, 1e3 * simulated) for result, simulated in pairs if result.system == name]
        style = look(name)
        axes.plot(*zip(*own), style.marker, color=style.colour, markersize=5, alpha=0.8, label=name)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    marks = sorted({result.mark for result, _ in pairs if result.mark})
    axes.set(xlabel="measured ms per step", ylabel="simulated ms per step")
    axes.set_title("measured against simulated" + (f" ({'; '.join(marks)})" if marks else ""), loc="left")
    axes.legend(loc="lower right")
    return figure


def compared(results: Sequence[Result]) -> list[tuple[Result, float]]:
    """The measured rows that were simulated too, with the simulated seconds."""
    return [(each, each.simulated_seconds) for each in results if each.simulated_seconds and not each.simulated]
