"""commsched: sends front layers first, in partitions; the next forward starts layer by layer."""

from __future__ import annotations

from . import System
from .context import Context
from .scheduled import ScheduledSystem, commsched_config


def make_system(context: Context) -> System:
    return ScheduledSystem(context, commsched_config(context))
