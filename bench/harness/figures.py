"""The style of the plots: each system has one colour, marker and line everywhere, and SVG is made for embedding in a page.

Most colours are from M. Okabe and K. Ito ("Color Universal Design", 2008); people with any colour vision can distinguish them.
Markers distinguish systems in print without colour. Vermillion is reserved for priority inversions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

INVERSION_COLOUR = "#D55E00"
BOUND_COLOUR = "#000000"
NOTE_COLOUR = "#666666"

#: Width of a figure in inches, equal to the width of the page.
WIDTH = 10.5

_SETTINGS: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.0,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.linewidth": 0.8,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # names come from files: a dollar sign is only a character
    "svg.fonttype": "none",
}
_TAG = re.compile(r"<[^>]*>")
_IDENTIFIER = re.compile(r'(\bid="|href="#|url\(#)')
#: The digits of a number after its second decimal: a hundredth of a point is not seen.
_UNSEEN_DIGITS = re.compile(r"(?<=\.\d\d)\d+")
_NUMBER = r"(-?[\d.]+)"
_RECTANGLE = re.compile(rf"M {_NUMBER} {_NUMBER} \nL {_NUMBER} \2 \nL \3 {_NUMBER} \nL \1 \4 \nz\n")


@contextmanager
def styled() -> Iterator[None]:
    """Make and write figures in this block. Only one thread may use it at a time, because it changes state of the process."""
    with matplotlib.rc_context(_SETTINGS):
        yield


def new_figure(height: float) -> Figure:
    """A new figure; ``height`` is in inches."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an ``<svg>`` element. Its identifiers start with ``name``, so that one page can hold several. Numbers and
    rectangles are written in short, because a step has thousands of them."""
    text = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    return _TAG.sub(lambda tag: _short(_IDENTIFIER.sub(rf"\g<1>{name}-", tag[0])), svg)


def _short(tag: str) -> str:
    return _RECTANGLE.sub(r"M\1 \2H\3V\4H\1z", _UNSEEN_DIGITS.sub("", tag))
