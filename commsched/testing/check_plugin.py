"""check_plugin: checks that training through a plugin equals plain synchronous SGD. Needs no test framework."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.errors import CommschedError
from ..core.interfaces import Completion, ForwardingTransport, Observer, Transport
from ..core.scheduler import SchedulerConfig
from ..core.task import CommTask
from ..session.local import local_sessions
from ..session.session import Session
from .world import run_world

Weights = Mapping[str, NDArray[Any]]

#: Configurations to train with. Sizes are a few bytes, so that even the smallest tensors are split, merged and queued.
_CONFIGS = (
    SchedulerConfig(partition_bytes=64, credit_bytes=64, policy="priority"),
    SchedulerConfig(partition_bytes=1000, credit_bytes=3000, policy="fifo"),
)

#: Configurations that are used one after another while training runs.
_CHANGES = tuple(SchedulerConfig(partition_bytes=size, credit_bytes=2 * size) for size in (200, 48, 10**6, 504))


class PluginAdapter(Protocol):
    """The same small training twice, with and without the plugin, for :func:`check_plugin`.

    Every rank must have its own data, derived from ``seed``. In ``train`` the initial weights must differ between ranks, and
    the initial weights of rank 0 must be the initial weights of ``train_alone``. A missing broadcast is then detected.
    """

    #: Largest allowed difference to :meth:`train_alone`, relative to the tensor's largest weight: 1e-9 suits float64, 1e-5
    #: float32.
    tolerance: float

    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        """Train through the plugin, as one rank of ``session``. Return the final weights by name; they do not change later."""

    def train_alone(self, world_size: int, steps: int, seed: int) -> Weights:
        """Train with the plain engine on the joint batch of ``world_size`` ranks. Return the final weights by name."""


def check_plugin(
    adapter: PluginAdapter,
    *,
    world_sizes: Sequence[int] = (1, 2, 4),
    steps: int = 8,
    seed: int = 0,
    most_delay_seconds: float = 0.002,
    timeout_seconds: float = 60.0,
) -> None:
    """Train with ranks as threads and with the local transport. Every send and every reply is delayed at random.

    One more training, with the smallest world size above 1, changes the configuration in every step, as a tuner may do.

    Checks for every world size that no gradient was used before its average was complete, that weights are bitwise equal on
    all ranks and close to training alone (for one rank: bitwise equal), and that no thread is left.

    Raises:
        AssertionError: a check failed. Names the check, the world size, the configuration, the rank and the tensor.
        TimeoutError: ranks hung. Shows their stacks.
    """
    changing = [(world_size, None) for world_size in sorted(set(world_sizes) - {1})[:1]]
    for world_size, config in (*itertools.product(world_sizes, _CONFIGS), *changing):
        where = f"world size {world_size}, {config or 'a configuration that changes'}"
        alone = adapter.train_alone(world_size, steps, seed)
        if _difference(alone, adapter.train_alone(world_size, steps - 1, seed)) is None:
            raise AssertionError(f"{where}: the last of {steps} steps changes no weight, so this training shows nothing")
        by_rank = _train(adapter, world_size, config, steps, seed, most_delay_seconds, timeout_seconds, where)
        for rank, weights in enumerate(by_rank):
            _require_finite(weights, f"{where}, rank {rank}")
            if (name := _difference(weights, by_rank[0])) is not None:
                raise AssertionError(f"{where}: '{name}' is not bitwise equal on rank 0 and rank {rank}")
        _require_close(by_rank[0], alone, adapter.tolerance if world_size > 1 else 0.0, where)


def _train(
    adapter: PluginAdapter,
    world_size: int,
    config: SchedulerConfig | None,
    steps: int,
    seed: int,
    most_delay_seconds: float,
    timeout_seconds: float,
    where: str,
) -> list[Weights]:
    def delayed(transport: Transport) -> Transport:
        return Delayed(transport, seed * world_size + transport.rank, most_delay_seconds)

    before = set(threading.enumerate())
    causes: list[BaseException] = []  # errors in the order in which they arose, recorded before a session reports them
    sessions = local_sessions(world_size, config or _CONFIGS[0], wrap_transport=delayed, check_weights=2)
    changes = _Changes(sessions[0])
    if config is None:
        sessions[0].observe(changes)
    try:
        training = _rank_training(adapter, sessions, steps, seed, causes)
        by_rank = run_world(world_size, training, timeout_seconds=timeout_seconds)
    except BaseException:
        if causes:
            raise causes[0] from None  # not the error that other ranks received because of it
        raise
    finally:
        for session in sessions:
            session.abort("the check is over")  # has no effect on a session that has closed normally
    left = sorted(thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("commsched-"))
    if left:
        raise AssertionError(f"{where}: threads are left after close: {', '.join(left)}")
    if config is None and all(len(seen) < 2 for seen in changes.seen.values()):
        raise AssertionError(f"{where}: the configuration never changed between two steps, so this training shows nothing")
    return by_rank


class _Changes(Observer):
    """An observer on rank 0 that requests another configuration in every step."""

    def __init__(self, session: Session) -> None:
        self.seen: defaultdict[int, set[SchedulerConfig]] = defaultdict(set)  # by group
        self._session = session
        self._next = itertools.cycle(_CHANGES)

    def on_step(self, group: int, step: int, at: float) -> None:
        self.seen[group].add(self._session.core.config)
        with contextlib.suppress(CommschedError):  # if the job failed, its ranks raise the error themselves
            self._session.reconfigure(next(self._next))


def _rank_training(
    adapter: PluginAdapter, sessions: list[Session], steps: int, seed: int, causes: list[BaseException]
) -> Callable[[int], Weights]:
    def train(rank: int) -> Weights:
        with sessions[rank] as session:
            try:
                return adapter.train(session, rank, len(sessions), steps, seed)
            except BaseException as error:
                causes.append(error)
                raise

    return train


def _difference(a: Weights, b: Weights) -> str | None:
    """Return the first name whose arrays are not bitwise equal, or None if all arrays are equal."""
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            return name
        if a[name].dtype != b[name].dtype or a[name].shape != b[name].shape or a[name].tobytes() != b[name].tobytes():
            return name
    return None


def _require_finite(weights: Weights, where: str) -> None:
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise AssertionError(
                f"{where}: '{name}' is not finite; memory was read between notify_ready and the opening of its proxy"
            )


def _require_close(weights: Weights, alone: Weights, tolerance: float, where: str) -> None:
    if weights.keys() != alone.keys():
        raise AssertionError(f"{where}: training alone has the tensors {sorted(alone)}, the plugin {sorted(weights)}")
    for name, expected in alone.items():
        if weights[name].shape != expected.shape or weights[name].dtype != expected.dtype:
            raise AssertionError(
                f"{where}: '{name}' is {expected.dtype}{list(expected.shape)} alone, "
                f"{weights[name].dtype}{list(weights[name].shape)} through the plugin"
            )
        if expected.size == 0:
            continue
        largest = float(np.abs(expected).max())
        difference = float(np.abs(weights[name] - expected).max())
        if difference > tolerance * largest:
            raise AssertionError(
                f"{where}: '{name}' differs from training alone by {difference:.3g}, its largest weight is {largest:.3g}, "
                f"the tolerance {tolerance:g}"
            )


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
