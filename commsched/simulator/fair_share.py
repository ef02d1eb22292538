"""Max-min fair rates: how connections share NICs, as TCP's do in the long run. Pure."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

#: A resource is full when so small a part of it is left.
_FULL = 1e-12


class Resources(Protocol):
    """What connections share. The matrix of who uses what is not written out: it would be large, and is regular."""

    capacities: Floats

    def used(self, rates: Floats) -> Floats:
        """How much of each resource connections with these rates take; linear in the rates."""
        ...

    def users(self, resources: Flags) -> Flags:
        """The connections that use at least one of these resources."""
        ...

    def held(self, growing: Flags) -> Flags:
        """The connections that get nothing more while these are growing."""
        ...


def fair_rates(connections: int, resources: Resources) -> Floats:
    """The rate of each connection, in the unit of the capacities, by progressive filling.

    All rates grow together; when a resource is full, those that use it stop (D. Bertsekas and R. Gallager, "Data Networks",
    section 6.5.2). Those that are held begin when they no longer are.

    Raises:
        ValueError: a connection uses no resource, so its rate has no limit.
    """
    rates = np.zeros(connections)
    used = resources.used(rates)
    unstopped = np.ones(connections, bool)
    while unstopped.any():
        growing = unstopped & ~resources.held(unstopped)
        demand = resources.used(growing.astype(float))
        left = np.where(used < resources.capacities * (1 - _FULL), resources.capacities - used, 0.0)
        room = np.divide(left, demand, out=np.full_like(left, np.inf), where=demand > 0.5)  # every use weighs at least 1
        least = room.min(initial=np.inf)
        if least == np.inf:
            raise ValueError("a connection uses no resource")
        rates[growing] += least
        used += least * demand
        unstopped &= ~(growing & resources.users(room <= least * (1 + _FULL)))
    return rates
