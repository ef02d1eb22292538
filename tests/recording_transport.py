"""A transport that the test controls."""

from __future__ import annotations

import threading

from commsched.core.interfaces import Completion, Transport
from commsched.core.manifest import Manifest
from commsched.core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask


class RecordingTransport(Transport):
    """A transport that sends nothing. It records all calls, and the test completes tasks with :meth:`sent` and :meth:`done`.

    ``started`` holds every task in order of start, ``groups`` every manifest, ``released`` every group that was released,
    ``left`` every rank that left.
    """

    verbs = frozenset({ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER})

    def __init__(self, rank: int = 0, world_size: int = 2, *, ordered: bool = False, channels: int = 1) -> None:
        self.ordered = ordered
        self.channels = channels
        self.rank = rank
        self.world_size = world_size
        self.groups: dict[int, Manifest] = {}
        self.started: list[CommTask] = []
        self.released: list[int] = []
        self.left: list[int] = []
        self.closed = False
        self._completions: dict[CommTask, Completion] = {}
        self._changed = threading.Condition()

    def add_group(self, group: int, manifest: Manifest) -> None:
        self.groups[group] = manifest

    def start(self, task: CommTask, completion: Completion) -> None:
        with self._changed:
            self._completions[task] = completion
            self.started.append(task)
            self._changed.notify_all()

    def release(self, group: int) -> None:
        self.released.append(group)

    def leave(self, rank: int) -> None:
        self.left.append(rank)

    def close(self, graceful: bool = True) -> None:
        self.closed = True

    # --- for the test ---

    def wait_started(self, count: int, timeout_seconds: float = 60.0) -> list[CommTask]:
        """Wait until ``count`` tasks were started, and return all tasks started so far.

        Raises:
            TimeoutError: fewer tasks were started within ``timeout_seconds``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.started) >= count, timeout_seconds):
                raise TimeoutError(f"{len(self.started)} of {count} tasks were started: {self.started}")
            return list(self.started)

    def sent(self, task: CommTask) -> None:
        """Report that the bytes of ``task`` have left this rank."""
        self._completions[task].on_sent(task)

    def done(self, task: CommTask) -> None:
        """Report that the average of ``task`` is complete."""
        self._completions[task].on_done(task)
