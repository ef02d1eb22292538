"""The least of many numbers that only grow. Each rank's progress is such a number, and what all ranks have passed may be
forgotten. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class Least:
    """The numbers of ``keys``, which begin at ``first``.

    Raising one takes as long among many as among few, as long as they stay close to each other: all are looked at only when the
    last of the least ones is raised."""

    def __init__(self, keys: Iterable[int], first: int) -> None:
        self._numbers = dict.fromkeys(keys, first)
        self.least = first
        self._count = len(self._numbers)  # of those that are the least

    def __getitem__(self, key: int) -> int:
        return self._numbers[key]

    def raise_to(self, key: int, number: int) -> None:
        """Set the number of ``key``, which is not greater than ``number``."""
        was, self._numbers[key] = self._numbers[key], number
        if was > self.least or number == was:
            return
        self._count -= 1
        if not self._count:
            self.least = min(self._numbers.values())
            self._count = sum(each == self.least for each in self._numbers.values())
