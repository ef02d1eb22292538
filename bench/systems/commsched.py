"""commsched: sends front layers first, in partitions; the next forward starts layer by layer."""

from __future__ import annotations

from ..harness.simulated import PartitionRules
from ..harness.system import Context, System, SystemInfo


def make_system(context: Context) -> System:
    from ..harness.scheduled import ScheduledSystem, commsched_config

    return ScheduledSystem(context, commsched_config(context), late_norm=True)


SYSTEM = SystemInfo(90, "#0072B2", "o", PartitionRules("priority", late_norm=True), make_system)
