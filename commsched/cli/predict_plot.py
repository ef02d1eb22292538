"""The plot of ``commsched predict --plot``: step times over the rate of the network cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ..core.errors import ConfigError

#: The endings of names of files that can be drawn.
FORMATS = frozenset(Figure().canvas.get_supported_filetypes())

#: Key in a row, name, colour, marker.
_LINES = (
    ("ddp", "PyTorch DDP", "#999999", "s"),
    ("commsched", "commsched", "#0072B2", "o"),
    ("bound", "bound", "#222222", "_"),
)


def draw(model: str, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw ``rows`` (``predict.answer``) to ``path``, whose suffix says the format: a panel for each number of workers.

    Raises:
        ConfigError: there is no such format, or the file cannot be written.
    """
    workers = sorted({row["workers"] for row in rows})
    with rc_context({"svg.hashsalt": "commsched", "font.size": 9, "text.parse_math": False}):
        figure = Figure(figsize=(1 + 3.2 * len(workers), 3.6), layout="constrained")
        panels = figure.subplots(1, len(workers), squeeze=False, sharey=True)[0]
        for axes, count in zip(panels, workers):
            own = sorted((row for row in rows if row["workers"] == count), key=lambda row: float(row["gigabits"]))
            for key, name, colour, marker in _LINES:
                axes.plot([row["gigabits"] for row in own], [row[key] for row in own], f"-{marker}", color=colour, label=name)
            axes.set(xscale="log", xlabel="Gbit/s of each network card")
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.5, 5.0)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"{count} workers", loc="left")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("ms per step")
        panels[-1].legend(loc="best")
        figure.suptitle(f"{model} (simulated)", fontsize=10)
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--plot {path}: {error}") from error
