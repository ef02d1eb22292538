"""serial: backward, then all communication, then forward. The difference from wfbp is the gain from overlap alone.

Its gradients are averaged within ``step()``, so its loop cannot clip.
"""

from __future__ import annotations

from dataclasses import replace

from ..harness.simulated import PartitionRules
from ..harness.system import Context, System, SystemInfo


def make_system(context: Context) -> System:
    from ..harness.scheduled import ScheduledSystem, commsched_config

    return ScheduledSystem(context, replace(commsched_config(context), policy="fifo"), barrier=True, hold=True)


SYSTEM = SystemInfo(10, "#8A5A2B", "v", PartitionRules("fifo", barrier=True, hold=True), make_system, clips=False)
