"""Grouping of results into figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..systems import SYSTEMS
from .result import Result

#: Measured values of rho that differ by less than this factor count as equal.
SAME_RHO = 1.1

_OTHER_COLOURS = ("#5D3A9B", "#40B0A6", "#994455", "#4B6A00")


@dataclass(frozen=True)
class Look:
    colour: str
    marker: str
    line: str


@dataclass(frozen=True)
class Group:
    """One model on one kind of cluster, over several values of rho. ``at_rho`` has the results of each value, in increasing
    order."""

    title: str
    mark: str
    at_rho: Sequence[Sequence[Result]]

    @property
    def results(self) -> list[Result]:
        return [result for at in self.at_rho for result in at]

    @property
    def full_title(self) -> str:
        return f"{self.title} ({self.mark})" if self.mark else self.title

    def hardest(self) -> Sequence[Result]:
        """The results of the rho nearest to 1, where the order of sending matters most."""
        return min(self.at_rho, key=lambda at: abs(math.log(at[0].rho)) if at[0].rho else math.inf)


def groups(results: Iterable[Result]) -> list[Group]:
    """``results`` grouped by model, cluster and kind: measured, EMULATED or simulated."""
    found: dict[tuple[str, str], list[Result]] = {}
    for result in sorted(results, key=_order):
        found.setdefault((_title(result), result.mark), []).append(result)
    return [Group(title, mark, _by_rho(members)) for (title, mark), members in found.items()]


def systems(results: Iterable[Result]) -> list[str]:
    """The systems in ``results``, in the order used everywhere."""
    return sorted({result.system for result in results}, key=system_order)


def system_order(name: str) -> tuple[float, str]:
    """The place of a system in plots and tables. Systems without a file in ``bench/systems`` follow by name."""
    return (SYSTEMS[name].order if name in SYSTEMS else math.inf, name)


def look(system: str) -> Look:
    """The look of a system, which is the same in every plot of every report."""
    if system in SYSTEMS:
        return Look(SYSTEMS[system].colour, SYSTEMS[system].marker, "-")
    number = sum(system.encode())
    return Look(_OTHER_COLOURS[number % 4], "p8*d"[number // 4 % 4], ":")


def _order(result: Result) -> tuple[object, ...]:
    where = (result.mark, result.model, result.gradient_bytes or 0.0, result.workers, result.servers, _network(result))
    return (*where, result.rho or 0.0, system_order(result.system), result.config)


def _title(result: Result) -> str:
    size = "" if result.gradient_bytes is None else f"{result.gradient_bytes / 1e6:.3g} MB of gradients"
    servers = f"{result.servers} servers" if result.servers else "no separate servers"
    return ", ".join(filter(None, (result.model, size, f"{result.workers} workers", servers, _network(result))))


def _network(result: Result) -> str:
    """The part of the key that describes the network. EMULATED layers get a rho at one rate. With real layers the rate changes
    rho, so results of different rates are in one group."""
    if result.simulated:
        return ""
    if result.emulated or not result.link:
        return result.link or "unknown link"
    return result.link.partition(" ")[2] or result.link


def _by_rho(results: Sequence[Result]) -> list[list[Result]]:
    """``results`` grouped by rho. They must be in order of rho; results without a rho come first."""
    together: list[list[Result]] = []
    for result in results:
        first = together[-1][0].rho if together else None
        near = first == result.rho if first is None or result.rho is None else result.rho < first * SAME_RHO
        if together and near:
            together[-1].append(result)
        else:
            together.append([result])
    return [sorted(at, key=lambda result: system_order(result.system)) for at in together]
