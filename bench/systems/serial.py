"""serial: backward, then all communication, then forward. The difference from wfbp is the gain from overlap alone."""

from __future__ import annotations

from dataclasses import replace

from . import System
from .context import Context
from .scheduled import ScheduledSystem, commsched_config


def make_system(context: Context) -> System:
    return ScheduledSystem(context, replace(commsched_config(context), policy="fifo"), barrier=True, hold=True)
