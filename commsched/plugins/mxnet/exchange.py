"""GradientExchange: sends a trainer's gradients as MXNet's engine produces them, and replaces them by their averages.

In each round (see :mod:`.queued_group`) each average is copied back into its gradient. Updates, and all operations that read a
gradient or a parameter, run after it because of the engine's own dependencies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import mxnet as mx

import commsched

from ...core.comparison import require_same
from ...core.errors import ConfigError, UnsupportedError, and_more
from ...core.manifest import Manifest
from ..common.collectives import gather_alike, require_same_owner
from ..common.weights_check import number_in
from .agreement import RoundOutcome, require_equal_optimizers
from .parameters import TRAINER_ADVICE, Slot, require_averageable, require_equal_values, spec_of
from .rounds import RoundExchange, Rounds
from .timing import measure_order

#: id of a parameter -> its exchange, which keeps the parameter alive.
_exchanges: WeakValueDictionary[int, GradientExchange] = WeakValueDictionary()


class GradientExchange(RoundExchange):
    """Exchanges the gradients of one trainer. Call it from the training thread only, :meth:`take_over` first. Making one is
    collective. It raises ConfigError and ManifestMismatch, see :func:`require_same_owner`, and RanksDiverged if other ranks
    train on with an earlier trainer of the same parameters.

    The flat buffers are made in the first round. By then all shapes are known, and backward has shown the order of the layers.
    """

    def __init__(self, session: commsched.Session, parameters: Sequence[mx.gluon.Parameter]) -> None:
        super().__init__(session)
        self._parameters = parameters
        self._slots: list[Slot] = []  # in forward order
        self._averaged = False  # the gradients are averages, or their averages are queued; no update has used them yet
        names: set[str] = set()
        for parameter in parameters:
            if parameter.name in names:
                raise ConfigError(f"the trainer has two parameters named '{parameter.name}': give their blocks other prefixes")
            names.add(parameter.name)
        self._replaced = False
        self._number, _ = number_in(session, "trainer")
        earlier = self._earlier = self._find_earlier()
        if earlier is not None:
            earlier.offer_end()  # a rank that trains on with it finds that, and does not wait for this one
        # If this one is refused for another reason, that is so on all ranks, and the earlier one may go on.
        number, require_end = (None, None) if earlier is None else (earlier._number, earlier.require_end)
        require_same_owner(session, number, "the trainer's parameters belong", "ScheduledTrainer", require_end)

    def _find_earlier(self) -> GradientExchange | None:
        """An earlier trainer of exactly these parameters, such as one from an earlier run of a notebook's cell."""
        owners = {parameter.name: _exchanges.get(id(parameter)) for parameter in self._parameters}
        owned = {name: other for name, other in owners.items() if other is not None and not other._session.closed}
        for name, other in owned.items():
            if other._session is not self._session or set(map(id, other._parameters)) != set(map(id, self._parameters)):
                raise ConfigError(f"parameter '{name}' belongs to another ScheduledTrainer; call its detach() first")
        return next(iter(owned.values()), None)

    def take_over(self) -> None:
        """Begin, and release the earlier trainer of the same parameters, if there is one, which has ended on all ranks."""
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            earlier._release()
            earlier._replaced = True
        for parameter in self._parameters:
            _exchanges[id(parameter)] = self
        self.end_with_session()

    # --- called by the trainer ---

    def average(self, hyper_parameters: Mapping[str, Any]) -> None:
        """Begin a round. Returns when all operations are queued.

        Waits for the averages of the last round, which all forwards have read by then. Waits for the other ranks in the first
        round, and later only if the gradient of a parameter is not new.

        Args:
            hyper_parameters: the numbers of the optimizer, as JSON. They are compared in the first round.

        Raises:
            RanksDiverged: ranks did different things, or their weights differ.
            UnsupportedError: a parameter changed so that its gradient cannot be averaged.
            ManifestMismatch: ranks train different parameters or with different optimizers. In the first round only.
            CommschedError: the session failed or was closed.
        """
        if self._replaced:
            raise UnsupportedError("another ScheduledTrainer was made for the same parameters: use that one")
        self._session.core.check()
        rounds = self._rounds = self._rounds or self._register(hyper_parameters)
        rounds.settle()
        self._require_as_registered()
        rounds.weights.take(rounds.queued.round, [slot.data for slot in self._slots])
        self._look_at_parameters()
        rounds.queued.begin_round()
        self.offer(rounds, replace(self.done))
        tensors = range(len(self._slots))[::-1]  # last layers first, as backward produces them
        self._submit(rounds, [tensor for tensor in tensors if self._slots[tensor].fresh or self._slots[tensor].is_frozen])
        late = [tensor for tensor in tensors if not self._slots[tensor].fresh and not self._slots[tensor].is_frozen]
        if late:
            try:
                share = rounds.agreement.share_with_gradient()
            except UnsupportedError:  # the other ranks learn of it in their next round, and must get to its beginning
                for tensor in late:
                    self._slots[tensor].used = False
                self._submit(rounds, late)
                raise
            for tensor in late:
                slot = self._slots[tensor]
                is_average, slot.used = slot.used, share[tensor] > 0
                if slot.used and not is_average and slot.parameter.grad_req == "write":
                    slot.gradient[:] = 0  # it is left from an earlier step; an accumulated gradient ("add") counts
            self._submit(rounds, late)
        self._averaged = True

    def before_update(self, ignore_stale_grad: bool) -> None:
        """Mark the gradients that the update must use as new. Raises UnsupportedError if a gradient is not an average."""
        if not self._averaged:
            raise UnsupportedError(
                "update() without allreduce_grads() since the last update: every rank would use its own gradients; call step()"
            )
        for slot in self._slots:
            if slot.data._fresh_grad:
                raise UnsupportedError(
                    f"backward has written the gradient of '{slot.name}' between allreduce_grads() and update(), so it is "
                    "not an average"
                )
        for slot in self._slots:
            if slot.fresh or (ignore_stale_grad and slot.used):
                slot.data._fresh_grad = True

    def updated(self, numbers: Mapping[str, Any]) -> None:
        """Record that an update was made, with these ``numbers`` of the optimizer (see :class:`RoundOutcome`)."""
        self._averaged = False
        self.done.updates += 1
        self.done.numbers = numbers

    def detach(self) -> None:
        """Agree with all ranks on the end, unless the session is closed, and release the parameters. Collective. Raises
        RanksDiverged if ranks did different things, and CommschedError if the session failed."""
        if self._replaced:
            return
        if not self._session.closed:
            self.offer_end()
            self.require_end()
        self._release()

    def _release(self) -> None:
        """Release the buffers and the parameters. No average may be outstanding."""
        if self._rounds is not None and not self._session.closed:
            self._rounds.release()
        self.leave_session()
        for parameter in self._parameters:
            if _exchanges.get(id(parameter)) is self:
                del _exchanges[id(parameter)]

    # --- the first round ---

    def _register(self, hyper_parameters: Mapping[str, Any]) -> Rounds:
        trained = {parameter.name: parameter for parameter in self._parameters if parameter.grad_req != "null"}
        for parameter in trained.values():
            require_averageable(parameter)
        order = measure_order({name: parameter.grad() for name, parameter in trained.items()})
        mine = {"order": order, "with": dict(hyper_parameters)}
        records = gather_alike(self._session, "makes the first step", mine, TRAINER_ADVICE)
        require_equal_optimizers([record["with"] for record in records])
        names = records[0]["order"]
        require_same(
            [dict.fromkeys(record["order"], "is trained") for record in records],
            lambda different: f"parameter '{different.key}' {different.text(lambda item: item or 'is not')} (grad_req='null'?)",
        )
        require_equal_values(self._session, list(trained.values()))
        if not names:
            raise UnsupportedError("no parameter is trained (grad_req='null'?), so there is nothing to average")
        what = f"'{next(iter(trained))}'{and_more(len(names) - 1)}"
        manifest = Manifest(tuple(spec_of(name, trained[name].data()) for name in names))
        rounds = Rounds(self._session, what, manifest, names, may_freeze=True)
        self._slots = [Slot(trained[place.name], place) for place in rounds.queued.places]
        return rounds

    # --- each round ---

    def _require_as_registered(self) -> None:
        """Call it before anything of the round has changed: then the round can be begun again after a mistake is mended."""
        for slot in self._slots:
            slot.require_as_registered()
        trained = {id(slot.parameter) for slot in self._slots}
        for parameter in self._parameters:
            if parameter.grad_req != "null" and id(parameter) not in trained:
                raise UnsupportedError(
                    f"parameter '{parameter.name}' is trained since the first step only: make another ScheduledTrainer after "
                    "detach() of this one, on all ranks"
                )

    def _look_at_parameters(self) -> None:
        for slot in self._slots:
            if not self._averaged:
                slot.fresh = slot.used = False
            # Else the averages are averaged again, which changes nothing where backward has not run since.
            if slot.is_frozen:
                slot.fresh = slot.used = False
            elif slot.data._fresh_grad:
                slot.fresh = slot.used = True
                slot.data._fresh_grad = False  # if it is true before the update, backward has run again

    def offer(self, rounds: Rounds, done: RoundOutcome) -> None:
        rounds.agreement.offer(done, [slot.fresh for slot in self._slots], [slot.is_frozen for slot in self._slots])

    def _submit(self, rounds: Rounds, tensors: Sequence[int]) -> None:
        gradients = {tensor: slot.gradient if (slot := self._slots[tensor]).used else None for tensor in tensors}
        rounds.queued.submit(gradients)
        for tensor, gradient in gradients.items():
            if gradient is not None:
                rounds.queued.places[tensor].array.copyto(gradient)
