"""The compared systems as rules of the simulator, and the choice of their settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from commsched.core.config import MAX_PARTITION_BYTES, SchedulerConfig
from commsched.simulator.scenario import Exchange, Rules

#: DDP's default buckets: the first one, and the others.
DDP_FIRST_BUCKET_BYTES = 2**20
DDP_BUCKET_BYTES = 25 * 2**20
#: 40,000 float32 elements, P3's own default.
P3_SLICE_BYTES = 160_000

_MIN_PARTITION_BYTES = 16_000
_MAX_PARTITION_BYTES = 16_000_000
_MAX_PARTITIONS = 2000
_UNLIMITED = 2**62

SYSTEMS = (
    "serial",
    "fifo",
    "wfbp",
    "ddp",
    "ddp-tuned",
    "dear",
    "p3",
    "tictac",
    "commsched",
    "commsched-equal-shares",
    "commsched-all-reduce",
)


def rules_of(system: str, partition_bytes: int, credit_bytes: int) -> Rules:
    """The rules of ``system`` with the given partition and credit, if it has them. DDP has its default buckets.

    Raises:
        ValueError: there is no such system.
    """
    fifo = SchedulerConfig(partition_bytes, credit_bytes, "fifo")
    priority = SchedulerConfig(partition_bytes, credit_bytes, "priority")
    makers: dict[str, Callable[[], Rules]] = {
        "serial": lambda: Rules(fifo, barrier=True, hold=True),
        "fifo": lambda: Rules(fifo),
        "wfbp": lambda: Rules(fifo, barrier=True),
        "ddp": lambda: ddp(DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES),
        "ddp-tuned": lambda: ddp(DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES),
        "dear": lambda: dear(DDP_BUCKET_BYTES),
        "p3": lambda: Rules(SchedulerConfig(P3_SLICE_BYTES, P3_SLICE_BYTES, "priority", 1)),
        "tictac": lambda: Rules(SchedulerConfig(MAX_PARTITION_BYTES, credit_bytes, "priority", 1)),
        "commsched": lambda: Rules(priority),
        "commsched-equal-shares": lambda: Rules(priority, pushes_first=False),
        "commsched-all-reduce": lambda: Rules(priority, Exchange.ALL_REDUCE),
    }
    if system not in makers:
        raise ValueError(f"no system is called {system!r}; there are: {', '.join(SYSTEMS)}")
    return makers[system]()


def ddp(bucket_bytes: int, first_bucket_bytes: int | None = None) -> Rules:
    """DDP: buckets in backward order, all-reduced one after another, and a barrier."""
    config = SchedulerConfig(bucket_bytes, _UNLIMITED, "fifo")
    return Rules(config, Exchange.ALL_REDUCE, True, False, bucket_bytes, first_bucket_bytes)


def dear(bucket_bytes: int) -> Rules:
    """DeAR: buckets of about ``bucket_bytes``, reduce-scattered in backward order and all-gathered in forward order."""
    config = SchedulerConfig(bucket_bytes, _UNLIMITED, "fifo")
    return Rules(config, Exchange.REDUCE_SCATTER_ALL_GATHER, bucket_bytes=bucket_bytes)


def best_rules(
    system: str, gradient_bytes: int, shards: int, partition: int | None, credit: int | None, seconds: Callable[[Rules], float]
) -> Rules:
    """The rules with the least ``seconds(rules)``, over the choices of ``system``.

    DDP keeps its default buckets. ``ddp-tuned`` and DeAR choose among DDP's buckets and the total size divided by 1 to 32.
    Systems with partitions try partition sizes by factors of two, with credit for one partition on each shard and one more.
    Then they try other credits for the best size.

    Args:
        partition, credit: sizes in bytes; None means to choose them.
        shards: number of shards of the parameter server.
    """
    if system in ("ddp", "p3"):
        return rules_of(system, 1, 1)
    if system in ("ddp-tuned", "dear"):
        make = ddp if system == "ddp-tuned" else dear
        candidates = [make(max(1, gradient_bytes // share)) for share in (1, 2, 4, 8, 16, 32)]
        return min([rules_of(system, 1, 1), *candidates], key=seconds)
    make_rules = partial(rules_of, system)
    lanes = 1 if make_rules(1, 1).exchange is Exchange.ALL_REDUCE else shards

    def credits(size: int) -> Iterable[int]:
        """The credits to try; the first one is used with every partition size."""
        of_lanes = min(gradient_bytes, (lanes + 1) * size)
        return [credit] if credit else dict.fromkeys([of_lanes, 2 * size, 4 * size, min(gradient_bytes, 3 * lanes * size)])

    sizes = [partition] if partition else partition_sizes(gradient_bytes)
    best = _descend((make_rules(size, next(iter(credits(size)))) for size in sizes), seconds)
    chosen = best.config.partition_bytes if system != "tictac" else sizes[0]
    with_credit = (replace(best, config=replace(best.config, credit_bytes=each)) for each in credits(chosen))
    return min(with_credit, key=seconds)


def _descend(candidates: Iterable[Rules], seconds: Callable[[Rules], float]) -> Rules:
    """The best candidate. The search ends after two consecutive candidates that are not better, because time over size has one
    minimum and small sizes take the longest to simulate."""
    best: tuple[float, Rules] | None = None
    worse = 0
    for each in candidates:
        taken = seconds(each)
        if best is None or taken < best[0]:
            best, worse = (taken, each), 0
        else:
            worse += 1
            if worse == 2:
                break
    assert best is not None
    return best[1]


def partition_sizes(gradient_bytes: int) -> list[int]:
    """Partition sizes to try, from 16 MB down by halves."""
    least = max(_MIN_PARTITION_BYTES, gradient_bytes // _MAX_PARTITIONS)
    sizes = [_MAX_PARTITION_BYTES]
    while sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    return sizes
