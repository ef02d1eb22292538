"""The timeline of one step of each system: computation, network and waits, with priority inversions marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import not_

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from ..harness.figures import BOUND_COLOUR, INVERSION_COLOUR, new_figure
from .group import Group, look, systems
from .result import Result, Span
from .rho_figure import best

_COMPUTE_COLOURS = {"backward": "#8C8C8C", "forward": "#BDBDBD"}

#: Heights of the tracks, from top to bottom.
_HEIGHTS = {"backward": 0.8, "forward": 0.8, "network": 4.5, "wait": 0.8}
_GAP = 0.2

#: Share of its row that a task fills, unless there are many tasks.
_FILLED = 0.88
_MANY = 40

#: Share of the axis for the black head of an inverted task, which marks it in print without colours.
_HEAD = 0.003
_PALE = 0.22

#: Start, stop, bottom, height.
Bar = tuple[float, float, float, float]


def timeline_figure(group: Group) -> Figure | None:
    """The figure of the fastest setting of each system at the rho nearest to 1. None if no step was recorded."""
    recorded = [result for result in group.hardest() if result.timeline]
    if not recorded:
        return None
    drawn = [best([result for result in recorded if result.system == name]) for name in systems(recorded)]
    figure = new_figure(0.9 + 1.9 * len(drawn))
    panels = figure.subplots(len(drawn), 1, squeeze=False, sharex=True).ravel()
    end = max(max(span.stop for span in result.timeline) for result in drawn)
    end = max([end, *(result.bound for result in drawn if result.bound)])
    for axes, result in zip(panels, drawn):
        _panel(axes, result, end)
    panels[-1].set_xlabel("ms since the step began")
    panels[-1].set_xlim(0, 1e3 * end * 1.01)
    rho = drawn[0].rho
    figure.suptitle(group.full_title + ("" if rho is None else f", rho {rho:.2g}"), fontsize=10)
    figure.legend(handles=_keys(), loc="outside lower center", ncols=6)
    return figure


def _panel(axes: Axes, result: Result, end: float) -> None:
    tasks = network_tasks(result.timeline)
    inverted = inversions(tasks)
    bottoms = _bottoms()
    for track, colour in _COMPUTE_COLOURS.items():
        bars = [_bar(span, bottoms[track], _HEIGHTS[track]) for span in result.timeline if span.track == track]
        _draw(axes, bars, colour)
    waits = [_bar(span, bottoms["wait"], _HEIGHTS["wait"]) for span in result.timeline if span.track == "wait"]
    _draw(axes, waits, "white", hatch="////", edge="#444444")
    _network(axes, tasks, inverted, bottoms["network"], look(result.system).colour, end)
    if result.bound is not None:
        axes.axvline(1e3 * result.bound, color=BOUND_COLOUR, linewidth=1, linestyle="--")
    axes.set_yticks([bottoms[track] + _HEIGHTS[track] / 2 for track in _HEIGHTS], list(_HEIGHTS))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(0, sum(_HEIGHTS.values()) + _GAP * (len(_HEIGHTS) + 1))
    axes.set_title(_title(result, tasks, inverted), loc="left")


def _title(result: Result, tasks: Sequence[Span], inverted: Sequence[Span]) -> str:
    system = f"{result.system} ({result.config})" if result.config else result.system
    prioritised = with_priority(tasks)
    if not tasks:
        state = "its network was not recorded"
    elif not prioritised:
        state = "sends without priorities"
    elif any(task.ready is None for task in prioritised):
        state = "priority inversions were not recorded"
    else:
        state = f"{len(inverted)} of {len(prioritised)} tasks are priority inversions"
    return f"{system}: {state}"


def _bottoms() -> dict[str, float]:
    found, bottom = {}, _GAP
    for track in reversed(_HEIGHTS):
        found[track] = bottom
        bottom += _HEIGHTS[track] + _GAP
    return found


def _network(axes: Axes, tasks: Sequence[Span], inverted: Sequence[Span], bottom: float, colour: str, end: float) -> None:
    """Draw a row for each task, the most urgent on top. A task is pale while it waits to be started."""
    height = _HEIGHTS["network"] / max(1, len(tasks))
    lows = [bottom + (len(tasks) - 1 - row) * height for row in _rows(tasks)]
    filled = height * (_FILLED if len(tasks) <= _MANY else 1)
    waiting = [(1e3 * task.ready, 1e3 * task.start, low, filled) for task, low in zip(tasks, lows) if task.ready is not None]
    _draw(axes, waiting, colour, alpha=_PALE, line=0)
    bars = [_bar(task, low, filled) for task, low in zip(tasks, lows)]
    wrong = [task in inverted for task in tasks]
    wrong_bars = list(compress(bars, wrong))
    _draw(axes, list(compress(bars, map(not_, wrong))), colour, line=0)
    _draw(axes, wrong_bars, INVERSION_COLOUR, line=0)
    _draw(axes, [(start, start + 1e3 * _HEAD * end, low, high) for start, _, low, high in wrong_bars], "black", line=0)


def _rows(tasks: Sequence[Span]) -> list[int]:
    """The row of each task: first by priority, then the tasks without a priority. Of these, later tasks are nearer to the top,
    because the gradients of the first layers come last."""
    order = sorted(
        range(len(tasks)),
        key=lambda index: (tasks[index].priority is None, tasks[index].priority or 0, -tasks[index].start),
    )
    rows = [0] * len(tasks)
    for row, index in enumerate(order):
        rows[index] = row
    return rows


def _bar(span: Span, bottom: float, height: float) -> Bar:
    return 1e3 * span.start, 1e3 * span.stop, bottom, height


def _draw(
    axes: Axes,
    bars: Sequence[Bar],
    colour: str,
    *,
    hatch: str | None = None,
    edge: str = "white",
    line: float = 0.3,
    alpha: float | None = None,
) -> None:
    """Draw all bars as one path: a step may have a thousand tasks, and each element adds some hundred bytes to a page."""
    if not bars:
        return
    corners = [
        corner
        for start, stop, low, high in bars
        for corner in ((start, low), (stop, low), (stop, low + high), (start, low + high), (start, low))
    ]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(bars)
    axes.add_patch(PathPatch(Path(corners, codes), facecolor=colour, edgecolor=edge, linewidth=line, hatch=hatch, alpha=alpha))


def _keys() -> list[Patch]:
    return [
        *(Patch(facecolor=colour, label=track) for track, colour in _COMPUTE_COLOURS.items()),
        Patch(facecolor=INVERSION_COLOUR, label="priority inversion (black head)"),
        Patch(facecolor="#444444", alpha=_PALE, label="ready, not started"),
        Patch(facecolor="white", edgecolor="#444444", hatch="////", linewidth=0.3, label="wait"),
        Patch(facecolor="none", edgecolor=BOUND_COLOUR, linestyle="--", label="bound T*"),
    ]


#: A task is chosen some time before its start is recorded. A task that becomes ready in between does not count, because it came
#: too late for the choice.
SLACK_SECONDS = 1e-3


def network_tasks(timeline: Iterable[Span]) -> list[Span]:
    """The network tasks of ``timeline``, sorted by start."""
    return sorted((span for span in timeline if span.track == "network"), key=lambda span: span.start)


def with_priority(tasks: Iterable[Span]) -> list[Span]:
    """The tasks that have a priority; the buckets of a system without priorities, for example, are left out."""
    return [task for task in tasks if task.priority is not None]


def inversions(tasks: Sequence[Span]) -> list[Span]:
    """The tasks that started while a more urgent task was ready and waiting. ``tasks`` are sorted by start.

    A task without a ready time or a priority is ignored.
    """
    judged = [(task, task.priority, task.ready) for task in tasks if task.priority is not None and task.ready is not None]
    return [
        task
        for index, (task, priority, _) in enumerate(judged)
        if any(
            other_priority < priority and other_ready + SLACK_SECONDS <= task.start < other.start
            for other, other_priority, other_ready in judged[index + 1 :]
        )
    ]
