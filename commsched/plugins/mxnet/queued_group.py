"""QueuedGroup: a group of tensors whose averages are operations in MXNet's own engine.

A *round* is one average of all tensors. For each of them two operations are queued: a copy of the gradient to its place in a
flat buffer, and one that then tells the core and is completed when the average is in that place. They begin when backward has
written the gradient. What is queued after them and reads the place follows by the engine's own dependencies.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import mxnet as mx
from numpy.typing import NDArray

import commsched

from ...core.errors import ClosedError, CommschedError, TransportError
from ...core.manifest import Manifest
from ...core.observers import TaskObserver
from ...core.task import REDUCE_SCATTER, CommTask
from ..flat import lay_out
from .operation import Operation, drain_before_forks, fail, push, wait
from .watch import Watch


class Place:
    """One tensor's place in a flat buffer; ``array``: as an array of MXNet.

    ``busy``: the average is not there. ``queued``: the round in which it is to be averaged and was not computed yet; 0: none.
    """

    def __init__(self, name: str, place: NDArray[Any]) -> None:
        self.name = name
        self.array: mx.nd.NDArray = mx.nd.from_numpy(place)
        self.queued = 0
        self.busy = False


class QueuedGroup:
    """Of the tensors of ``manifest``; making one is collective. Everything but ``_begin``, what it queues and ``_on_task`` is
    called by the thread that trains.

    Raises:
        ManifestMismatch: see ``Session.register``.
    """

    def __init__(self, session: commsched.Session, manifest: Manifest) -> None:
        self.session = session
        self.round = 0
        self._pid = os.getpid()
        buffers, places = lay_out(manifest)
        self._group = session.register(manifest, buffers)
        self.places = [Place(spec.name, place) for spec, place in zip(manifest.tensors, places)]
        self._lock = threading.Lock()  # guards the three below
        self._begun: dict[int, Operation] = {}  # by tensor: handed over, without an average yet
        self._missing: list[int] = []  # by tensor: partitions of this round that are not done
        self._failure: CommschedError | None = None
        self._forget = session.observe(TaskObserver(self._on_task))
        session.when_failed(self._fail)
        session.cleanup.callback(self._end)
        self._go_undrained = drain_before_forks(self)
        self._watch = Watch(session.rank, self._awaited)

    def begin_round(self) -> None:
        """Waits until the round before is over.

        Raises:
            CommschedError: the session failed or was closed.
        """
        self.round = self._group.begin_step() + 1
        self._missing = [len(partitions) for partitions in self._group.plan.by_tensor]

    def hand_over(self, gradients: Mapping[int, mx.nd.NDArray | None]) -> None:
        """Queue the averages of these tensors, in this order. None: what is in the tensor's place counts."""
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
        """Return when everything that was queued is completed.

        Raises:
            CommschedError: the session failed, or an average was never begun because computing the gradient failed.
            MXNetError: an operation of MXNet failed.
        """
        if self.places:
            over = threading.Event()  # for which Python can wait, and hear of Ctrl-C
            push(partial(_complete_and_set, over), reads=[place.array for place in self.places], even_if_failed=True)
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
        """Return when no operation of ours is to come; leaves errors to those who read what was computed."""
        if os.getpid() == self._pid:  # in a forked process there are none
            for _ in range(2):  # :meth:`_look_for_failed` may queue more
                wait([place.array for place in self.places])

    def release(self) -> None:
        """No round follows, and all is settled. Lets go of the buffers; the session keeps what is left."""
        self._watch.close()
        self.drain()
        self._go_undrained()
        self._forget()
        self._group.release()
        self.places = []

    # --- by threads of MXNet's engine ---

    def _look_for_failed(self, places: Sequence[Place], round_: int, operation: Operation) -> None:
        """The gradients of ``places``, which were queued, have been computed, or an operation before them has failed: then
        MXNet skips theirs, and ``_begin`` is never called. Nobody may wait for them."""
        operation.complete()
        for place in places:
            if place.queued == round_:  # as yet: its copy may be under way
                push(
                    partial(self._require_computed, place, round_),
                    writes=[place.array],
                    even_if_failed=True,
                    among_layers=True,
                )

    def _require_computed(self, place: Place, round_: int, operation: Operation) -> None:
        operation.complete()
        if place.queued == round_:
            self.session.report(self._not_computed(place))

    def _not_computed(self, place: Place) -> TransportError:
        return TransportError(
            f"rank {self.session.rank} has not computed the gradient of '{place.name}': an operation of MXNet before it "
            "failed, and the error is raised where its result is read"
        )

    def _begin(self, tensor: int, operation: Operation) -> None:
        """The gradient has been written."""
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
        except Exception as error:  # whatever it is: nobody may wait for it
            self._fail(TransportError(f"{type(error).__name__}: {error}"))
        if self._missing[tensor] == 0:
            self._take_and_complete(tensor)  # it has no elements

    def _take_and_complete(self, tensor: int) -> None:
        with self._lock:
            operation = self._begun.pop(tensor, None)
        if operation is not None:
            self.places[tensor].busy = False
            operation.complete()

    def _fail(self, error: CommschedError) -> None:
        """Whoever waits for an average, or will, gets the error instead. Any thread."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            begun, self._begun = self._begun, {}
        for tensor in begun:
            self.places[tensor].busy = False
        fail(list(begun.values()), error)

    def _end(self) -> None:
        """The session is over. No operation of ours may begin any more when the interpreter has ended."""
        self._watch.close()
        self._fail(ClosedError("this session is closed"))
        self.drain()

    def _awaited(self) -> tuple[int, str] | None:
        with self._lock:
            tensor = next(iter(self._begun), None)
            return None if tensor is None else (self.round, self.places[tensor].name)

    # --- the session's threads ---

    def _on_task(self, task: CommTask) -> None:
        if task.group != self._group.index or task.verb == REDUCE_SCATTER:
            return
        for tensor in task.partition.tensors:
            with self._lock:
                self._missing[tensor] -= 1
                there = self._missing[tensor] == 0
            if there:
                self._take_and_complete(tensor)


def _complete_and_set(event: threading.Event, operation: Operation) -> None:
    operation.complete()
    event.set()
