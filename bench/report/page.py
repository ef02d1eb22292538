"""The page: all results with their plots, in one HTML file that needs no other file."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from commsched import ConfigError

from .. import PROGRAM
from ..harness.figures import styled, to_svg
from ..harness.measure import MIN_SAMPLES, TOLERATED_DIFFERENCE, median_absolute_error
from ..harness.results import lasting
from .figures import compared, distribution_figure, simulation_figure
from .group import Group, groups
from .read import Environment, Read
from .result import Result
from .rho_figure import rho_figure
from .tables import LONG
from .timeline_figure import SLACK_SECONDS, timeline_figure
from .verdict import FIVE, bars, pairs, sentence

_CAPTIONS = (
    (
        rho_figure,
        "Efficiency and speed-up against DDP; bars are 95 % confidence intervals of the median, or "
        f"the range of fewer than {MIN_SAMPLES} steps; systems stand side by side. "
        "A line goes through the fastest setting of each system; faint points are its others.",
    ),
    (distribution_figure, "Every counted step is a point; the box spans the quartiles, its thick line is the median."),
    (
        timeline_figure,
        "One step on rank 0, of each system's fastest setting. Each task of the network has a row, the most urgent on top: "
        "pale while it is ready and not started, in full colour until its average is complete. A priority inversion is a task "
        f"that started while a more urgent one had been ready for at least {1e3 * SLACK_SECONDS:g} ms.",
    ),
)


@dataclass(frozen=True)
class Plot:
    svg: Markup
    caption: str
    label: str


@dataclass
class Machine:
    """An environment, and the times of measurements in it."""

    facts: dict[str, str]
    times: list[str] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def page(read: Read, runs: Sequence[Read] = ()) -> str:
    """The page as HTML. With two ``runs``, whose rows are all in ``read``, it compares the second with the first, and begins
    with a summary of the second. Only one thread may call it at a time, because it changes matplotlib's state."""
    templates = Templates(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    with styled():
        sections = [(group, _plots(f"group{number}", group)) for number, group in enumerate(groups(read.results))]
        summarised = groups(runs[-1].results) if runs else [group for group, _ in sections]
        simulation = simulation_figure(read.results)
        simulation_plot = simulation and _simulation_plot(simulation, read.results)
    return templates.get_template("page.html.jinja").render(
        title=_title(read.results),
        marks=_marks(read.results),
        machines=_machines(read.environments),
        failures=read.failures,
        columns=LONG,
        sections=sections,
        summaries=[(group, sentence(group), bars(group)) for group in summarised],
        five=FIVE,
        pairs=pairs(runs[0].results, runs[1].results) if len(runs) == 2 else [],
        simulation=simulation_plot,
        limit=TOLERATED_DIFFERENCE,
        least_samples=MIN_SAMPLES,
        disturbed=[result for result in read.results if result.disturbed],
        wrong=[result for result in read.results if result.wrong],
    )


def timeline(read: Read) -> str:
    """The timeline of the first group that has one, as the text of an SVG file. Only one thread may call it at a time (see
    :func:`page`).

    Raises:
        ConfigError: no step was recorded.
    """
    with styled():
        figure = next((figure for group in groups(read.results) if (figure := timeline_figure(group)) is not None), None)
        if figure is None:
            raise ConfigError(f"no step was recorded: measure with {PROGRAM} train, which records one of each system")
        return to_svg(figure, "timeline")


def _title(results: Sequence[Result]) -> str:
    models = ", ".join(dict.fromkeys(result.model for result in results))
    marks = ", ".join(_marks(results))
    whole = all(result.mark for result in results)
    return f"commsched benchmark: {models}" + (f" ({marks if whole else f'in part {marks}'})" if marks else "")


def _marks(results: Iterable[Result]) -> list[str]:
    words = [word for result in results for word in result.mark.split(", ") if word]
    return sorted(set(words))


def _plots(name: str, group: Group) -> list[Plot]:
    figures = [(draw(group), draw.__name__, caption) for draw, caption in _CAPTIONS]
    return [
        Plot(Markup(to_svg(figure, f"{name}-{kind}")), caption, f"{kind.replace('_', ' ')}: {group.full_title}")
        for figure, kind, caption in figures
        if figure is not None
    ]


def _simulation_plot(figure: Figure, results: Sequence[Result]) -> Plot:
    off = median_absolute_error((result.median, simulated) for result, simulated in compared(results))
    caption = f"The simulator is off by {off:.1%} of the measured time (median)."
    return Plot(Markup(to_svg(figure, "simulation")), caption, "measured against simulated step times")


def _machines(environments: Iterable[Environment]) -> list[Machine]:
    """The machines of ``environments``; equal environments are merged."""
    found: dict[str, Machine] = {}
    for environment in environments:
        facts = {_words(key): _fact(key, value) for key, value in lasting(environment).items()}
        machine = found.setdefault(repr(facts), Machine(facts))
        machine.times.append(str(environment.get("time", "unknown")))
        machine.loads += [float(load) for load in environment.get("load_average") or ()][:1]
        command = shlex.join(map(str, environment.get("command") or ()))
        machine.commands += [command] if command and command not in machine.commands else []
    return list(found.values())


def _words(key: str) -> str:
    return key.removesuffix("_bytes").replace("_", " ")


def _fact(key: str, value: Any) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return "unknown" if value is None else str(value)
