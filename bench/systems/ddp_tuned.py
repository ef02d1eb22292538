"""ddp-tuned: DDP with the best of several bucket sizes, found by short trials before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from commsched.simulator.scenario import DDP_FIRST_BUCKET_MIB, Exchange

from ..harness.measure import slowest
from ..harness.simulated import BUCKET_SHARES, BucketRules
from ..harness.system import Context, System, SystemInfo, timed_turn

#: Sizes to try at first. Smaller buckets are tried, down to ``MIN_SHARE``, as long as the smallest is the best.
SHARES, MIN_SHARE = BUCKET_SHARES[:6], BUCKET_SHARES[-1]
PASSES = 2
SETTLE_STEPS = 2  # DDP rebuilds its buckets after the first step
TRIAL_STEPS = 4

#: Arguments of DDP, and their description in words.
Buckets = tuple[dict[str, Any], str]


def make_system(context: Context) -> System:
    from ..harness.ddp import DdpSystem, default_buckets, least_bucket_bytes

    total = sum(parameter.nbytes for parameter in context.workload.make_model().parameters())
    most = min(MIN_SHARE, total // max(1, least_bucket_bytes(context)))
    shares = [share for share in SHARES if share <= most]
    tried = [default_buckets(context.bytes_scale), *(_buckets(total, share) for share in shares)]
    medians = _medians(context, tried)
    share = max(shares, default=MIN_SHARE)
    while 2 * share <= most and medians[-1] == min(medians):
        share *= 2
        tried.append(_buckets(total, share))
        medians[-1:] = _medians(context, tried[-2:])  # both again, because these trials are later than the others
    arguments, words = tried[medians.index(min(medians))]
    return DdpSystem(context, arguments, f"{words}; best of {len(tried)}")


def _buckets(total_bytes: int, share: int) -> Buckets:
    size = total_bytes / share / 2**20
    return {"bucket_cap_mb": size}, f"buckets {size:.3g} MiB"


def _medians(context: Context, candidates: Sequence[Buckets]) -> list[float]:
    """Median seconds of a step of each candidate. Candidates take turns, so that all are exposed to the same noise. The result
    is the same on every rank, so that all ranks choose the same candidate."""
    samples: list[list[float]] = [[] for _ in candidates]
    for _ in range(PASSES):
        for candidate, found in zip(candidates, samples):
            found += _trial(context, *candidate)
    return list(map(median, samples))


def _trial(context: Context, arguments: dict[str, Any], words: str) -> Sequence[float]:
    """Train with ``arguments``; return the seconds of each step on the slowest rank. Collective."""
    from ..harness.ddp import DdpSystem

    system = DdpSystem(context, arguments, words)
    seconds, _ = timed_turn(system, context.barrier, SETTLE_STEPS, TRIAL_STEPS, device=context.workload.device)
    return slowest(context.session.gather(seconds))


SYSTEM = SystemInfo(
    50,
    "#7A7A7A",
    "P",
    BucketRules(Exchange.ALL_REDUCE, barrier=True, first_bucket_mib=DDP_FIRST_BUCKET_MIB, tuned=True),
    make_system,
)
