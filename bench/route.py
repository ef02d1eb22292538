"""How a benchmark's gradients use the network: whose sums travel, in how many bytes, and which numbers stay exact. Pure."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import pairwise

from commsched.core.config import parse_rate
from commsched.core.errors import ConfigError
from commsched.core.policies import make_policy
from commsched.simulator.bytes_factor import bytes_factor
from commsched.transports.host.layout import Layout, Seat, is_wanted

from .cluster import BURST_BYTES

#: The link's share is said of what is at least so many bursts long.
_BURSTS = 10

#: Up to here all whole numbers, and up to half of it all halves, are exact.
_EXACT_UP_TO = {"bfloat16": 256, "float16": 2048}

#: Periods of numbers that travel in 16 bits; primes, so that what lands in another's place is seen.
_PERIODS = (31, 29, 23, 19, 17, 13, 11, 7, 5, 3, 2)


@dataclass(frozen=True)
class Route:
    """Float32 gradients between ``hosts``, of ``ranks_per_host`` ranks and one NIC each, and ``servers`` with a NIC each.

    Bytes are those of an exchange of chunks, or a ring: a library's own all-reduce of more ranks may carry others.

    Args:
        hierarchical: a host sends the sum of its ranks, instead of each rank what is its own.
        wire: the dtype that gradients travel as, or ``none``.
    """

    hosts: int
    ranks_per_host: int
    servers: int
    hierarchical: bool
    wire: str

    @classmethod
    def of(cls, args: argparse.Namespace, ranks_per_host: int = 1) -> Route:
        """Of arguments of ``arguments.add_transport_arguments``; ``ranks_per_host`` counts where links have a bandwidth.

        On loopback, where all ranks are on one host, each counts as a host of its own unless they add up in memory.

        Raises:
            ConfigError: see ``is_wanted``.
        """
        sharing = args.workers if getattr(args, "bandwidth", None) is None else ranks_per_host
        seats = [Seat(f"host {rank // sharing}", rank % sharing, True) for rank in range(args.workers)]
        hierarchical = is_wanted(args.hierarchy, make_policy(args.policy).splits, Layout.of(seats), seats)
        each = sharing if hierarchical else ranks_per_host
        return cls(args.workers // each, each, args.servers, hierarchical, args.wire)

    @property
    def nic_factor(self) -> float:
        """Bytes that the busiest NIC carries in each direction per byte of gradient."""
        return bytes_factor(self.hosts, self.servers) * self._share

    @property
    def network_factor(self) -> float:
        """Bytes that cross the network, each counted once, per byte of gradient."""
        return self.least_factor * self._share

    @property
    def least_factor(self) -> int:
        """The same if each host sent one sum, as float32: what it does not aggregate itself, and as much comes back."""
        return 2 * (self.hosts if self.servers else self.hosts - 1)

    @property
    def _share(self) -> float:
        """Of what would travel if each host sent one sum as float32."""
        return (1 if self.hierarchical else self.ranks_per_host) * (1.0 if self.wire == "none" else 0.5)

    def short_periods(self) -> tuple[int, int]:
        """Periods of two whole numbers from 0 whose sum with the rank, ``wire`` carries exactly: of every rank or host, and
        averaged.

        Raises:
            ConfigError: there are none.
        """
        for periods in pairwise(_PERIODS):
            if self._exact(sum(periods) - 2):
                return periods
        raise ConfigError(
            f"wire={self.wire!r} rounds sums of {self.ranks_per_host} ranks per host of {self._ranks}, so that results could "
            "not be checked; take fewer of them"
        )

    @property
    def _ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def _exact(self, most: int) -> bool:
        """Whether numbers up to ``most`` plus the rank stay exact."""
        limit = _EXACT_UP_TO[self.wire]
        summed = self.ranks_per_host if self.hierarchical else 1
        greatest_sum = sum(most + rank for rank in range(self._ranks - summed, self._ranks))
        return greatest_sum <= limit and most + (self._ranks - 1) / 2 <= limit / 2


def link_share(nbytes: float, seconds: float, bandwidth: str | None) -> float | None:
    """What share of a link of ``bandwidth`` the ``nbytes`` filled that it carried in one direction; None: it cannot be said."""
    if bandwidth is None or nbytes < _BURSTS * BURST_BYTES:
        return None
    return nbytes / seconds / parse_rate(bandwidth)
