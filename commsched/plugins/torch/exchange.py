"""GradientExchange: gradients into the flat buffers as backward produces them, averages out of them.

A *round* is one exchange of all gradients. It begins with the first gradient of a backward and ends with ``commit``, in
``step()``, or is *folded*: when a second gradient of a parameter comes before ``step()``, averages take the place of what was
handed over, so that autograd adds to them, and the sum is handed over in the next round. The average of (an average + what a
rank adds) is the average of the sums.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic
from weakref import WeakValueDictionary

import torch

import commsched

from ...core.errors import ClosedError, ConfigError, UnsupportedError
from ...core.group import TensorGroup
from ...core.manifest import Manifest, require_equal
from .agreement import (
    describe,
    norms,
    require_added_alike,
    require_changed_alike,
    require_equal_norms,
    require_equal_parameters,
    require_gradients,
    require_same_end,
    require_unfrozen_alike,
)
from .barrier import Barrier
from .device import open_device
from .first_use import FirstUse
from .flags import Flags, Kept, Used
from .guard import guard, is_guarded, release, unguarded
from .slot import Slot, give_places

log = logging.getLogger("commsched")

#: By id of parameter, which its exchange keeps alive.
_exchanges: WeakValueDictionary[int, GradientExchange] = WeakValueDictionary()


class GradientExchange:
    """Owns the flat buffers and the hooks.

    ``before_round`` is called before the averages of the last round may be overwritten. Hooks run in the thread that runs
    backward; everything else in the engine's main thread.

    Beside the gradients go two sets of flags for all parameters of the optimizer: which of them this rank has a gradient of
    when backward is over; and, when the round ends, whether this rank commits to the update, of which it has one still, and
    what it has made of those that it has read.

    Parameters that require no gradient at first have no place in a buffer. In the round in which any rank has a gradient of
    one, they get theirs, in a group of their own: all ranks learn of it from the first flags, which ranks that have a
    parameter unfrozen but without a place therefore await in ``step()`` at the latest.
    """

    def __init__(
        self, session: commsched.Session, model: torch.nn.Module, slots: Sequence[Slot], before_round: Callable[[], None]
    ) -> None:
        self.slots = [slot for slot in slots if slot.parameter.requires_grad]  # that have a place, once there are buffers
        self.enabled = True  # False within no_sync()
        self.barrier = Barrier(session.rank == 0)
        self._all: list[Slot] = []  # by flag
        self._late = [slot for slot in slots if not slot.parameter.requires_grad]  # without a place
        self._session = session
        self._model = model
        self._before_round = before_round
        self._groups: list[TensorGroup] = []
        self._flags: Flags | None = None
        self._round_open = False  # between the first gradient and the end of the round
        self._missing = 0  # parameters with a place that backward has not come to in this round
        self._all_handed_over = False  # in this round, and the ranks were told what this one has
        self._complete = False  # likewise, and what other ranks have gradients of has a place
        self._agreed: Kept | None = None  # the last that parts no ranks
        self._committed = False  # the last round ended with step(), and no other has begun
        self._checked = False  # gradients are read in this round, and all ranks have them
        self._unfrozen = False  # a slot without a place has a gradient or requires one
        self._accumulated = False  # autograd has made a gradient since the last update
        self._graph_kept = False  # a backward was told to keep its graph
        self.reader_unseen: str | None = None  # why step() had better wait for all updates, as a clause
        self._said = False  # that gradients accumulate
        self._pid = os.getpid()
        self._observer = session.observer
        self._last_gradient_at = 0.0
        # The model as it is registered; every rank's must be equal before anything else is exchanged.
        manifest = Manifest(tuple(spec for slot in self.slots for spec in slot.specs()))
        self._device = open_device(session, [(slot.name, slot.parameter) for slot in self.slots or slots])
        records = session.gather({"manifest": manifest.to_record(), "frozen": describe(self._late)})
        require_equal([Manifest.from_record(record["manifest"]) for record in records])
        require_equal_parameters([record["frozen"] for record in records])
        self._claim(self.slots)
        self._before, self._after = self._before_gradient, self._on_gradient  # what hooks do
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._add(slots)

    def _add(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.flag = len(self._all)
            self._all.append(slot)
            slot.await_average = partial(self.wait, slot)
            parameter = slot.parameter
            if not parameter.is_floating_point() or parameter.is_inference():
                continue  # it can never have a gradient
            frozen = not parameter.requires_grad
            parameter.requires_grad_(True)  # which hooks want, and outlast
            self._handles += self._hook(slot)
            parameter.requires_grad_(not frozen)

    def _hook(self, slot: Slot) -> list[torch.utils.hooks.RemovableHandle]:
        return [
            slot.parameter.register_hook(lambda _: self._before(slot)),
            slot.parameter.register_post_accumulate_grad_hook(lambda _: self._after(slot)),
        ]

    def _claim(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if _exchanges.get(id(slot.parameter), self) is not self:
                raise ConfigError(
                    f"parameter '{slot.name}' belongs to another ScheduledOptimizer; call that one's detach() first"
                )
        for slot in slots:
            _exchanges[id(slot.parameter)] = self

    def meet(self) -> None:
        """Before parameters are added, where ranks are to wait for each other: those that train on instead are told.

        Raises:
            UnsupportedError: other ranks add none.
            TransportError: likewise; they are in another round.
        """
        if self._round_open:
            self._fold()
        elif self._flags is not None:  # else the ranks have been together in nothing yet
            nothing = [False] * len(self._all)
            self._flags.begin_step()
            self._flags.offer_used(False, True, nothing)
            self._flags.offer_kept(False, False, nothing, nothing, norms([None] * len(nothing)))
            self._used()

    def add(self, slots: Sequence[Slot]) -> None:
        """Further parameters of the optimizer, which every rank adds, in the same order. No update may be outstanding.

        Raises:
            ManifestMismatch: the ranks' parameters differ.
        """
        require_equal_parameters(self._session.gather(describe(slots)))
        self._late += slots
        self._add(slots)
        if self._flags is not None:
            self._flags.release()
            self._flags = Flags(self._session, self._device, len(self._all))

    def detach(self) -> None:
        """Remove the hooks and let go of the buffers; no update may be outstanding. Collective."""
        if self._round_open:
            self._fold()
        self.settle()
        for handle in self._handles:
            handle.remove()
        for slot in self._all:
            if _exchanges.get(id(slot.parameter)) is self:
                del _exchanges[id(slot.parameter)]
            release(slot.gradient)
            release(slot.parameter)
        for group in self._groups:
            group.release()
        if self._flags is not None:
            self._flags.release()
        self._device.close()

    def finish(self) -> None:
        """Nothing comes after. What a last backward without ``step()`` has begun to send can end only if all ranks send all."""
        if self._round_open:
            self._hand_over_rest()
        self.settle()

    def settle(self) -> None:
        """Return when every gradient that was handed over is ready for the network, also one that no step uses."""
        self._device.settle()

    def record_first_use(self) -> None:
        """From now on, note which parameter is used first, second, ..."""
        self._use_order = FirstUse(self.slots, self._device)

    def before_compiling(self) -> None:
        """Something is about to be compiled. It must not find guarded parameters, so whatever order was noted is enough; nor
        must it compile hooks that backward calls within a compiled step."""
        self._use_order.end()
        self._before, self._after = torch.compiler.disable(self._before_gradient), torch.compiler.disable(self._on_gradient)

    @property
    def flags(self) -> Flags:
        """With the buffers, made at the first gradient, when rank 0's forward has shown the order of the layers."""
        if self._flags is None:
            order = self._session.gather(self._use_order.order())[0]
            self.slots = [self._all[flag] for flag in order]
            if self.slots:
                self._groups.append(give_places(self._session, self._device, self.slots))
            self._flags = Flags(self._session, self._device, len(self._all))
        return self._flags

    @property
    def manifests(self) -> list[Manifest]:
        """What was registered, in forward order; first those that required a gradient from the start."""
        return [group.manifest for group in self._groups]

    # --- one round ---

    def _before_gradient(self, slot: Slot) -> None:
        """Before autograd adds to ``.grad``: what is outstanding for it must not be touched."""
        if slot.pending:  # no forward has read the parameter since step()
            self._require_graph_from_before(slot)
            self._before_round()
        if self._committed:
            self._require_zeroed(slot)
        self._accumulated = True
        self._graph_kept = self._graph_kept or _keeps_graph()
        if self._round_open and (slot.ready or self._all_handed_over):
            self._fold()

    def _require_graph_from_before(self, slot: Slot) -> None:
        if not self._graph_kept and self.kept_by_any_rank([slot]):
            raise UnsupportedError(
                f"'{slot.name}' has a gradient, but since step() nothing has read it that waits for its update: TorchScript, "
                "an extension or a CUDA graph read it as it was, or this backward is of a graph from before step(). Call "
                "optimizer.synchronize() after step()"
            )

    def _require_zeroed(self, slot: Slot) -> None:
        """A gradient that is used once more, with others added, must be there on all ranks."""
        if slot.parameter.grad is not slot.gradient:
            return
        with unguarded():
            kept_as_it_was = slot.gradient._version == slot.version
        if kept_as_it_was and 0 < self.flags.kept().share[slot.flag] < 1:
            raise UnsupportedError(
                f"the gradient of '{slot.name}' was kept over step(), but other ranks had none, so they have not kept the "
                "average: call optimizer.zero_grad() in every step"
            )

    def _on_gradient(self, slot: Slot) -> None:
        if not self.enabled:
            return
        gradient = slot.parameter.grad
        assert gradient is not None
        if not self._round_open:
            self._begin_round()
            self._guard_left(slot)
        if self._observer is not None:
            began, self._last_gradient_at = self._last_gradient_at, monotonic()
            self._observer.on_span("backward", slot.name, began, self._last_gradient_at)
        self._hand_over(slot, gradient)
        if slot.proxies:
            self._missing -= 1
        if self._missing == 0 and all(late.ready or not late.parameter.requires_grad for late in self._late):
            self._hand_over_rest()  # now: this rank may wait elsewhere before step(), and another for it, to read gradients

    def _begin_round(self) -> None:
        if self._round_open:
            return
        self._before_round()
        if self._committed:
            self._committed = False
            for slot in self.slots:
                self._require_zeroed(slot)
        flags = self.flags
        for group in self._groups:
            group.begin_step()
        flags.begin_step()
        self._round_open = True
        self._all_handed_over = self._complete = self._checked = self._unfrozen = False
        self._missing = sum(slot.parameter.requires_grad for slot in self.slots)
        for slot in self._all:
            slot.ready = slot.has_gradient = slot.was_read = False

    def _guard_left(self, first: Slot) -> None:
        """Backward has begun a round with ``first``. The gradients of passes before, or set by hand, travel too, once it is
        over: who reads one then waits for its average."""
        for slot in self._all:
            slot.left = slot.parameter.grad
            if slot.left is not None and slot is not first:
                if is_guarded(slot.left):
                    slot.left = slot.own_gradient(slot.left)
                guard(slot.left, slot.await_average)

    def _hand_over(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Put ``gradient`` (None: zeros) into the buffer and tell the core. From here the average is on its way."""
        slot.ready = True
        slot.has_gradient = gradient is not None
        known, slot.left = slot.left, None
        if known is not None:
            release(known)
        if gradient is not None and gradient is not slot.gradient:
            slot.require_averageable(gradient)
        if not slot.proxies:
            assert gradient is not None
            self._keep_late(slot, gradient if gradient is known else slot.own_gradient(gradient))
            return
        slot.require_in_buffer()
        if slot.rows is not None:
            slot.rows.write(gradient, slot.view)
            slot.gradient = gradient if gradient is not None else torch.zeros_like(slot.view, layout=torch.sparse_coo)
            slot.filled = False
        elif gradient is None:
            slot.put_zeros()
        elif gradient is not slot.gradient and gradient is known:
            slot.move_in(gradient)
        elif gradient is not slot.gradient:
            slot.copy_in(gradient)
        slot.version = slot.gradient._version
        if gradient is not None:
            guard(slot.gradient, slot.await_average)
        self._device.when_written(slot.notify_ready)

    def _hand_over_rest(self) -> None:
        """What backward did not produce (zeros, unless it was accumulated before), and say what it was. Never waits."""
        if self._all_handed_over:
            return
        self._all_handed_over = True
        for slot in [*self.slots, *self._late]:
            gradient = slot.parameter.grad
            if not slot.ready and (slot.proxies or gradient is not None):
                self._hand_over(slot, gradient)
        for slot in self._late:
            self._unfrozen = self._unfrozen or slot.has_gradient or slot.parameter.requires_grad
        self.flags.offer_used(self._unfrozen, False, [slot.has_gradient for slot in self._all])

    def _complete_round(self) -> None:
        """Backward is over. Waits for the other ranks' only while there are unfrozen parameters without a place."""
        self._hand_over_rest()
        if not self._complete:
            self._complete = True
            if self._unfrozen:
                self._exchange_late()

    def commit(self) -> None:
        """Hand over the rest, and commit this rank to the update; all ranks must, or none. Does not wait for averages, unless
        what they are to be was edited."""
        if not self._accumulated and any(slot.parameter.grad is not None for slot in self._all):
            self.reader_unseen = "gradients are not made by backward, so what reads the parameters for them may not wait"
        self._begin_round()
        for slot in self.slots:
            slot.require_in_buffer()
            gradient = slot.parameter.grad
            if not slot.ready and gradient is not None and gradient.requires_grad:
                with unguarded():
                    slot.parameter.grad = gradient.detach()  # of torch.func.grad, say: nobody differentiates it any more
        self._complete_round()
        changed = [slot.is_changed() for slot in self._all]
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is not None and gradient is not slot.gradient:
                self._adopt(slot, gradient)
        for slot in self._late:
            if slot.parameter.grad is not None:
                raise UnsupportedError(
                    f"'{slot.name}'.grad was set after backward, or after other gradients were read; until now it had none, "
                    "so it would not be averaged: set it before"
                )
        keeps = [slot.parameter.grad is not None for slot in self._all]
        self._offer_kept(True, keeps, changed)
        with unguarded():
            for slot, edit in zip(self._all, changed):
                if edit or slot.was_read:
                    slot.version = slot.gradient._version
        self._round_open = self._accumulated = False
        self._committed = True
        if self._use_order.is_open:
            self._use_order.end()
            unseen = self._use_order.unseen()
            if unseen is not None:
                self.reader_unseen = (
                    f"'{unseen}' is read by what does not wait for its update (TorchScript or an extension, say)"
                )

    def _adopt(self, slot: Slot, gradient: torch.Tensor) -> None:
        """What the user has put into ``.grad`` since backward is what the update uses."""
        self._await_average(slot)
        slot.require_averageable(gradient)
        if slot.rows is not None:
            slot.gradient = gradient
            return
        slot.copy_in(gradient)

    def _offer_kept(self, committed: bool, keeps: list[bool], changed: list[bool]) -> None:
        edited = [slot if kept and (slot.was_read or edit) else None for slot, kept, edit in zip(self._all, keeps, changed)]
        self.flags.offer_kept(committed, self._unfrozen, keeps, changed, norms(edited))

    def _fold(self) -> None:
        """End the round without an update: its averages stay in ``.grad``, except where the user has dropped them.

        It blocks, within backward too, until every rank has come to the end of its round, and all is offered before anything
        is awaited. A rank that comes there by ``step()`` makes this an error on both.

        Raises:
            TransportError: another rank called step().
        """
        self._complete_round()
        changed = [slot.is_changed() for slot in self._all]
        # What has taken the place of an average that nobody has seen is a new sum, which begins on this rank alone.
        keeps = [
            slot.parameter.grad is slot.gradient or (slot.was_read and slot.parameter.grad is not None) for slot in self._all
        ]
        self._offer_kept(False, keeps, changed)
        kept = self._kept(committed=False)
        for slot in self.slots:
            self._await_average(slot)
            if not slot.has_gradient and slot.parameter.grad is None and kept.share[slot.flag] > 0:
                slot.parameter.grad = slot.gradient  # or what this rank adds would count for less than the others'
        self._round_open = False
        if not self._said and any(share > 0 for share in kept.share):
            self._said = True
            if self._session.rank == 0:
                log.info(
                    "gradients accumulate over several backward passes, and each is averaged; all but the last within "
                    "optimizer.no_sync() would save its traffic"
                )

    # --- parameters without a place in a buffer ---

    def _keep_late(self, slot: Slot, gradient: torch.Tensor) -> None:
        slot.specs()  # before other ranks wait for it
        if str(gradient.device) != self._session.device:
            raise UnsupportedError(
                f"the gradient of '{slot.name}' is on {gradient.device}, but gradients are averaged on {self._session.device}"
            )
        slot.gradient = gradient
        guard(gradient, slot.await_average)

    def _exchange_late(self) -> None:
        """Give a place to those that any rank has a gradient of, in this very round."""
        used = self._used()
        late = [slot for slot in self._late if used.share[slot.flag] > 0]
        if not late:
            return
        gradients = {slot.flag: slot.gradient for slot in late if slot.has_gradient}
        self._claim(late)
        group = give_places(self._session, self._device, late)
        self._groups.append(group)
        self._late = [slot for slot in self._late if not slot.proxies]
        self.slots += late
        group.begin_step()
        for slot in late:
            gradient = gradients.get(slot.flag)
            if gradient is not None:
                release(gradient)
                if slot.rows is None:
                    slot.move_in(gradient)
            self._hand_over(slot, gradient)

    # --- averages ---

    def wait(self, slot: Slot) -> None:
        """Until the average of ``slot`` is in ``slot.gradient``.

        Raises:
            UnsupportedError: it is read before step() where its average cannot be there, or would not be of use.
            ClosedError: it is read in a forked process.
        """
        if os.getpid() != self._pid:
            raise ClosedError("a forked process reads gradients whose averages are outstanding")
        if self._round_open:
            if torch._C._current_graph_task_id() != -1:
                raise UnsupportedError(
                    f"the gradient of '{slot.name}' is read within backward: its average cannot be there yet"
                )
            with self.barrier.waiting("gradients are read before step()"):
                self._complete_round()
                self._require_gradients_of_all_ranks()
                self._await_average(slot)
            slot.was_read = True
            return
        self._await_average(slot)

    def wait_for_all(self) -> None:
        """Until every average is in its view, and the flags of ``step()`` are there."""
        for slot in self.slots:
            self.wait(slot)
        self.flags.kept()

    def _await_average(self, slot: Slot) -> None:
        for proxy in slot.proxies:
            proxy.wait()
        if slot.rows is not None and not slot.filled:
            slot.filled = True
            with torch.no_grad(), unguarded():
                slot.gradient.copy_(slot.rows.read(slot.view))
                slot.version = slot.gradient._version
        release(slot.gradient)

    def _used(self) -> Used:
        used = self.flags.used()
        require_added_alike(used.adding, self._session.rank)
        require_unfrozen_alike(used.unfrozen, self._late, self._session.rank)
        return used

    def _kept(self, committed: bool) -> Kept:
        kept = self.flags.kept()
        if kept is self._agreed:
            return kept
        require_same_end(kept, committed, self._session.rank, self._groups[0].step if self._groups else 0)
        require_unfrozen_alike(kept.unfrozen, self._late, self._session.rank)
        require_changed_alike(kept, self._all)
        require_equal_norms(kept, self._all, self._unaveraged)
        self._agreed = kept
        return kept

    def _unaveraged(self) -> str | None:
        """The name of a parameter of the model that has gradients, but of this rank only."""
        ours = {id(slot.parameter) for slot in self._all} | set(_exchanges)
        return next(
            (name for name, each in self._model.named_parameters() if each.requires_grad and id(each) not in ours), None
        )

    def _require_gradients_of_all_ranks(self) -> None:
        if not self._checked:
            self._checked = True
            require_gradients(self._used(), self._all, self._session.rank)

    def updating(self) -> AbstractContextManager[object]:
        """Around an update: who reads the parameters after it reads them updated."""
        return self._device.updating()

    def is_there(self, slot: Slot) -> bool:
        """Whether :meth:`wait` and :meth:`kept_by_any_rank` would return at once."""
        return slot.proxies[0].is_open and slot.proxies[-1].is_open and self.flags.are_there()

    def kept_by_any_rank(self, slots: Sequence[Slot]) -> list[Slot]:
        """Those of ``slots`` of which any rank had a gradient when it called ``step()``.

        Raises:
            TransportError: some ranks called step() and others did not; an update would part them.
            UnsupportedError: some ranks have changed a gradient, or unfrozen a parameter, and others have not; likewise.
        """
        kept = self._kept(committed=True)
        return [slot for slot in slots if kept.share[slot.flag] > 0]

    def forward_began(self) -> None:
        """Backward spans of the trace are measured from the end of the forward before them."""
        self._last_gradient_at = monotonic()


#: Whether the backward that runs was told to keep its graph.
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
