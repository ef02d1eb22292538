"""p3: priority in small slices, one at a time, neighbours never merged (A. Jayarajan et al., "P3", MLSys 2019)."""

from __future__ import annotations

from dataclasses import replace

from . import System
from .context import Context
from .scheduled import ScheduledSystem, commsched_config

#: 40,000 float32 elements, P3's own default; scaled like the bytes, but not to where only the cost of messages is seen.
SLICE_BYTES = 160_000
LEAST_BYTES = 64_000


def make_system(context: Context) -> System:
    size = max(LEAST_BYTES, round(SLICE_BYTES * context.bytes_scale))
    config = replace(commsched_config(context), partition_bytes=size, credit_bytes=size, fusion_bytes=1)
    return ScheduledSystem(context, config)
