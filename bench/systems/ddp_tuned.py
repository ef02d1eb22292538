"""ddp-tuned: DDP with the best of several bucket sizes, found by short trials before anything is measured."""

from __future__ import annotations

import time
from typing import Any

from . import System
from .context import Context
from .ddp import DdpSystem, default_buckets

#: Of all gradients, in one bucket.
SHARES = (1, 2, 4, 8, 16, 32)
SETTLE_STEPS = 2  # DDP makes its buckets anew after the first
TRIAL_STEPS = 2


def make_system(context: Context) -> System:
    candidates = _candidates(context)
    seconds = [_trial_seconds(context, *each) for each in candidates]
    arguments, words = candidates[seconds.index(min(seconds))]
    return DdpSystem(context, arguments, f"{words}; best of {len(candidates)}")


def _candidates(context: Context) -> list[tuple[dict[str, Any], str]]:
    total = sum(parameter.nbytes for parameter in context.workload.make_model().parameters())
    sizes = [total / share / 2**20 for share in SHARES]
    return [default_buckets(context.bytes_scale), *(({"bucket_cap_mb": size}, f"buckets {size:.3g} MiB") for size in sizes)]


def _trial_seconds(context: Context, arguments: dict[str, Any], words: str) -> float:
    """Of a step, on the slowest rank: the same number on every rank, so that all choose alike."""
    system = DdpSystem(context, arguments, words)
    system.begin()
    for step in range(SETTLE_STEPS + TRIAL_STEPS):
        if step == SETTLE_STEPS:
            context.session.gather("trial")
            began = time.perf_counter()
        system.update(system.forward(step))
    seconds: list[float] = context.session.gather((time.perf_counter() - began) / TRIAL_STEPS)
    return max(seconds)
