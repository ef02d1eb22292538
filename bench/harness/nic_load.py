"""The load of averaging one byte of gradient on the network interfaces (NICs). NICs are full duplex: each direction counts by
itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from commsched.simulator.scenario import bytes_factor


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


def _check(worker_rates: Sequence[float], server_rates: Sequence[float]) -> None:
    if not worker_rates:
        raise ValueError("a job has at least 1 worker")
    if any(rate <= 0 for rate in (*worker_rates, *server_rates)):
        raise ValueError("a rate is not positive")
