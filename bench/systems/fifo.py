"""fifo: same as commsched, but gradients are sent in the order in which backward produces them. Its difference from commsched
is the gain from priority alone."""

from __future__ import annotations

from dataclasses import replace

from . import System
from .context import Context
from .scheduled import ScheduledSystem, commsched_config


def make_system(context: Context) -> System:
    return ScheduledSystem(context, replace(commsched_config(context), policy="fifo"))
