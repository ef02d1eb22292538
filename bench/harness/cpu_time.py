"""CPU time of this process and of others."""

from __future__ import annotations

import time
from collections.abc import Sequence


def cpu_seconds(pids: Sequence[int] = ()) -> float:
    """CPU time so far of this process and the processes ``pids``, summed over all their threads."""
    # This is Linux's number of the CPU clock of another process; see clock_getcpuclockid(3), which Python does not offer.
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)
