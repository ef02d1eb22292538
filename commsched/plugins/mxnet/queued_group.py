"""QueuedGroup: a group of tensors whose averages are operations in MXNet's own engine.

A *round* is one average of all tensors. For each tensor two operations are queued. The first copies the gradient to the
tensor's place in a flat buffer, once backward has written the gradient. The second then notifies the core, and is completed
when the average is in that place. Operations that are queued later and read the place run after it because of the engine's own
dependencies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

import mxnet as mx
from numpy.typing import NDArray

import commsched

from ...core.errors import ClosedError, CommschedError, TransportError, error_text
from ...core.interfaces import TaskObserver
from ...core.manifest import Manifest
from ...core.task import REDUCE_SCATTER, CommTask
from ..common.collectives import register_flat
from .operation import Operation, complete_and_set, drain_before_forks, fail, push, wait


class BufferPlace:
    """The place of one tensor in a flat buffer. ``array`` is the place as an MXNet array.

    ``busy``: an average is queued and not complete. ``queued``: the round in which the tensor is queued while its gradient is
    not computed yet, else 0.
    """

    def __init__(self, name: str, place: NDArray[Any]) -> None:
        self.name = name
        self.array: mx.nd.NDArray = mx.nd.from_numpy(place)
        self.queued = 0
        self.busy = False


class QueuedGroup:
    """Queues the averages of the tensors of ``manifest``. The constructor is collective. ``may_freeze`` is as for
    ``Session.register``.

    Call the public methods from the training thread only. Section headings and docstrings below name the threads that call the
    private methods.

    Raises:
        ManifestMismatch: see ``Session.register``.
    """

    def __init__(self, session: commsched.Session, manifest: Manifest, may_freeze: bool) -> None:
        self.session = session
        self.round = 0
        self._group, places = register_flat(session, manifest, may_freeze=may_freeze)
        self.places = [BufferPlace(spec.name, place) for spec, place in zip(manifest.tensors, places)]
        self._lock = threading.Lock()  # guards the three fields below
        self._begun: dict[int, Operation] = {}  # by tensor: the operation that waits for the average
        self._missing: list[int] = []  # by tensor: number of partitions of this round that are not done
        self._failure: CommschedError | None = None
        self._forget = session.observe(TaskObserver(self._on_task))
        session.when_failed(self._fail)
        session.cleanup.callback(self._end)
        self._go_undrained = drain_before_forks(self)
        self._watch = OverdueWatch(session.core.next_warning(0.0), self._awaited, self._group.stalled)

    def begin_round(self) -> None:
        """Begin a round. Waits until the round before is over. Raises CommschedError if the session failed or was closed."""
        self.round = self._group.begin_step() + 1
        self._missing = [len(partitions) for partitions in self._group.plan.by_tensor]

    def submit(self, gradients: Mapping[int, mx.nd.NDArray | None]) -> None:
        """Queue the averages of these tensors, in this order. ``None`` means that the gradient is already in the place."""
        places = [self.places[tensor] for tensor in gradients]
        for (tensor, gradient), place in zip(gradients.items(), places):
            place.queued, place.busy = self.round, True
            if gradient is not None:
                gradient.copyto(place.array)
            push(partial(self._begin, tensor), writes=[place.array])
        computed = [gradient for gradient in gradients.values() if gradient is not None]
        if computed:
            push(partial(self._look_for_failed, places, self.round), reads=computed, even_if_failed=True)

    def settle(self) -> None:
        """Return when all queued operations are completed. Raises CommschedError if the session failed, or an average was never
        begun because computing the gradient failed, and MXNetError if an operation of MXNet failed."""
        if self.places:
            over = threading.Event()  # Ctrl-C interrupts a wait for it, but not a wait in MXNet
            push(partial(complete_and_set, over), reads=[place.array for place in self.places], even_if_failed=True)
            over.wait()
        for place in self.places:
            try:
                place.array.wait_to_read()
            except Exception as error:
                if self._failure is not None:
                    raise self._failure from error
                raise
        for place in self.places:
            if place.busy:
                raise self._not_computed(place)

    def drain(self) -> None:
        """Return when all operations of this group are completed. Errors are left to the readers of the arrays."""
        if not self.session.is_forked:  # a forked process has no operations
            for _ in range(2):  # :meth:`_look_for_failed` may queue more
                wait([place.array for place in self.places])

    def release(self) -> None:
        """Release the buffers. No round may follow, and all operations must be settled."""
        self._watch.close()
        self.drain()
        self._go_undrained()
        self._forget()
        self._group.release()
        self.places = []

    # --- called by threads of MXNet's engine ---

    def _look_for_failed(self, places: Sequence[BufferPlace], round_: int, operation: Operation) -> None:
        """Look for gradients that were never computed.

        Runs when the gradients of ``places`` have been computed, or an operation before them has failed. After a failure MXNet
        skips the operations on these places and never calls ``_begin``, so no rank may wait for their averages.
        """
        operation.complete()
        for place in places:
            if place.queued == round_:  # not yet a failure: its copy may be running
                push(
                    partial(self._require_computed, place, round_),
                    writes=[place.array],
                    even_if_failed=True,
                    among_layers=True,
                )

    def _require_computed(self, place: BufferPlace, round_: int, operation: Operation) -> None:
        operation.complete()
        if place.queued == round_:
            self.session.report(self._not_computed(place))

    def _not_computed(self, place: BufferPlace) -> TransportError:
        return TransportError(
            f"rank {self.session.rank} has not computed the gradient of '{place.name}': an operation of MXNet before it "
            "failed, and the error is raised where its result is read"
        )

    def _begin(self, tensor: int, operation: Operation) -> None:
        """Notify the core that the gradient of ``tensor`` is in its place. ``operation`` is completed with the average."""
        self.places[tensor].queued = 0
        with self._lock:
            failure = self._failure
            if failure is None:
                self._begun[tensor] = operation
        if failure is not None:
            self.places[tensor].busy = False
            fail([operation], failure)
            return
        try:
            self._group.notify_ready(tensor)
        except CommschedError as error:
            self._fail(error)
        except Exception as error:  # any error: no reader may wait for this average
            self._fail(TransportError(error_text(error)))
        if self._missing[tensor] == 0:
            self._take_and_complete(tensor)  # all of its partitions are done, or it has no elements

    def _take_and_complete(self, tensor: int) -> None:
        with self._lock:
            operation = self._begun.pop(tensor, None)
        if operation is not None:
            self.places[tensor].busy = False
            operation.complete()

    def _fail(self, error: CommschedError) -> None:
        """Complete all present and later operations with ``error``, so that readers of an average get it. Any thread."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            begun, self._begun = self._begun, {}
        for tensor in begun:
            self.places[tensor].busy = False
        fail(list(begun.values()), error)

    def _end(self) -> None:
        """End the group at the end of the session, in the thread that closes it.

        No operation may begin after the interpreter has ended.
        """
        self._watch.close()
        self._fail(ClosedError("this session is closed"))
        self.drain()

    def _awaited(self) -> tuple[int, int] | None:
        """Return the round and the tensor of the average that is awaited longest. Runs in the thread of the watch."""
        with self._lock:
            tensor = next(iter(self._begun), None)
            return None if tensor is None else (self.round, tensor)

    # --- called by threads of the session ---

    def _on_task(self, task: CommTask) -> None:
        if task.group != self._group.index or task.verb == REDUCE_SCATTER:
            return
        for tensor in task.partition.tensors:
            with self._lock:
                self._missing[tensor] -= 1
                there = self._missing[tensor] == 0
            if there:
                self._take_and_complete(tensor)


class OverdueWatch:
    """Reports an average that does not arrive, as its readers wait inside MXNet, which cannot report it. Uses one thread until
    ``close``.

    Args:
        seconds: the time between two checks.
        awaited: returns the round and the tensor of the average that is awaited longest, or ``None`` if none is awaited.
        stalled: called with the tensor and the seconds if two checks in a row find the same average, and at each later check.
    """

    def __init__(
        self, seconds: float, awaited: Callable[[], tuple[int, int] | None], stalled: Callable[[int, float], None]
    ) -> None:
        self._seconds = seconds
        self._awaited = awaited
        self._stalled = stalled
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commsched-mxnet-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        before, since = None, 0.0
        while not self._closed.wait(self._seconds):
            awaited = self._awaited()
            if awaited is None or awaited != before:
                before, since = awaited, monotonic()
            else:
                self._stalled(awaited[1], monotonic() - since)
