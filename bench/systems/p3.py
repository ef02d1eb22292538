"""p3: priority order in small slices, sent one at a time and never merged (A. Jayarajan et al., "P3", MLSys 2019)."""

from __future__ import annotations

from dataclasses import replace

from ..harness.simulated import PartitionRules
from ..harness.system import Context, System, SystemInfo

#: P3's default slice of 40,000 float32 elements. It is scaled like the bytes, but not below ``MIN_BYTES``, where only the cost
#: of messages would be measured.
SLICE_BYTES = 160_000
MIN_BYTES = 64_000


def make_system(context: Context) -> System:
    from ..harness.scheduled import ScheduledSystem, commsched_config

    size = max(MIN_BYTES, round(SLICE_BYTES * context.bytes_scale))
    config = replace(commsched_config(context), partition_bytes=size, credit_bytes=size, fusion_bytes=1)
    return ScheduledSystem(context, config)


SYSTEM = SystemInfo(70, "#009E73", "<", PartitionRules("priority", SLICE_BYTES, SLICE_BYTES, fusion_bytes=1), make_system)
