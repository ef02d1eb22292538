"""The ranks that share a host, and the rank that leads each host. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ...core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankLocation:
    """A rank's own record: the address that the other ranks reach it at, its place among the ranks of its machine, and whether
    its system has the shared memory that a hierarchy needs."""

    address: str
    local_rank: int
    shares_memory: bool

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class HostTopology:
    """``hosts[h]`` holds the ranks of a host, ordered by local rank. The first one leads. Hosts are ordered by lowest rank.

    Rank 0 comes first whatever its local rank is: over an ordered network rank 0's credit counts, so rank 0 must be a leader.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, seats: Sequence[RankLocation]) -> HostTopology:
        """Group the ranks into hosts. ``seats[r]`` is the record of rank ``r``. Ranks with the same address share a host."""
        by_address: dict[str, list[int]] = {}
        for rank, seat in enumerate(seats):
            by_address.setdefault(seat.address, []).append(rank)

        def place(rank: int) -> tuple[bool, int]:
            return rank != 0, seats[rank].local_rank

        return cls(tuple(tuple(sorted(ranks, key=place)) for ranks in by_address.values()))

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.hosts)

    def host_of(self, rank: int) -> int:
        return next(host for host, ranks in enumerate(self.hosts) if rank in ranks)

    @property
    def gains(self) -> bool:
        """Whether a hierarchy sends less over the network."""
        return len(self.hosts) > 1 and any(len(ranks) > 1 for ranks in self.hosts)


def obstacle(layout: HostTopology, seats: Sequence[RankLocation]) -> str | None:
    """The reason why the ranks of a host cannot share memory, or None if they can."""
    for rank, seat in enumerate(seats):
        if not seat.shares_memory:
            return f"rank {rank} runs on a system without memfd_create"
    for ranks in layout.hosts:
        for one, other in pairwise(sorted(ranks, key=lambda rank: (seats[rank].local_rank, rank))):
            if seats[one].local_rank == seats[other].local_rank:
                seat = seats[one]
                return f"ranks {one} and {other} of {seat.address} both say that their local rank is {seat.local_rank}"
    return None


def is_wanted(hierarchy: str, collective: str, layout: HostTopology, seats: Sequence[RankLocation]) -> bool:
    """Whether the setting ``hierarchy`` (``auto``, ``on`` or ``off``) gives a hierarchy here, with that ``collective``.

    Raises:
        ConfigError: ``hierarchy`` is ``on`` and not possible; says why.
    """
    hindered_by = obstacle(layout, seats)
    if hierarchy == "on" and hindered_by is not None:
        raise ConfigError(f"hierarchy='on' is not possible: {hindered_by}")
    if hierarchy == "auto":  # a hierarchy has no reduce-scatter and all-gather tasks over all ranks
        return layout.gains and hindered_by is None and collective == "all_reduce"
    return hierarchy == "on"
