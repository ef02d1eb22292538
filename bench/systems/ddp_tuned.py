"""ddp-tuned: DDP with the best of several bucket sizes, found by short trials before anything is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from ..measure import slowest
from . import System
from .context import Context
from .ddp import DdpSystem, default_buckets

#: Of all gradients, in one bucket.
SHARES = (1, 2, 4, 8, 16, 32)
#: Beyond them smaller buckets are tried, down to this, as long as the smallest is the best.
LEAST_SHARE = 128
PASSES = 2
SETTLE_STEPS = 2  # DDP makes its buckets anew after the first
TRIAL_STEPS = 4

#: Arguments of DDP, and in words.
Buckets = tuple[dict[str, Any], str]


def make_system(context: Context) -> System:
    total = sum(parameter.nbytes for parameter in context.workload.make_model().parameters())
    tried = [default_buckets(context.bytes_scale), *(_buckets(total, share) for share in SHARES)]
    medians = _medians(context, tried)
    share = SHARES[-1]
    while share < LEAST_SHARE and medians[-1] == min(medians):
        share *= 2
        tried.append(_buckets(total, share))
        medians[-1:] = _medians(context, tried[-2:])  # both anew, as these are later than the others
    arguments, words = tried[medians.index(min(medians))]
    return DdpSystem(context, arguments, f"{words}; best of {len(tried)}")


def _buckets(total_bytes: int, share: int) -> Buckets:
    size = total_bytes / share / 2**20
    return {"bucket_cap_mb": size}, f"buckets {size:.3g} MiB"


def _medians(context: Context, candidates: Sequence[Buckets]) -> list[float]:
    """Seconds of a step of each; they take turns, so that all meet the same noise. The same on every rank, so that all choose
    alike."""
    samples: list[list[float]] = [[] for _ in candidates]
    for _ in range(PASSES):
        for candidate, found in zip(candidates, samples):
            found += _trial(context, *candidate)
    return list(map(median, samples))


def _trial(context: Context, arguments: dict[str, Any], words: str) -> Sequence[float]:
    """Seconds of steps on the slowest rank. Collective."""
    system = DdpSystem(context, arguments, words)
    system.begin()
    seconds = []
    for step in range(SETTLE_STEPS + TRIAL_STEPS):
        if step == SETTLE_STEPS:
            context.session.gather("trial")
        began = time.perf_counter()
        system.update(system.forward(step))
        seconds.append(time.perf_counter() - began)
    return slowest(context.session.gather(seconds[SETTLE_STEPS:]))
