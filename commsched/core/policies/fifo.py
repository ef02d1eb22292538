"""Tasks start in order of readiness, last layer first, as engines send without a scheduler."""

from __future__ import annotations

from ..scheduler import Policy, Schedulable


class Fifo:
    def key(self, task: Schedulable) -> int:
        return 0  # equal keys start in order of arrival


def make_policy() -> Policy:
    return Fifo()
