"""p3: priority order in small slices, sent one at a time and never merged (A. Jayarajan et al., "P3", MLSys 2019)."""

from __future__ import annotations

from dataclasses import replace

from . import System
from .context import Context
from .scheduled import ScheduledSystem, commsched_config

#: P3's default slice of 40,000 float32 elements. It is scaled like the bytes, but not below ``MIN_BYTES``, where only the cost
#: of messages would be measured.
SLICE_BYTES = 160_000
MIN_BYTES = 64_000


def make_system(context: Context) -> System:
    size = max(MIN_BYTES, round(SLICE_BYTES * context.bytes_scale))
    config = replace(commsched_config(context), partition_bytes=size, credit_bytes=size, fusion_bytes=1)
    return ScheduledSystem(context, config)
