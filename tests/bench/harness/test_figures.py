from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from matplotlib.patches import PathPatch
from matplotlib.path import Path

from bench.harness.figures import new_figure, styled, to_svg


def corners(path: str) -> list[tuple[float, float]]:
    """The corners of each rectangle of a path of M, H, V and z."""
    found = []
    for x, y, right, top, left in re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H([\d.]+)z", path):
        assert left == x
        found += [(float(x), float(y)), (float(right), float(top))]
    return found


def test_rectangles_are_short_and_where_they_were() -> None:
    bars = [(0, 1, 0, 1), (1, 2.5, 1, 2), (2.123456, 3, 0, 0.333333)]
    points = [
        point
        for left, right, low, high in bars
        for point in ((left, low), (right, low), (right, high), (left, high), (left, low))
    ]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(bars)
    with styled():
        figure = new_figure(2)
        axes = figure.subplots()
        axes.set(xlim=(0, 4), ylim=(0, 4))
        axes.add_patch(PathPatch(Path(points, codes), gid="bars"))
        svg = to_svg(figure, "one")
        wanted = [
            axes.transData.transform(corner) for left, right, low, high in bars for corner in ((left, low), (right, high))
        ]
    [group] = [each for each in ElementTree.fromstring(svg).iter() if each.get("id") == "one-bars"]
    found = corners(next(iter(group)).attrib["d"])
    points_per_pixel = 72 / figure.dpi
    assert len(found) == 6
    for (x, y), (pixels_right, pixels_up) in zip(found, wanted, strict=True):
        assert x == pytest.approx(points_per_pixel * pixels_right, abs=0.011)
        assert y == pytest.approx(72 * 2 - points_per_pixel * pixels_up, abs=0.011)
    assert not re.search(r'="[^"]*\.\d{3}', svg)
