"""The regret of each search against the best configuration of the grid, over its trials and over their training time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

from ..harness.figures import NOTE_COLOUR, new_figure
from .comparison import WITHIN

_HEIGHT = 3.2

#: The scale is linear up to this value and logarithmic above it.
_LINEAR_PERCENT = 5
_TICKS = (0, 1, 2, 3, 5, 10, 20, 50, 100, 200)

_COLOURS = {
    "bayes+model": "#0072B2",
    "bayes": "#56B4E9",
    "random": "#009E73",
    "grid": "#E69F00",
    "sgd": "#CC79A7",
    "paper": "#000000",
}
_OTHER_COLOUR = "#8A5A2B"


def regret_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A line of panels for each replayed case. The line of a search is the median over its seeds, and its area is the range.

    Args:
        rows: the rows of ``kind`` "replayed".
    """
    cases = list(dict.fromkeys(row["title"] for row in rows))
    figure = new_figure(_HEIGHT * len(cases) + 0.4)
    panels = figure.subplots(len(cases), 2, squeeze=False, sharey="row")
    for (left, right), case in zip(panels, cases):
        own = [row for row in rows if row["title"] == case]
        for row in own:
            _draw(left, right, row)
        for axes in (left, right):
            for within in WITHIN:
                axes.axhline(100 * within, color=NOTE_COLOUR, linewidth=0.7, linestyle=":")
            axes.set_yscale("symlog", linthresh=_LINEAR_PERCENT, linscale=1.5)
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_locator(FixedLocator(_TICKS))
            axes.yaxis.set_major_formatter(_plain)
            axes.grid(axis="y")
        left.set(xlabel="trials", ylabel="slower than the grid's best (%)")
        right.set(xlabel="seconds of training", xscale="log")
        right.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        right.xaxis.set_major_formatter(_plain)
        right.xaxis.set_minor_formatter(NullFormatter())
        left.set_title(case, loc="left")
    handles = {label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(list(handles.values()), list(handles), loc="outside right center")
    figure.suptitle("REPLAYED over measured windows (EMULATED models)", fontsize=10)
    return figure


def _plain(value: float, place: int | None = None) -> str:
    return f"{value:g}"


def _draw(left: Axes, right: Axes, row: Mapping[str, Any]) -> None:
    colour = _COLOURS.get(row["searcher"], _OTHER_COLOUR)
    curves = row["curves"]
    longest = max(len(curve) for curve in curves)
    # A search that has ended keeps its last named configuration.
    padded = [[*curve, *[curve[-1]] * (longest - len(curve))] for curve in curves]
    steps = list(zip(*padded))
    regrets = [[100 * point["regret"] for point in at] for at in steps]
    middle = list(map(median, regrets))
    low, high = list(map(min, regrets)), list(map(max, regrets))
    seconds = [median(point["seconds"] for point in at) for at in steps]
    for axes, places in ((left, list(range(1, longest + 1))), (right, seconds)):
        axes.step(places, middle, where="post", color=colour, linewidth=1.4, label=row["searcher"])
        axes.fill_between(places, low, high, step="post", color=colour, alpha=0.1, linewidth=0)
