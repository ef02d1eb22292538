"""Decides which sum of a host goes to the network next. Pure: no thread, lock or I/O."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class LaunchQueue(Generic[T]):
    """The tasks that all ranks of the host have contributed to and that are still to be launched.

    If ``ordered``, each of the ``channels`` launches in the order in which ``expect`` was called. Otherwise the item with the
    smallest ``order`` is launched first.
    """

    def __init__(self, ordered: bool, channels: int) -> None:
        self._ordered = ordered
        self._expected: list[deque[Hashable]] = [deque() for _ in range(channels)]
        self._complete: dict[Hashable, T] = {}
        self._heap: list[tuple[int, int, T]] = []
        self._arrivals = 0

    def expect(self, key: Hashable, channel: int) -> None:
        """This rank has started ``key``."""
        if self._ordered:
            self._expected[channel].append(key)

    def add(self, key: Hashable, order: int, item: T) -> None:
        """All ranks have contributed to ``key``, which was expected."""
        if self._ordered:
            self._complete[key] = item
        else:
            self._arrivals += 1
            heapq.heappush(self._heap, (order, self._arrivals, item))

    def next(self) -> T | None:
        """Remove and return the item to launch now, or None."""
        if self._heap:
            return heapq.heappop(self._heap)[2]
        for expected in self._expected:
            if expected and expected[0] in self._complete:
                return self._complete.pop(expected.popleft())
        return None
