"""What averaging one byte of gradient puts on the network interfaces (NICs). Full duplex: each direction by itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from commsched.simulator.bytes_factor import bytes_factor


def seconds_per_byte(worker_rates: Sequence[float], server_rates: Sequence[float] = ()) -> float:
    """Seconds that the slowest NIC is busy in one direction per byte of gradient, shards spread evenly.

    Even is what the parameter server does whatever the rates are: shards of equal size on every server, or on every worker
    if ``server_rates`` is empty. Rates are bytes per second. With equal rates it is ``bytes_factor / rate``.

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
    """The same when each NIC gets the share of the bytes that suits its rate: no placement of shards is faster.

    With ``x_i`` of the bytes on worker ``i``'s shard its NIC carries ``1 + (n - 2) x_i`` per byte in each direction, and with
    ``y_j`` on server ``j`` that NIC carries ``n y_j``; setting all busy equally long gives ``2 (n - 1) / (sum of worker rates +
    (n - 2) / n * sum of server rates)``, but every worker carries each byte at least once. With equal rates and shards on
    both it is BytePS's optimum, ``2 n (n - 1) / (n^2 + k n - 2 k)``.

    Args:
        shards_on_workers: whether workers hold shards as well; None: only without servers.

    Raises:
        ValueError: there is no worker, a rate is not positive, or nobody may hold a shard.
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
