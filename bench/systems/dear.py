"""dear: buckets, reduce-scattered in backward order and all-gathered in forward order (L. Zhang et al., "DeAR", ICDCS 2023).

It is only simulated.
"""

from __future__ import annotations

from commsched.simulator.scenario import Exchange

from ..harness.simulated import BucketRules
from ..harness.system import SystemInfo

SYSTEM = SystemInfo(60, "#B8A600", "X", BucketRules(Exchange.REDUCE_SCATTER_ALL_GATHER, tuned=True))
