"""serial: backward, then all of the communication, then forward. What overlap alone brings."""

from __future__ import annotations

from dataclasses import replace

from . import System
from .context import Context
from .scheduled import ScheduledSystem, commsched_config


def make_system(context: Context) -> System:
    return ScheduledSystem(context, replace(commsched_config(context), policy="fifo"), barrier=True, hold=True)
