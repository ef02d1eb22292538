"""Fakes for tests: the simulator's clock, a transport that the test controls, and a transport that delays another transport."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from time import monotonic

from ..core.interfaces import Completion, ForwardingTransport, Transport
from ..core.manifest import Manifest
from ..core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask
from ..simulator.clock import VirtualClock

__all__ = ["Delayed", "RecordingTransport", "VirtualClock"]


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

    def wait_started(self, count: int, timeout_seconds: float = 10.0) -> list[CommTask]:
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


class Delayed(ForwardingTransport):
    """A transport that delays the sends and replies of another transport by random times, and exposes every missing wait.

    The wrapped transport works on a copy. From the start of a task until its delayed reply, the task's own bytes are
    ``0xFF``, which is NaN in every floating dtype. Code that reads before the average is complete, or writes before the
    average was used, therefore gets wrong numbers; it cannot get the right ones by luck. Buffers must be in the host's memory.
    """

    def __init__(self, transport: Transport, seed: int, most_seconds: float) -> None:
        super().__init__(transport)
        self._random = random.Random(seed)
        self._most_seconds = most_seconds
        self._originals: dict[CommTask, tuple[CommTask, Completion]] = {}
        self._replies: list[tuple[float, int, CommTask]] = []  # a heap of (time due, order of arrival, copy of the task)
        self._arrivals = itertools.count()
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._reply, name="commsched-delayed-replies", daemon=True)
        self._thread.start()

    def start(self, task: CommTask, completion: Completion) -> None:
        copy = CommTask(task.group, task.step, task.partition, memoryview(bytearray(task.data)), task.verb)
        copy.channel, copy.sequence = task.channel, task.sequence
        task.data[:] = b"\xff" * task.nbytes
        with self._changed:
            self._originals[copy] = (task, completion)
        self._pause()
        self._inner.start(copy, self)

    def close(self, graceful: bool = True) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._inner.close(graceful)
        self._thread.join()

    # --- Completion, for the wrapped transport ---

    def on_sent(self, task: CommTask) -> None:
        with self._changed:
            original, completion = self._originals[task]
        completion.on_sent(original)

    def on_done(self, task: CommTask) -> None:
        with self._changed:
            when = monotonic() + self._random.uniform(0.0, self._most_seconds)
            heapq.heappush(self._replies, (when, next(self._arrivals), task))
            self._changed.notify_all()

    # ---

    def _pause(self) -> None:
        with self._changed:
            seconds = self._random.uniform(0.0, self._most_seconds)
            self._changed.wait_for(lambda: self._closed, seconds)

    def _reply(self) -> None:
        while (copy := self._next_reply()) is not None:
            with self._changed:
                original, completion = self._originals.pop(copy)
            original.data[:] = copy.data
            completion.on_done(original)
            del copy, original, completion  # else this thread would keep their memory until the next reply

    def _next_reply(self) -> CommTask | None:
        with self._changed:
            while not self._closed:
                due = self._replies[0][0] - monotonic() if self._replies else None
                if due is not None and due <= 0:
                    return heapq.heappop(self._replies)[2]
                self._changed.wait(due)
            return None
