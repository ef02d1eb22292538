"""Checks that tasks start in the agreed order."""

from __future__ import annotations

from typing import NamedTuple

from ...core.errors import OrderMismatch
from ...core.manifest import Manifest
from ...core.plan import Partition
from ...core.task import CommTask


class _Start(NamedTuple):
    """The facts about a task that messages name, without the task's memory."""

    sequence: int
    verb: str
    manifest: Manifest
    step: int
    partition: Partition


class SequenceChecker:
    """Remembers the last task started on each of ``channels``, and names tasks in messages. ``who`` names this rank there."""

    def __init__(self, who: str, channels: int) -> None:
        self._who = who
        self._manifests: dict[int, Manifest] = {}
        self._last: list[_Start | None] = [None] * channels

    def add_group(self, group: int, manifest: Manifest) -> None:
        self._manifests[group] = manifest

    def release(self, group: int) -> None:
        self._manifests.pop(group, None)

    def manifest(self, group: int) -> Manifest:
        return self._manifests[group]

    def name(self, task: CommTask) -> str:
        """Name a task in a message, such as ``all_reduce tensor 'embedding' of step 7``. Its group was not released."""
        return _name(self._start(task))

    def _start(self, task: CommTask) -> _Start:
        return _Start(task.sequence, task.verb, self._manifests[task.group], task.step, task.partition)

    def add(self, task: CommTask) -> None:
        """Record that ``task`` starts.

        Raises:
            OrderMismatch: the task is not the next of its channel; names its tensor and the tensor of the last task.
        """
        last = self._last[task.channel]
        expected = 0 if last is None else last.sequence + 1
        if task.sequence != expected:
            after = "first" if last is None else f"after {last.sequence}: {_name(last)}"
            raise OrderMismatch(
                f"{self._who} was asked to {self.name(task)} at place {task.sequence} of channel {task.channel}, but place "
                f"{expected} is next ({after})"
            )
        self._last[task.channel] = self._start(task)


def _name(start: _Start) -> str:
    at = start.partition
    return f"{start.verb} tensor {start.manifest.names_in(at.dtype, at.start, at.stop)} of step {start.step}"
