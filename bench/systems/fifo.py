"""fifo: same as commsched, but gradients are sent in the order in which backward produces them. Its difference from commsched
is the gain from priority alone."""

from __future__ import annotations

from dataclasses import replace

from ..harness.simulated import PartitionRules
from ..harness.system import Context, System, SystemInfo


def make_system(context: Context) -> System:
    from ..harness.scheduled import ScheduledSystem, commsched_config

    return ScheduledSystem(context, replace(commsched_config(context), policy="fifo"), late_norm=True)


SYSTEM = SystemInfo(20, "#E69F00", "D", PartitionRules("fifo", late_norm=True), make_system)
