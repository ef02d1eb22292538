"""Measured step times against simulated ones of the same rows."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .group import systems
from .result import Result
from .style import BOUND_COLOUR, look, new_figure

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
