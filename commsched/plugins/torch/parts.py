"""Where a compiled graph is split into parts. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def beginnings(nbytes: Sequence[int], crossing: Sequence[int | None], part_bytes: int) -> list[int]:
    """Return the nodes of a graph at which its parts begin, but for the first part, which begins at the first node.

    A part has about ``part_bytes``, the first and the last one about half of that. Between half and one and a half times that
    size, the border is where the fewest values cross it: each of them has to be written to memory and read again. In a model of
    equal blocks the borders are therefore at equal places, and many parts are equal, so that a compiler that remembers what it
    has compiled compiles them once.

    Args:
        nbytes: by node, in the order of the graph: the size of the parameters that it is the first to use.
        crossing: by node: how many values cross a border before it. None: no part can begin there.
    """
    behind = [0, *accumulate(reversed(nbytes))]  # behind[n]: the bytes of the last n nodes
    count, total, last = len(nbytes), behind[-1], 0
    found: list[int] = []
    while (rest := total - behind[last]) > part_bytes:
        wanted = min(part_bytes if found else part_bytes // 2, rest - part_bytes // 2)
        borders = range(bisect_left(behind, behind[last] + max(1, wanted // 2), last + 1), count)
        best: tuple[int, int, int, int] | None = None
        for border in borders:
            size, crosses = behind[border] - behind[last], crossing[count - border]
            if size == rest or (best is not None and 2 * size > 3 * wanted):
                break
            if crosses is not None:
                cost = crosses, abs(size - wanted), size, border
                best = cost if best is None else min(best, cost)
        if best is None:
            break
        last = best[-1]
        found.append(count - last)
    return found[::-1]
