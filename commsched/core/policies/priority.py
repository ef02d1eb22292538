"""Front layers first: what the next forward needs soonest starts first (ByteScheduler, SOSP'19; P3, MLSys'19).

Optimal for infinitely small partitions and no overhead: it is preemptive largest-tail-first, where the tail of a layer
is the forward time from it to the end.
"""

from __future__ import annotations

from ..scheduler import Policy, Schedulable


class Priority:
    splits = False

    def key(self, task: Schedulable) -> int:
        return task.priority


def make_policy() -> Policy:
    return Priority()
