"""The load of gradients on the network interfaces (NICs): by the rates of the NICs, and by the route over hosts. Pure.

NICs are full duplex: each direction counts by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from commsched import ConfigError
from commsched.settings import parse_rate
from commsched.simulator.scenario import bytes_factor
from commsched.transports.hierarchy.topology import HostTopology, RankLocation, is_wanted

from .cluster import BURST_BYTES


def seconds_per_byte(worker_rates: Sequence[float], server_rates: Sequence[float] = ()) -> float:
    """Seconds per byte of gradient for which the slowest NIC is busy in one direction, with shards of equal size.

    The parameter server always uses shards of equal size, whatever the rates are: one on every server, or on every worker if
    ``server_rates`` is empty. Rates are in bytes per second. With equal rates the result is
    ``bytes_factor / rate``.

    Raises:
        ValueError: there is no worker, or a rate is not positive.
    """
    _check(worker_rates, server_rates)
    workers = len(worker_rates)
    if not server_rates:
        return bytes_factor(workers) / min(worker_rates)
    return max(1 / min(worker_rates), workers / len(server_rates) / min(server_rates))


def least_seconds_per_byte(
    worker_rates: Sequence[float], server_rates: Sequence[float] = (), shards_on_workers: bool | None = None
) -> float:
    """The least possible :func:`seconds_per_byte`: each NIC gets a share of the bytes that suits its rate. No placement of
    shards is faster.

    If worker ``i``'s shard has the share ``x_i`` of the bytes, its NIC carries ``1 + (n - 2) x_i`` per byte in each direction.
    If server ``j`` has the share ``y_j``, its NIC carries ``n y_j``. When all NICs are busy equally long, this gives ``2 (n -
    1) / (sum of worker rates + (n - 2) / n * sum of server rates)``; but every worker carries each byte at least once. With
    equal rates and shards on both, the result is BytePS's optimum, ``2 n (n - 1) / (n^2 + k n - 2 k)``.

    Args:
        shards_on_workers: whether workers hold shards as well; None means only if there are no servers.

    Raises:
        ValueError: there is no worker, a rate is not positive, or neither workers nor servers hold a shard.
    """
    _check(worker_rates, server_rates)
    if shards_on_workers is None:
        shards_on_workers = not server_rates
    if not shards_on_workers and not server_rates:
        raise ValueError("there are neither servers nor workers that hold a shard")
    workers = len(worker_rates)
    if workers == 1 and shards_on_workers:
        return 0.0
    if shards_on_workers:
        shared = 2 * (workers - 1) / (sum(worker_rates) + (workers - 2) / workers * sum(server_rates))
    else:
        shared = workers / sum(server_rates)
    return max(1 / min(worker_rates), shared)


def least_loads(
    worker_rates: Sequence[float], server_rates: Sequence[float] = (), clips: bool = False
) -> list[tuple[float, float]]:
    """Pairs of seconds per byte and ``first_share``, for ``simulator.lower_bound.clipped_bound``: no placement of shards is
    faster than the bound with any of the pairs.

    Without clipping there is one pair, :func:`least_seconds_per_byte`. With separate servers pushes travel in one direction and
    replies in the other, so that all time of the busier direction of pushes comes before the norm. With shards on ``n`` workers
    there are two pairs. All NICs together carry both halves of each byte ``n - 1`` times. The slowest NIC carries, in one of
    its directions, each byte of both halves once, but of a byte of which only the first half counts ``1 - x`` or ``(n - 1) x``,
    whichever is more, for the share ``x`` of its shard: at least ``(n - 1) / n``.

    Raises:
        ValueError: there is no worker, or a rate is not positive.
    """
    least = least_seconds_per_byte(worker_rates, server_rates)
    workers = len(worker_rates)
    if not clips or (workers == 1 and not server_rates):
        return [(least, 0.0)]
    if server_rates:
        return [(least, 1.0)]
    return [(2 * (workers - 1) / sum(worker_rates), 0.5), (1 / min(worker_rates), (workers - 1) / workers)]


def _check(worker_rates: Sequence[float], server_rates: Sequence[float]) -> None:
    if not worker_rates:
        raise ValueError("a job has at least 1 worker")
    if any(rate <= 0 for rate in (*worker_rates, *server_rates)):
        raise ValueError("a rate is not positive")


#: The share of a link is reported only for transfers of at least this many bursts.
_BURSTS = 10

#: All whole numbers up to this value are exact, and all halves up to half of it.
_EXACT_UP_TO = {"bfloat16": 256, "float16": 2048}

#: Periods of numbers that travel in 16 bits. They are primes, so that a number in a wrong place is detected.
_PERIODS = (31, 29, 23, 19, 17, 13, 11, 7, 5, 3, 2)


@dataclass(frozen=True)
class Route:
    """Float32 gradients between ``hosts`` hosts, with ``ranks_per_host`` ranks and one NIC each, and ``servers`` with a NIC
    each.

    Bytes are the bytes of an exchange of chunks, or of a ring. A library's own all-reduce may carry other numbers of bytes.

    Args:
        hierarchical: whether a host sends the sum of its ranks, instead of each rank its own gradient.
        wire: the dtype in which gradients travel, or ``none``.
    """

    hosts: int
    ranks_per_host: int
    servers: int
    hierarchical: bool
    wire: str

    @classmethod
    def of(cls, args: argparse.Namespace, ranks_per_host: int = 1) -> Route:
        """The route for arguments of ``arguments.TRANSPORT_OPTIONS``. ``ranks_per_host`` counts only if links have a
        bandwidth.

        On loopback all ranks are on one host. Each rank then counts as a host, unless the ranks add up their gradients in
        memory.

        Raises:
            ConfigError: see ``is_wanted``.
        """
        sharing = args.workers if getattr(args, "bandwidth", None) is None else ranks_per_host
        # A benchmark always names its transport, which counts as a user's setting.
        seats = [RankLocation(f"host {rank // sharing}", rank % sharing, True, True) for rank in range(args.workers)]
        hierarchical = is_wanted(args.hierarchy, args.collective, HostTopology.of(seats), seats)
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
        """The same as :attr:`network_factor` if each host sent one float32 sum: it sends the bytes that it does not aggregate
        itself, and as many come back."""
        return 2 * (self.hosts if self.servers else self.hosts - 1)

    @property
    def _share(self) -> float:
        """Bytes that travel, relative to one float32 sum per host."""
        return (1 if self.hierarchical else self.ranks_per_host) * (1.0 if self.wire == "none" else 0.5)

    def short_periods(self) -> tuple[int, int]:
        """Periods of two whole numbers that start at 0. ``wire`` carries their sum plus the rank exactly, both as the sum of a
        rank or host and as the average.

        Raises:
            ConfigError: there are no such periods.
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
    """The share of a link of ``bandwidth`` that ``nbytes`` filled in one direction. None if links are not shaped or the bytes
    are too few for a valid figure."""
    if bandwidth is None or nbytes < _BURSTS * BURST_BYTES:
        return None
    return nbytes / seconds / parse_rate(bandwidth)
