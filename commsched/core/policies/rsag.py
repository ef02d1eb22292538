"""Front layers first, each average in two tasks: a reduce-scatter, ready with the gradient, and then an all-gather.

A more urgent task may go between the two, and neither phase waits for the end of the other. DeAR (ICDCS'23) sends all
reduce-scatters in backward and all all-gathers in the next forward. Here both are in one queue, ordered by layer.
"""

from __future__ import annotations

from ..scheduler import Policy, Schedulable


class ReduceScatterAllGather:
    splits = True

    def key(self, task: Schedulable) -> int:
        return task.priority


def make_policy() -> Policy:
    return ReduceScatterAllGather()
