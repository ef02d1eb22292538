"""wfbp: wait-free back-propagation, which is fifo with a barrier (H. Zhang et al., "Poseidon", ATC 2017). It corresponds to DDP
without buckets."""

from __future__ import annotations

from dataclasses import replace

from . import System
from .context import Context
from .scheduled import ScheduledSystem, commsched_config


def make_system(context: Context) -> System:
    return ScheduledSystem(context, replace(commsched_config(context), policy="fifo"), barrier=True)
