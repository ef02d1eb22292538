"""One process group over gloo, and the thread that waits for its point-to-point messages, which do not report that they are
done."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroupGloo, Work

from ....core.errors import CommschedError
from ....core.late_thread import LateThread
from ...backend import WhenFailed
from ...collective import Done
from ...collective.channel import MAX_TAGS
from .meeting import GatherStore

log = logging.getLogger("commsched")

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "uint8": torch.uint8}

#: The number of all-reduces of one group that run at a time.
_THREADS = 2

#: A slower transfer counts as broken.
_MIN_BYTES_PER_SECOND = 1e6

#: How long closing may take. Operations that gloo still holds by then are left to end by themselves.
_CLOSE_SECONDS = 0.8


class GlooChannel:
    """See ``collective.Channel``. The constructor is collective, and returns when all ranks are connected.

    Sums and their ``done`` run in gloo's threads. The device's thread moves point-to-point messages. The ``done`` of an
    exchange runs in one of our two threads: one serves even tags, the other odd tags. With a single thread the second half of
    an exchange would wait for the first half of a later exchange.

    When a connection breaks, gloo fails the operations that wait on it, but not the operations whose bytes are in transit.
    Those end only at the time limit that they began with, nothing can end them sooner, and dropping the group waits for them.
    So every operation has a limit, although the control channel finds out which rank is gone, and ``close`` does not wait
    long.

    Args:
        device: gloo's port and the thread that moves bytes; may be shared by channels.
        within: how long one attempt to connect to another rank may take; a fifth of the time that others may take.
        patience_seconds: how long an operation may make no progress, beside the time that its bytes take.

    Raises:
        RuntimeError: a rank cannot be reached in that time.
        CommschedError: the job failed meanwhile.
    """

    native = frozenset(_DTYPES)

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: ProcessGroupGloo.Device,
        store: GatherStore,
        within: timedelta,
        patience_seconds: float,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._patience_seconds = patience_seconds
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._threads = _THREADS
        options._timeout = within
        self._group: Any = ProcessGroupGloo(store, rank, world_size, options)
        self._lock = threading.Lock()
        self._bytes_under_way = 0
        self._waiters = [Waiter(f"commsched-gloo-{half}-{rank}") for half in ("even", "odd")]
        self._closer = LateThread(f"commsched-gloo-close-{rank}")

    def all_reduce(self, data: memoryview, dtype: str, done: Done) -> None:
        options = AllreduceOptions()
        options.timeout = self._begin(2 * len(data))
        work = self._group.allreduce([torch.frombuffer(data, dtype=_DTYPES[dtype])], options)
        work.get_future().add_done_callback(partial(self._all_reduced, 2 * len(data), done))

    def exchange(
        self, tag: int, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]], done: Done
    ) -> None:
        nbytes = sum(len(data) for _, data in (*sends, *receives))
        patience = self._begin(nbytes)
        tensors = [torch.frombuffer(data, dtype=torch.uint8) for _, data in (*receives, *sends)]
        incoming, outgoing = tensors[: len(receives)], tensors[len(receives) :]
        works = [self._group.recv([tensor], peer, tag) for tensor, (peer, _) in zip(incoming, receives)]
        works += [self._group.send([tensor], peer, tag) for tensor, (peer, _) in zip(outgoing, sends)]
        self._waiters[tag % 2].put(PendingWork(works, tensors, patience, partial(self._end, nbytes, done)))

    def close(self, graceful: bool) -> None:
        if not graceful:
            self._abort()
        if not self._closer.run(self._drop, _CLOSE_SECONDS):
            log.debug("gloo keeps operations of rank %d that cannot end now; they end at their time limit", self.rank)

    def _begin(self, nbytes: int) -> timedelta:
        """Count ``nbytes`` as outstanding, and return the operation's timeout, which allows for all outstanding bytes."""
        with self._lock:
            self._bytes_under_way += nbytes
            seconds = self._patience_seconds + self._bytes_under_way / _MIN_BYTES_PER_SECOND
        return timedelta(seconds=seconds)

    def _end(self, nbytes: int, done: Done, error: BaseException | None) -> None:
        with self._lock:
            self._bytes_under_way -= nbytes
        done(error)

    def _all_reduced(self, nbytes: int, done: Done, future: Any) -> None:
        error: BaseException | None = None
        try:
            future.value()
        except RuntimeError as failed:
            error = failed
        self._end(nbytes, done, error)

    def _abort(self) -> None:
        """End all connections. gloo does so when a wait times out."""
        nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
        for peer in range(self.world_size):
            if peer == self.rank:
                continue
            try:
                self._group.recv([nothing], peer, MAX_TAGS).wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue  # the expected timeout, or this connection is broken already while others may not be

    def _drop(self) -> None:
        for waiter in self._waiters:
            waiter.close()
        # This waits, without the interpreter's lock, for the ``done`` of the last sums. If the interpreter's end dropped the
        # group, gloo's threads might want that lock when no thread can take it any more, and the process would not end.
        self._group = None


def unless_job_fails(make: Callable[[], GlooChannel], when_failed: WhenFailed) -> GlooChannel:
    """Return what ``make`` returns. If the job fails meanwhile, raise its failure at once: gloo waits for a rank that was lost
    while the ranks connect, and nothing can end that wait before its time limit.

    The thread is not a daemon: the interpreter must not end while gloo may still need its lock. So this process ends after that
    time limit only.
    """
    outcome: SimpleQueue[GlooChannel | BaseException] = SimpleQueue()
    is_decided = threading.Lock()  # taken by whoever decides the outcome

    def connect() -> None:
        made: GlooChannel | BaseException
        try:
            made = make()
        except BaseException as error:
            made = error
        if is_decided.acquire(blocking=False):
            outcome.put(made)
        elif isinstance(made, GlooChannel):
            made.close(graceful=False)

    def fail(error: CommschedError) -> None:
        if is_decided.acquire(blocking=False):
            outcome.put(error)

    threading.Thread(target=connect, name="commsched-gloo-connect", daemon=False).start()
    when_failed(fail)
    try:
        decided = outcome.get()
    except BaseException:  # interrupted: nobody else would close what is made
        if not is_decided.acquire(blocking=False) and isinstance(made := outcome.get(), GlooChannel):
            made.close(graceful=False)
        raise
    if isinstance(decided, BaseException):
        raise decided
    return decided


#: The time limit of each wait after a failure, when no further message comes.
_AT_ONCE = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class PendingWork:
    """Outstanding messages, and how long to wait for each. ``tensors`` keeps their memory alive: gloo has only its address."""

    works: Sequence[Work]
    tensors: Sequence[Tensor]
    patience: timedelta
    done: Done


class Waiter:
    """A thread that waits for exchanges, in the order they came, and calls their ``done``."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[PendingWork | None] = SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, exchange: PendingWork) -> None:
        self._queue.put(exchange)

    def close(self) -> None:
        """Return when every exchange that was put is done or has failed."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (exchange := self._queue.get()) is not None:
            exchange.done(self._wait(exchange))
            del exchange  # its memory may be reused before the next exchange comes

    def _wait(self, exchange: PendingWork) -> BaseException | None:
        for work in exchange.works:
            try:
                work.wait(_AT_ONCE if self._failed else exchange.patience)
            except RuntimeError as error:
                # gloo ends all connections of a group when one wait times out, so no other message will come either. The
                # messages of this exchange are dropped with it, and gloo does not touch their memory afterwards.
                self._failed = True
                return error
        return None
