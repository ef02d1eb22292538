"""GradientExchange: gradients to the network as MXNet's engine produces them, averages in their place.

A *round* is one average of all gradients. For each of them three operations are queued in MXNet's engine: a copy to its place
in a flat buffer; one that then tells the core and is completed when the average is in that place; and a copy back. They begin
when backward has written the gradient. The updates, and all that reads a gradient or a parameter, follow by the engine's own
dependencies.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import mxnet as mx

import commsched

from ...core.errors import ClosedError, CommschedError, ConfigError, ManifestMismatch, TransportError, UnsupportedError
from ...core.group import TensorGroup
from ...core.manifest import Manifest
from ...core.task import REDUCE_SCATTER, CommTask
from ..flat import lay_out
from .agreement import Agreement, Done
from .initial import gather_alike, require_equal_values
from .operation import Operation, push, wait
from .order import measure_order
from .slot import Slot, require_averageable, spec_of

#: By id of parameter, which its exchange keeps alive.
_exchanges: WeakValueDictionary[int, GradientExchange] = WeakValueDictionary()

_live: WeakSet[GradientExchange] = WeakSet()


class GradientExchange:
    """Of one trainer. Everything but ``_begin`` and what an ``Observer`` has is called by the thread that trains.

    The flat buffers are made in the first round: when shapes are known, and backward has shown the order of the layers.
    """

    def __init__(self, session: commsched.Session, parameters: Sequence[mx.gluon.Parameter]) -> None:
        self.done = Done()
        self._session = session
        self._parameters = parameters
        self._pid = os.getpid()
        self._slots: list[Slot] = []  # in forward order
        self._group: TensorGroup | None = None
        self._agreement: Agreement | None = None
        self._round = 0
        self._averaged = False  # gradients are averages, or on their way to be, and were not used yet
        self._lock = threading.Lock()  # guards the three below
        self._begun: dict[int, Operation] = {}  # by tensor: handed over, without an average yet
        self._missing: list[int] = []  # by tensor: partitions of this round that are not done
        self._failure: CommschedError | None = None
        names: set[str] = set()
        for parameter in parameters:
            if parameter.name in names:
                raise ConfigError(f"the trainer has two parameters named '{parameter.name}': give their blocks other prefixes")
            names.add(parameter.name)
            if _exchanges.get(id(parameter), self) is not self:
                raise ConfigError(f"parameter '{parameter.name}' belongs to another ScheduledTrainer; call its detach() first")
        for parameter in parameters:
            _exchanges[id(parameter)] = self
        self._undo = [session.on_close(self.finish)]
        session.when_failed(self._fail)
        session.cleanup.callback(self._end)
        _live.add(self)

    # --- what the trainer calls ---

    def average(self, hyper_parameters: Mapping[str, Any]) -> None:
        """Begin a round. Returns when all is queued; waits for the averages of the last round, which all forwards have read by
        then, and for other ranks only if there is a parameter whose gradient is not new.

        ``hyper_parameters`` of the optimizer, as JSON; they are compared in the first round.

        Raises:
            UnsupportedError: ranks have parted, or a parameter changed so that its gradient cannot be averaged.
            ManifestMismatch: ranks train other parameters; in the first round.
            CommschedError: the session failed or was closed.
        """
        if os.getpid() != self._pid:
            raise ClosedError("a forked process cannot average gradients")
        self._session.core.check()
        if self._group is None:
            self._register(hyper_parameters)
        assert self._group is not None
        assert self._agreement is not None
        self.settle()
        self._agreement.require()
        self._look_at_parameters()
        self._round = self._group.begin_step() + 1
        self._missing = [len(partitions) for partitions in self._group.plan.by_tensor]
        self._agreement.offer(self.done, [slot.fresh for slot in self._slots], [slot.is_frozen for slot in self._slots])
        tensors = range(len(self._slots))[::-1]  # last layers first, as backward produces them
        self._hand_over([tensor for tensor in tensors if self._slots[tensor].fresh or self._slots[tensor].is_frozen])
        late = [tensor for tensor in tensors if not self._slots[tensor].fresh and not self._slots[tensor].is_frozen]
        if late:
            share = self._agreement.share_with_gradient()
            for tensor in late:
                slot = self._slots[tensor]
                slot.used = share[tensor] > 0
                if slot.used and slot.parameter.grad_req == "write":
                    slot.gradient[:] = 0  # what is left of an earlier step; what is added to ("add") counts
            self._hand_over(late)
        self._averaged = True

    def before_update(self, ignore_stale_grad: bool) -> None:
        """Mark the gradients that are to be used as new.

        Raises:
            UnsupportedError: what is in the gradients is no average.
        """
        if not self._averaged:
            raise UnsupportedError(
                "update() without allreduce_grads() since the last update: every rank would use its own gradients; call step()"
            )
        for slot in self._slots:
            if slot.data._fresh_grad:
                raise UnsupportedError(
                    f"backward has written the gradient of '{slot.name}' between allreduce_grads() and update(), so it is no "
                    "average"
                )
        for slot in self._slots:
            if slot.fresh or (ignore_stale_grad and slot.used):
                slot.data._fresh_grad = True

    def updated(self, rescale_grad: float, learning_rate: float, numbers: int) -> None:
        """``numbers``: see :class:`Done`."""
        self._averaged = False
        self.done.updates += 1
        self.done.rescale_grad, self.done.learning_rate, self.done.numbers = rescale_grad, learning_rate, numbers

    def settle(self) -> None:
        """Return when everything that was queued is completed.

        Raises:
            CommschedError: the session failed, or an average was never begun because computing the gradient failed.
            MXNetError: an operation of MXNet failed.
        """
        for slot in self._slots:
            try:
                slot.array.wait_to_read()
            except Exception as error:
                if self._failure is not None:
                    raise self._failure from error
                raise
        for slot in self._slots:
            if slot.busy:
                raise self._not_computed(slot)

    def drain(self) -> None:
        """Return when no operation of ours is to come; leaves errors to those who read what was computed."""
        if os.getpid() == self._pid:  # in a forked process there are none
            for _ in range(2):  # :meth:`_look_for_failed` may queue more
                wait([slot.array for slot in self._slots])

    def finish(self) -> None:
        """Nothing comes after. Collective, if there was a round.

        Raises:
            UnsupportedError: ranks have parted.
        """
        self.settle()
        if self._agreement is not None:
            self._agreement.require()
            self._agreement.offer(self.done, [slot.fresh for slot in self._slots], [slot.is_frozen for slot in self._slots])
            self._agreement.require()

    def detach(self) -> None:
        """Finish, and let go of the parameters. Collective."""
        self.finish()
        for undo in self._undo:
            undo()
        for parameter in self._parameters:
            if _exchanges.get(id(parameter)) is self:
                del _exchanges[id(parameter)]
        if self._group is not None and self._agreement is not None:
            self._group.release()
            self._agreement.release()

    # --- the first round ---

    def _register(self, hyper_parameters: Mapping[str, Any]) -> None:
        trained = {parameter.name: parameter for parameter in self._parameters if parameter.grad_req != "null"}
        for parameter in trained.values():
            require_averageable(parameter)
        order = measure_order({name: parameter.grad() for name, parameter in trained.items()})
        records = gather_alike(self._session, "makes the first step", {"order": order, "with": dict(hyper_parameters)})
        _require_equal_optimizers([record["with"] for record in records])
        names = records[0]["order"]
        for rank, record in enumerate(records):
            if differing := sorted(set(record["order"]) ^ set(names)):
                has, lacks = (rank, 0) if differing[0] in record["order"] else (0, rank)
                raise ManifestMismatch(
                    f"parameter '{differing[0]}' is trained on rank {has} and not on rank {lacks} (grad_req='null'?)"
                )
        require_equal_values(self._session, list(trained.values()))
        manifest = Manifest(tuple(spec_of(trained[name]) for name in names))
        buffers, places = lay_out(manifest)
        group = self._session.register(manifest, buffers)
        self._slots = [Slot(trained[name], place) for name, place in zip(names, places)]
        self._agreement = Agreement(self._session, names)
        self._group = group
        self._undo.append(self._session.observe(self))

    # --- each round ---

    def _look_at_parameters(self) -> None:
        for slot in self._slots:
            slot.require_as_registered()
            slot.fresh = slot.used = not slot.is_frozen and bool(slot.data._fresh_grad)
            if slot.fresh:
                slot.data._fresh_grad = False  # until the update: true then means that backward has run since
        trained = {id(slot.parameter) for slot in self._slots}
        for parameter in self._parameters:
            if parameter.grad_req != "null" and id(parameter) not in trained:
                raise UnsupportedError(
                    f"parameter '{parameter.name}' is trained since the first step only: make another ScheduledTrainer after "
                    "detach() of this one, on all ranks"
                )

    def _hand_over(self, tensors: Sequence[int]) -> None:
        slots = [self._slots[tensor] for tensor in tensors]
        for tensor, slot in zip(tensors, slots):
            slot.queued, slot.busy = self._round, True
            if slot.used:
                slot.gradient.copyto(slot.array)
            push(partial(self._begin, tensor), writes=[slot.array])
        used = [slot for slot in slots if slot.used]
        if used:
            push(
                partial(self._look_for_failed, slots, self._round), reads=[slot.gradient for slot in used], even_if_failed=True
            )
        for slot in used:
            slot.array.copyto(slot.gradient)

    def _look_for_failed(self, slots: Sequence[Slot], round_: int, operation: Operation) -> None:
        """The gradients of ``slots``, which were queued, have been computed, or an operation before them has failed: then MXNet
        skips theirs, and ``_begin`` is never called. Nobody may wait for them. Called by a thread of MXNet's engine."""
        operation.complete()
        for slot in slots:
            if slot.queued == round_:  # as yet: its copy may be under way
                push(partial(self._require_computed, slot, round_), writes=[slot.array], even_if_failed=True)

    def _require_computed(self, slot: Slot, round_: int, operation: Operation) -> None:
        operation.complete()
        if slot.queued == round_:
            self._session.report(self._not_computed(slot))

    def _not_computed(self, slot: Slot) -> TransportError:
        return TransportError(
            f"rank {self._session.rank} has not computed the gradient of '{slot.name}': an operation of MXNet before it "
            "failed, and the error is raised where its result is read"
        )

    def _begin(self, tensor: int, operation: Operation) -> None:
        """The gradient has been written. Called by a thread of MXNet's engine."""
        assert self._group is not None
        self._slots[tensor].queued = 0
        with self._lock:
            failure = self._failure
            if failure is None:
                self._begun[tensor] = operation
        if failure is not None:
            self._complete(tensor, operation, failure)
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
            self._complete(tensor, operation)

    def _complete(self, tensor: int, operation: Operation, error: CommschedError | None = None) -> None:
        self._slots[tensor].busy = False
        operation.complete(error)

    def _fail(self, error: CommschedError) -> None:
        """Whoever waits for an average, or will, gets the error instead. Any thread."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            begun, self._begun = self._begun, {}
        for tensor, operation in begun.items():
            self._complete(tensor, operation, error)

    def _end(self) -> None:
        """The session is over. No operation of ours may begin any more when the interpreter has ended."""
        self._fail(ClosedError("this session is closed"))
        self.drain()

    # --- Observer ---

    def on_task(self, task: CommTask) -> None:
        if self._group is None or task.group != self._group.index or task.verb == REDUCE_SCATTER:
            return
        for tensor in task.partition.tensors:
            with self._lock:
                self._missing[tensor] -= 1
                there = self._missing[tensor] == 0
            if there:
                self._take_and_complete(tensor)

    def on_step(self, group: int, step: int, at: float) -> None:
        pass

    def on_ready(self, group: int, tensor: int, at: float) -> None:
        pass

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        pass


def _require_equal_optimizers(described: Sequence[Mapping[str, Any]]) -> None:
    for rank, theirs in enumerate(described):
        for key in sorted(described[0].keys() | theirs.keys()):
            ours, other = described[0].get(key), theirs.get(key)
            if ours != other:
                raise ManifestMismatch(f"the optimizer has {key}={ours} on rank 0 but {key}={other} on rank {rank}")


def _drain_all() -> None:
    for exchange in tuple(_live):
        exchange.drain()


# Before a fork (for a DataLoader's workers, say), MXNet joins its threads, with Python's lock held.
os.register_at_fork(before=_drain_all)
