"""commsched-equal-shares: commsched, but on a worker replies get an equal share of the link beside its own pushes.

It is only simulated.
"""

from __future__ import annotations

from ..harness.simulated import PartitionRules
from ..harness.system import SystemInfo

SYSTEM = SystemInfo(100, "#3D5A80", "H", PartitionRules("priority", pushes_first=False, late_norm=True))
