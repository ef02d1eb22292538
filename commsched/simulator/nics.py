"""Who uses which NIC: the connections of worker classes and shards. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .fair_share import Flags, Floats
from .scenario import Cluster

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Connections:
    """Parallel arrays, an item for each: between each of worker class ``worker`` and ``shard``, a push or a reply.

    ``members`` of the class cross the network; equal connections that do the same.
    """

    worker: Integers
    shard: Integers
    is_push: Flags
    members: Integers

    def __len__(self) -> int:
        return len(self.worker)

    def joined(self, other: Connections) -> Connections:
        return Connections(
            np.concatenate([self.worker, other.worker]),
            np.concatenate([self.shard, other.shard]),
            np.concatenate([self.is_push, other.is_push]),
            np.concatenate([self.members, other.members]),
        )

    def __getitem__(self, chosen: Flags) -> Connections:
        return Connections(self.worker[chosen], self.shard[chosen], self.is_push[chosen], self.members[chosen])


class Hosts:
    """Rates of the NICs, and which worker class each shard's host is of (-1: a machine of its own)."""

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
        """How many of a class reach ``shard`` through the network: all but the one that hosts it."""
        return int(self.class_counts[worker]) - int(self.class_of_shard[shard] == worker)

    def path_rate(self, worker: int, shard: int) -> float:
        """Of the slower NIC of a connection."""
        return min(float(self.class_rates[worker]), float(self.shard_rates[shard]))


class SharedNics:
    """The NICs that some connections use; see ``Resources``.

    For each class one member that hosts no shard in use stands for all of those, if there is one: it carries one
    connection of each push and reply of its class. The host of a shard carries those of all members, and if it is a worker
    too, also its own to and from other shards. Resources are the egress and ingress of the classes, then of the hosts.

    Args:
        pushes_first: a worker sends its shard's replies with what its own pushes leave of its egress.
    """

    def __init__(self, connections: Connections, hosts: Hosts, pushes_first: bool = False) -> None:
        self._pushes_first = pushes_first
        self._worker = connections.worker
        self._is_push = connections.is_push
        self._members = connections.members
        self._classes = len(hosts.class_rates)
        shards, self._place = np.unique(connections.shard, return_inverse=True)
        self._hosts = len(shards)
        self._host_class = hosts.class_of_shard[shards]
        self._is_worker = self._host_class >= 0
        in_use = np.bincount(self._host_class[self._is_worker], minlength=self._classes)
        self._has_others = hosts.class_counts > in_use
        self._to_own_class = self._host_class[self._place] == self._worker
        rates = hosts.class_rates, hosts.class_rates, hosts.shard_rates[shards], hosts.shard_rates[shards]
        self.capacities = np.concatenate(rates)

    def used(self, rates: Floats) -> Floats:
        pushes = self._of_direction(np.where(self._is_push, rates, 0.0))
        replies = self._of_direction(np.where(self._is_push, 0.0, rates))
        egress, ingress = pushes[1] + replies[2], pushes[2] + replies[1]
        return np.concatenate([pushes[0], replies[0], egress, ingress])

    def _of_direction(self, rates: Floats) -> tuple[Floats, Floats, Floats]:
        """What connections take of a class's member, of a host as that member, and of a host as the shard."""
        by_class = np.bincount(self._worker, rates, self._classes)
        own = np.bincount(self._place, np.where(self._to_own_class, rates, 0.0), self._hosts)
        as_member = np.where(self._is_worker, by_class[self._host_class] - own, 0.0)
        as_shard: Floats = np.bincount(self._place, rates * self._members, self._hosts).astype(np.float64)
        return np.where(self._has_others, by_class, 0.0), as_member, as_shard

    def users(self, resources: Flags) -> Flags:
        of_classes, of_hosts = resources[: 2 * self._classes], resources[2 * self._classes :]
        class_egress, class_ingress = of_classes[: self._classes], of_classes[self._classes :]
        host_egress, host_ingress = of_hosts[: self._hosts], of_hosts[self._hosts :]
        push = self._users(class_egress & self._has_others, host_egress, host_ingress)
        reply = self._users(class_ingress & self._has_others, host_ingress, host_egress)
        return np.where(self._is_push, push, reply)

    def held(self, growing: Flags) -> Flags:
        if not self._pushes_first:
            return np.zeros_like(growing)
        leaving = self._of_direction((growing & self._is_push).astype(float))[1]  # pushes of the host of each shard
        found: Flags = ~self._is_push & (leaving[self._place] > 0.5)
        return found

    def _users(self, classes: Flags, hosts_as_member: Flags, hosts_as_shard: Flags) -> Flags:
        hosts = np.bincount(self._host_class[hosts_as_member & self._is_worker], minlength=self._classes)
        others = hosts[self._worker] - (hosts_as_member[self._place] & self._to_own_class)
        found: Flags = classes[self._worker] | (others > 0) | hosts_as_shard[self._place]
        return found
