"""wfbp: wait-free back-propagation, which is fifo with a barrier (H. Zhang et al., "Poseidon", ATC 2017). It corresponds to DDP
without buckets."""

from __future__ import annotations

from dataclasses import replace

from ..harness.simulated import PartitionRules
from ..harness.system import Context, System, SystemInfo


def make_system(context: Context) -> System:
    from ..harness.scheduled import ScheduledSystem, commsched_config

    return ScheduledSystem(context, replace(commsched_config(context), policy="fifo"), barrier=True)


SYSTEM = SystemInfo(30, "#CC79A7", "^", PartitionRules("fifo", barrier=True), make_system)
