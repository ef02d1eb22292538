"""The rates of connections that are under way together, remembered: those of few workers meet again and again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .fair_share import Floats, fair_rates
from .nics import Connections, Hosts, SharedNics
from .scenario import Cluster

#: Of larger sets nothing is remembered, they hardly come again; nor of more sets than this.
_MOST_CONNECTIONS = 64
_MOST_SETS = 8192


class Shares:
    """How connections share the NICs of ``cluster``. One may serve many simulations of clusters with the same NICs.

    Args:
        pushes_first: see ``Rules``.
    """

    def __init__(self, cluster: Cluster, pushes_first: bool = True) -> None:
        self.hosts = Hosts(cluster)
        self._pushes_first = pushes_first
        self._remembered: dict[frozenset[tuple[int, int, bool]], dict[tuple[int, int, bool], float]] = {}

    def rates(self, keys: Sequence[tuple[int, int, bool]], connections: Connections) -> Floats:
        """Bytes per second of each of ``connections``, whose worker, shard and direction are ``keys``."""
        if len(keys) > _MOST_CONNECTIONS:
            return self._rates(connections)
        found = self._remembered.get(together := frozenset(keys))
        if found is None:
            found = dict(zip(keys, self._rates(connections).tolist()))
            if len(self._remembered) < _MOST_SETS:
                self._remembered[together] = found
        return np.array([found[key] for key in keys])

    def _rates(self, connections: Connections) -> Floats:
        return fair_rates(len(connections), SharedNics(connections, self.hosts, self._pushes_first))
