"""GradientExchange: a trainer's gradients to the network as MXNet's engine produces them, averages in their place.

In each round (see :mod:`.queued_group`) a copy back follows each average. The updates, and all that reads a gradient or a
parameter, follow by the engine's own dependencies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import mxnet as mx

import commsched

from ...core.errors import ClosedError, ConfigError, ManifestMismatch, UnsupportedError
from ...core.manifest import Manifest
from .agreement import Agreement, Done
from .described import require_equal_optimizers
from .ending import end_with
from .initial import gather_alike, require_equal_values
from .order import measure_order
from .queued_group import QueuedGroup
from .slot import Slot, require_averageable, spec_of

#: By id of parameter, which its exchange keeps alive.
_exchanges: WeakValueDictionary[int, GradientExchange] = WeakValueDictionary()


class GradientExchange:
    """Of one trainer; for the thread that trains.

    The flat buffers are made in the first round: when shapes are known, and backward has shown the order of the layers.
    """

    def __init__(self, session: commsched.Session, parameters: Sequence[mx.gluon.Parameter]) -> None:
        self.done = Done()
        self._session = session
        self._parameters = parameters
        self._pid = os.getpid()
        self._slots: list[Slot] = []  # in forward order
        self._queued: QueuedGroup | None = None
        self._agreement: Agreement | None = None
        self._averaged = False  # gradients are averages, or on their way to be, and were not used yet
        names: set[str] = set()
        for parameter in parameters:
            if parameter.name in names:
                raise ConfigError(f"the trainer has two parameters named '{parameter.name}': give their blocks other prefixes")
            names.add(parameter.name)
            other = _exchanges.get(id(parameter))
            if other is not None and not other._session.closed:
                raise ConfigError(f"parameter '{parameter.name}' belongs to another ScheduledTrainer; call its detach() first")
        for parameter in parameters:
            _exchanges[id(parameter)] = self
        self._let_end = end_with(session, self)

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
        if self._queued is None:
            self._register(hyper_parameters)
        assert self._queued is not None
        assert self._agreement is not None
        self._queued.settle()
        self._agreement.require()
        self._look_at_parameters()
        self._queued.begin_round()
        self._agreement.offer(self.done, [slot.fresh for slot in self._slots], [slot.is_frozen for slot in self._slots])
        tensors = range(len(self._slots))[::-1]  # last layers first, as backward produces them
        self._hand_over(
            self._queued, [tensor for tensor in tensors if self._slots[tensor].fresh or self._slots[tensor].is_frozen]
        )
        late = [tensor for tensor in tensors if not self._slots[tensor].fresh and not self._slots[tensor].is_frozen]
        if late:
            share = self._agreement.share_with_gradient()
            for tensor in late:
                slot = self._slots[tensor]
                slot.used = share[tensor] > 0
                if slot.used and slot.parameter.grad_req == "write":
                    slot.gradient[:] = 0  # what is left of an earlier step; what is added to ("add") counts
            self._hand_over(self._queued, late)
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

    def detach(self) -> None:
        """End, unless the session is closed, and let go of the parameters. Collective.

        Raises:
            UnsupportedError: ranks have parted.
            CommschedError: the session failed.
        """
        if not self._session.closed:
            self.offer_end()
            self.require_end()
            if self._queued is not None and self._agreement is not None:
                self._queued.release()
                self._agreement.release()
        self.let_go()

    def let_go(self) -> None:
        """Of the parameters; nothing is outstanding."""
        self._let_end()
        for parameter in self._parameters:
            if _exchanges.get(id(parameter)) is self:
                del _exchanges[id(parameter)]

    # --- Ending ---

    def offer_end(self) -> None:
        if self._queued is not None and self._agreement is not None:
            self._queued.settle()
            self._agreement.require()
            self._offer(self._agreement, replace(self.done, ends=1))

    @property
    def end_is_known(self) -> bool:
        return self._agreement is None or self._agreement.is_known

    def require_end(self) -> None:
        if self._agreement is not None:
            self._agreement.require()

    # --- the first round ---

    def _register(self, hyper_parameters: Mapping[str, Any]) -> None:
        trained = {parameter.name: parameter for parameter in self._parameters if parameter.grad_req != "null"}
        for parameter in trained.values():
            require_averageable(parameter)
        order = measure_order({name: parameter.grad() for name, parameter in trained.items()})
        records = gather_alike(self._session, "makes the first step", {"order": order, "with": dict(hyper_parameters)})
        require_equal_optimizers([record["with"] for record in records])
        names = records[0]["order"]
        for rank, record in enumerate(records):
            if differing := sorted(set(record["order"]) ^ set(names)):
                has, lacks = (rank, 0) if differing[0] in record["order"] else (0, rank)
                raise ManifestMismatch(
                    f"parameter '{differing[0]}' is trained on rank {has} and not on rank {lacks} (grad_req='null'?)"
                )
        require_equal_values(self._session, list(trained.values()))
        self._queued = QueuedGroup(self._session, Manifest(tuple(spec_of(trained[name]) for name in names)))
        self._slots = [Slot(trained[place.name], place) for place in self._queued.places]
        self._agreement = Agreement(self._session, names)

    # --- each round ---

    def _look_at_parameters(self) -> None:
        for slot in self._slots:
            slot.require_as_registered()
            if not self._averaged:
                slot.fresh = slot.used = False
            # Else what was averaged is averaged again, which changes nothing where backward has not run since.
            if slot.is_frozen:
                slot.fresh = slot.used = False
            elif slot.data._fresh_grad:
                slot.fresh = slot.used = True
                slot.data._fresh_grad = False  # until the update: true then means that backward has run since
        trained = {id(slot.parameter) for slot in self._slots}
        for parameter in self._parameters:
            if parameter.grad_req != "null" and id(parameter) not in trained:
                raise UnsupportedError(
                    f"parameter '{parameter.name}' is trained since the first step only: make another ScheduledTrainer after "
                    "detach() of this one, on all ranks"
                )

    def _offer(self, agreement: Agreement, done: Done) -> None:
        agreement.offer(done, [slot.used for slot in self._slots], [slot.is_frozen for slot in self._slots])

    def _hand_over(self, queued: QueuedGroup, tensors: Sequence[int]) -> None:
        gradients = {tensor: slot.gradient if (slot := self._slots[tensor]).used else None for tensor in tensors}
        queued.hand_over(gradients)
        for tensor, gradient in gradients.items():
            if gradient is not None:
                queued.places[tensor].array.copyto(gradient)
