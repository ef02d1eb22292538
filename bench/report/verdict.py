"""The result of a report in a few words and numbers, and two runs side by side. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .group import SAME_RHO, Group, look
from .result import Result
from .tables import Column, difference, milliseconds

#: Medians that differ by less than this count as equal in words.
_EQUAL = 0.01

#: A possible speed-up below this counts as none.
_NOTHING = 1.02


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


#: The columns that a reader wants to see first.
FIVE = (
    Column("system", lambda result: result.system, numeric=False),
    Column("ms/step", lambda result: milliseconds(result.median)),
    Column("speed-up vs DDP", lambda result: _times(result.speedup_vs_ddp)),
    Column("possible", lambda result: _times(result.possible_speedup_vs_ddp)),
    Column("max difference", difference),
)


@dataclass(frozen=True)
class Bar:
    """One system's step as shares of the longest bar, in per cent: computation, what is exposed of communication, and where the
    bound lies."""

    system: str
    text: str
    colour: str
    compute: float
    exposed: float
    bound: float | None


def sentence(group: Group) -> str | None:
    """The verdict on commsched by the results of ``group`` at the rho nearest to 1. If commsched has several rows there, the
    middle one counts. None if it has none, or DDP has none."""
    rows = sorted((each for each in group.hardest() if each.system == "commsched"), key=lambda each: each.median)
    ours = rows[len(rows) // 2] if rows else None
    if ours is None or ours.speedup_vs_ddp is None:
        return None
    if ours.wrong:
        return "commsched's weights are WRONG here: its time means nothing."
    speedup, possible = ours.speedup_vs_ddp, ours.possible_speedup_vs_ddp
    if abs(speedup - 1) < _EQUAL:
        text = f"commsched is as fast as DDP ({speedup:.2f} times)"
    else:
        text = f"commsched is {speedup:.2f} times as fast as DDP"
    if ours.speedup_vs_ddp_tuned is not None:
        text += f", and {ours.speedup_vs_ddp_tuned:.2f} times as fast as DDP with tuned buckets"
    if possible is None:
        return f"{text}."
    return f"{text}; {'nothing was to be gained' if possible < _NOTHING else f'{possible:.2f} times is possible'}."


def bars(group: Group) -> list[Bar]:
    """A bar for each result at the rho nearest to 1 of which is known how much is exposed."""
    known = [result for result in group.hardest() if result.exposed is not None]
    longest = max((result.median for result in known), default=0.0)
    return [_bar(result, longest) for result in known] if longest > 0 else []


def _bar(result: Result, longest: float) -> Bar:
    exposed = min(max(result.exposed or 0.0, 0.0), result.median)
    bound = None if result.bound is None else min(100.0, 100 * result.bound / longest)
    computed = result.median - exposed
    text = f"{milliseconds(computed)} + {milliseconds(exposed)} ms"
    return Bar(result.system, text, look(result.system).colour, 100 * computed / longest, 100 * exposed / longest, bound)


@dataclass(frozen=True)
class Pair:
    """The same configuration in two runs. ``change`` is the relative change of the median; ``clear``: the intervals of the two
    medians do not overlap."""

    where: str
    system: str
    before: Result
    after: Result

    @property
    def change(self) -> float:
        return self.after.median / self.before.median - 1

    @property
    def clear(self) -> bool:
        lows = [each.median if each.low is None else each.low for each in (self.before, self.after)]
        highs = [each.median if each.high is None else each.high for each in (self.before, self.after)]
        return lows[0] > highs[1] or lows[1] > highs[0]

    @property
    def verdict(self) -> str:
        if not self.clear:
            return "no clear difference"
        return "faster" if self.change < 0 else "slower"


def pairs(before: Sequence[Result], after: Sequence[Result]) -> list[Pair]:
    """The results that both runs have, in the order of the first. Of several of the same, those with the same sizes belong
    together, and then the first to the other run's first, and so on."""
    left, others = list(after), dict[int, Result]()
    for alike in (lambda one, other: one.config == other.config, lambda one, other: True):
        for place, result in enumerate(before):
            same = [each for each in left if _key(each) == _key(result) and _away(each, result) < math.log(SAME_RHO)]
            same = [each for each in same if alike(result, each)]
            if same and place not in others:
                others[place] = same[0]
                left.remove(same[0])
    several = Counter(map(_key, before))
    return [
        Pair(_where(before[place], other, several[_key(before[place])] > 1), other.system, before[place], other)
        for place, other in sorted(others.items())
    ]


def _where(before: Result, after: Result, one_of_several: bool) -> str:
    rho = "" if before.rho is None else f"rho {before.rho:.3g}"
    size = "" if before.gradient_bytes is None else f"{before.gradient_bytes / 1e6:.3g} MB"
    config = before.config if one_of_several else ""
    if one_of_several and after.config != before.config:
        config += f" (then {after.config})"
    words = (before.model, size, f"{before.workers} workers", before.link or "unknown link", rho, before.transport, config)
    return ", ".join(filter(None, words))


def _key(result: Result) -> tuple[object, ...]:
    """Return the configuration that ``result`` was measured with, without its rho, which is measured too."""
    network = (result.workers, result.servers, result.link, result.transport)
    return (result.model, result.mark, result.clip, result.gradient_bytes, *network, result.system)


def _away(one: Result, other: Result) -> float:
    """How far apart the rho of both are, as a logarithm."""
    if one.rho is None or other.rho is None:
        return 0.0 if one.rho == other.rho else math.inf
    return abs(math.log(one.rho / other.rho))
