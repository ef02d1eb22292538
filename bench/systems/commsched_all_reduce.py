"""commsched-all-reduce: commsched's order over all-reduces, as with its collective transports.

It is only simulated.
"""

from __future__ import annotations

from commsched.simulator.scenario import Exchange

from ..harness.simulated import PartitionRules
from ..harness.system import SystemInfo

SYSTEM = SystemInfo(110, "#882255", "h", PartitionRules("priority", exchange=Exchange.ALL_REDUCE, late_norm=True))
