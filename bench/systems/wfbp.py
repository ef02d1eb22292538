"""wfbp: wait-free back-propagation, as fifo with a barrier (H. Zhang et al., "Poseidon", ATC 2017). DDP without buckets."""

from __future__ import annotations

from dataclasses import replace

from . import System
from .context import Context
from .scheduled import ScheduledSystem, commsched_config


def make_system(context: Context) -> System:
    return ScheduledSystem(context, replace(commsched_config(context), policy="fifo"), barrier=True)
