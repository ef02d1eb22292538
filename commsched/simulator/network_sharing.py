"""How connections share NICs: with max-min fair rates, which TCP reaches in the long run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .scenario import Cluster

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

#: A resource counts as full when this fraction of its capacity, or less, is left.
_FULL = 1e-12


class Resources(Protocol):
    """The resources that connections share. The matrix of connections and resources is implicit: it is large and regular."""

    capacities: FloatArray

    def used(self, rates: FloatArray) -> FloatArray:
        """Return how much of each resource the connections use at these rates. Linear in the rates."""

    def users(self, resources: BoolArray) -> BoolArray:
        """Return the connections that use at least one of these resources."""

    def held(self, growing: BoolArray) -> BoolArray:
        """Return the connections whose rates must not grow while the rates of ``growing`` grow."""


def fair_rates(connections: int, resources: Resources) -> FloatArray:
    """Return the rate of each connection, in the unit of the capacities, by progressive filling.

    All rates grow together. When a resource is full, the connections that use it stop growing (D. Bertsekas and R. Gallager,
    "Data Networks", section 6.5.2). Connections that are held begin to grow when they are no longer held.

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


#: A row describes the connections between the workers of one class and one shard. ``worker`` is the index of the class.
#: ``is_push`` says whether they carry a push or a reply. ``members`` is how many workers of the class cross the network; their
#: connections are equal and do the same.
CONNECTION = np.dtype([("worker", np.int64), ("shard", np.int64), ("is_push", np.bool_), ("members", np.int64)], align=True)

#: An array of :data:`CONNECTION`.
Connections = NDArray[np.void]


class Hosts:
    """The rates of the NICs, and the worker class of each shard's host (-1: the shard has its own machine)."""

    def __init__(self, cluster: Cluster) -> None:
        self.class_rates = np.array([each.rate_bytes_per_second for each in cluster.workers])
        self.class_counts = np.array([each.count for each in cluster.workers])
        if cluster.server_rates:
            self.class_of_shard = np.full(len(cluster.server_rates), -1)
            self.shard_rates = np.array(cluster.server_rates)
        else:
            self.class_of_shard = np.repeat(np.arange(len(self.class_rates)), self.class_counts)
            self.shard_rates = self.class_rates[self.class_of_shard]

    def members_across(self, worker: int, shard: int) -> int:
        """Return how many workers of a class reach ``shard`` through the network: all but the worker that hosts it."""
        return int(self.class_counts[worker]) - int(self.class_of_shard[shard] == worker)

    def path_rate(self, worker: int, shard: int) -> float:
        """Return the rate of the slower NIC of a connection, in bytes per second."""
        return min(float(self.class_rates[worker]), float(self.shard_rates[shard]))


class SharedNics:
    """The NICs that some connections use, as ``Resources``.

    In each class, one member stands for all members that host no shard in use, if there are any. It carries one connection of
    each push and reply of its class. The host of a shard carries the connections of all members to that shard. If the host is
    also a worker, it carries in addition its own connections to and from other shards. The resources are the egress of each
    class, the ingress of each class, the egress of each host and the ingress of each host.

    Args:
        pushes_first: a worker sends its shard's replies only with the egress that its own pushes leave.
    """

    def __init__(self, connections: Connections, hosts: Hosts, pushes_first: bool = False) -> None:
        self._pushes_first = pushes_first
        self._worker, self._is_push, self._members = (connections[name] for name in ("worker", "is_push", "members"))
        self._classes = len(hosts.class_rates)
        shards, self._place = np.unique(connections["shard"], return_inverse=True)
        self._hosts = len(shards)
        self._host_class = hosts.class_of_shard[shards]
        self._is_worker = self._host_class >= 0
        in_use = np.bincount(self._host_class[self._is_worker], minlength=self._classes)
        self._has_others = hosts.class_counts > in_use
        self._to_own_class = self._host_class[self._place] == self._worker
        rates = hosts.class_rates, hosts.class_rates, hosts.shard_rates[shards], hosts.shard_rates[shards]
        self.capacities = np.concatenate(rates)

    def used(self, rates: FloatArray) -> FloatArray:
        pushes = self._of_direction(np.where(self._is_push, rates, 0.0))
        replies = self._of_direction(np.where(self._is_push, 0.0, rates))
        egress, ingress = pushes[1] + replies[2], pushes[2] + replies[1]
        return np.concatenate([pushes[0], replies[0], egress, ingress])

    def _of_direction(self, rates: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the load on the member that stands for each class, on each host as a worker, and on each host as a shard."""
        by_class = np.bincount(self._worker, rates, self._classes)
        own = np.bincount(self._place, np.where(self._to_own_class, rates, 0.0), self._hosts)
        as_member = np.where(self._is_worker, by_class[self._host_class] - own, 0.0)
        as_shard: FloatArray = np.bincount(self._place, rates * self._members, self._hosts).astype(np.float64)
        return np.where(self._has_others, by_class, 0.0), as_member, as_shard

    def users(self, resources: BoolArray) -> BoolArray:
        of_classes, of_hosts = resources[: 2 * self._classes], resources[2 * self._classes :]
        class_egress, class_ingress = of_classes[: self._classes], of_classes[self._classes :]
        host_egress, host_ingress = of_hosts[: self._hosts], of_hosts[self._hosts :]
        push = self._users(class_egress & self._has_others, host_egress, host_ingress)
        reply = self._users(class_ingress & self._has_others, host_ingress, host_egress)
        return np.where(self._is_push, push, reply)

    def held(self, growing: BoolArray) -> BoolArray:
        if not self._pushes_first:
            return np.zeros_like(growing)
        leaving = self._of_direction((growing & self._is_push).astype(float))[1]  # growing pushes of each shard's host
        found: BoolArray = ~self._is_push & (leaving[self._place] > 0.5)
        return found

    def _users(self, classes: BoolArray, hosts_as_member: BoolArray, hosts_as_shard: BoolArray) -> BoolArray:
        hosts = np.bincount(self._host_class[hosts_as_member & self._is_worker], minlength=self._classes)
        others = hosts[self._worker] - (hosts_as_member[self._place] & self._to_own_class)
        found: BoolArray = classes[self._worker] | (others > 0) | hosts_as_shard[self._place]
        return found


#: Limits of the cache: the connections in one set (larger sets hardly occur again), and the number of sets.
_MAX_CONNECTIONS = 64
_MAX_SETS = 8192


class FairShareCache:
    """Computes how connections share the NICs of ``cluster``, and remembers the rates.

    One cache may serve many simulations of clusters with the same NICs.

    Args:
        pushes_first: see ``Rules``.
    """

    def __init__(self, cluster: Cluster, pushes_first: bool = True) -> None:
        self.hosts = Hosts(cluster)
        self._pushes_first = pushes_first
        self._remembered: dict[frozenset[tuple[int, int, bool]], dict[tuple[int, int, bool], float]] = {}

    def rates(self, keys: Sequence[tuple[int, int, bool]], connections: Connections) -> FloatArray:
        """Return the rate of each of ``connections`` in bytes per second. ``keys`` hold their worker, shard and direction."""
        if len(keys) > _MAX_CONNECTIONS:
            return self._rates(connections)
        found = self._remembered.get(together := frozenset(keys))
        if found is None:
            found = dict(zip(keys, self._rates(connections).tolist()))
            if len(self._remembered) < _MAX_SETS:
                self._remembered[together] = found
        return np.array([found[key] for key in keys])

    def _rates(self, connections: Connections) -> FloatArray:
        return fair_rates(len(connections), SharedNics(connections, self.hosts, self._pushes_first))
