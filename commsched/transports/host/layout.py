"""Which ranks share a host, and which of them leads. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ...core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Seat:
    """What a rank says of itself: the address others reach it at, its place among the ranks of its machine, and whether its
    system can share memory as it is done here."""

    address: str
    local_rank: int
    shares_memory: bool

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Layout:
    """``hosts[h]`` are the ranks of a host by their local rank; the first leads. Hosts are ordered by their lowest rank.

    Rank 0 is first whatever its local rank is: over an ordered network its credit counts, which must be that of a leader.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, seats: Sequence[Seat]) -> Layout:
        """``seats[r]`` is what rank ``r`` says. Ranks with the same address share a host."""
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
        """Whether less goes over the network than without."""
        return len(self.hosts) > 1 and any(len(ranks) > 1 for ranks in self.hosts)


def obstacle(layout: Layout, seats: Sequence[Seat]) -> str | None:
    """Why the ranks of a host cannot meet in memory; None: they can."""
    for rank, seat in enumerate(seats):
        if not seat.shares_memory:
            return f"rank {rank} runs on a system without memfd_create"
    for ranks in layout.hosts:
        for one, other in pairwise(sorted(ranks, key=lambda rank: (seats[rank].local_rank, rank))):
            if seats[one].local_rank == seats[other].local_rank:
                seat = seats[one]
                return f"ranks {one} and {other} of {seat.address} both say that their local rank is {seat.local_rank}"
    return None


def is_wanted(hierarchy: str, splits: bool, layout: Layout, seats: Sequence[Seat]) -> bool:
    """Whether ``hierarchy`` (``auto``, ``on`` or ``off``) means a hierarchy here. ``splits``: see ``Policy``.

    Raises:
        ConfigError: it is ``on``, and cannot be; says why.
    """
    hindered_by = obstacle(layout, seats)
    if hierarchy == "on" and hindered_by is not None:
        raise ConfigError(f"hierarchy='on' cannot be: {hindered_by}")
    if hierarchy == "auto":  # averages in two tasks, each over all ranks, have no place in it
        return layout.gains and hindered_by is None and not splits
    return hierarchy == "on"
