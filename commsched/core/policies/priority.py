"""Front layers first: the layer that the next forward needs first starts first (ByteScheduler, SOSP'19; P3, MLSys'19).

The policy is optimal for infinitely small partitions without overhead: it is preemptive largest-tail-first, where the tail of
a layer is the forward time from it to the end.
"""

from __future__ import annotations

from ..scheduler import Policy, Schedulable


class Priority:
    def key(self, task: Schedulable) -> int:
        return task.priority


def make_policy() -> Policy:
    return Priority()
