"""GradientExchange: gradients into the flat buffers as backward produces them, averages out of them.

A *round* is one exchange of all gradients. It begins with the first gradient of a backward and ends with ``commit``, in
``step()``, or is *folded*: when a second gradient of a parameter comes before ``step()``, averages take the place of what was
handed over, so that autograd adds to them, and the sum is handed over in the next round. The average of (an average + what a
rank adds) is the average of the sums.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic

import torch

import commsched

from ...core.errors import ClosedError, UnsupportedError
from .agreement import norm
from .barrier import Barrier
from .graph_task import adds_to_grad, at_end, keeps_graph
from .guard import unguarded
from .own_sums import OwnSums
from .places import Places
from .rounds import Round
from .slot import Slot

log = logging.getLogger("commsched")


class GradientExchange:
    """Owns the hooks, and decides when a round begins and how it ends.

    ``before_round`` is called before the averages of the last round may be overwritten. Hooks run in the thread that runs
    backward; everything else in the engine's main thread.
    """

    def __init__(
        self, session: commsched.Session, model: torch.nn.Module, slots: Sequence[Slot], before_round: Callable[[], None]
    ) -> None:
        self.enabled = True  # False within no_sync()
        self.barrier = Barrier(session.rank == 0)
        self.places = Places(session, model, slots)
        self._round = Round(session, self.places)
        self._before_round = before_round
        self._committed = False  # the last round ended with step(), and no other has begun
        self._own_sums = OwnSums()  # between rounds
        self._accumulated = False  # autograd has made a gradient since the last update
        self._backward = -1  # the last that made a gradient
        self._running = (-1, -1)  # the backward that runs, and its thread; the last one if it ended in an error
        self._graph_kept = False  # a backward was told to keep its graph
        self.reader_unseen: str | None = None  # why step() had better wait for all updates, as a clause
        self._says_accumulation = session.rank == 0  # once
        self._pid = os.getpid()
        self._observer = session.observer
        self._last_gradient_at = 0.0
        self._before, self._after = self._before_gradient, self._on_gradient  # what hooks do
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._hook_all(slots)

    def _hook_all(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
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

    def meet(self) -> None:
        """Before parameters are added, where ranks are to wait for each other: those that train on instead are told.

        Raises:
            UnsupportedError: other ranks add none.
            TransportError: likewise; they are in another round.
        """
        if self._round.is_open:
            self._fold()
        elif self._committed:
            self._round.kept(committed=True)  # of the last round, not of the meeting
        if self.places.are_made:  # else the ranks have been together in nothing yet
            self._round.meet()

    def add(self, slots: Sequence[Slot]) -> None:
        """Further parameters of the optimizer, which every rank adds, in the same order. No update may be outstanding.

        Raises:
            ManifestMismatch: the ranks' parameters differ.
        """
        self.places.add(slots)
        self._hook_all(slots)

    def detach(self) -> None:
        """Remove the hooks and let go of the buffers; no update may be outstanding. Collective."""
        if self._round.is_open:
            self._fold()
        self.settle()
        self._own_sums.forget()
        for handle in self._handles:
            handle.remove()
        self.places.release()

    def finish(self) -> None:
        """Nothing comes after. What a last backward without ``step()`` has begun to send can end only if all ranks send all."""
        if self._round.is_open:
            self._round.hand_over_rest()
        self.settle()

    def settle(self) -> None:
        """Return when every gradient that was handed over is ready for the network, also one that no step uses."""
        self.places.device.settle()

    def before_compiling(self) -> None:
        """Something is about to be compiled. It must not find guarded parameters, so whatever order was noted is enough; nor
        must it compile hooks that backward calls within a compiled step."""
        self.places.use_order.end()
        self._before, self._after = torch.compiler.disable(self._before_gradient), torch.compiler.disable(self._on_gradient)

    # --- backward ---

    def _before_gradient(self, slot: Slot) -> None:
        """Before autograd adds to ``.grad``: what is outstanding for it must not be touched."""
        if slot.pending:  # no forward has read the parameter since step()
            self._require_graph_from_before(slot)
            self._before_round()
        if self._committed:
            self._require_zeroed(slot)
        self._accumulated = True
        self._graph_kept = self._graph_kept or keeps_graph()
        self._note_users(slot)
        before, self._backward = self._backward, torch._C._current_graph_task_id()
        if self._running[0] != self._backward:
            self._running = self._backward, threading.get_ident()
            at_end(partial(self._backward_ended, self._backward))
        current = self._round
        if not current.is_open or not (
            slot.ready or current.all_handed_over or (before != self._backward and current.is_dropped())
        ):
            return
        if not adds_to_grad(slot.parameter):
            return
        self._fold()  # on all ranks, or they are told: what is dropped is so on all, whatever parts of the model each uses

    def _backward_ended(self, task: int) -> None:
        if self._running[0] == task:
            self._running = -1, -1

    def _note_users(self, slot: Slot) -> None:
        gradient = slot.users = slot.parameter.grad
        if gradient is None or gradient is slot.gradient or gradient is slot.made or not adds_to_grad(slot.parameter):
            return
        with unguarded():
            slot.require_own_memory(gradient)

    def _require_graph_from_before(self, slot: Slot) -> None:
        if not self._graph_kept and self.kept_by_any_rank([slot]):
            raise UnsupportedError(
                f"'{slot.name}' has a gradient, but since step() nothing has read it that waits for its update: TorchScript, "
                "an extension or a CUDA graph read it as it was, or this backward is of a graph from before step(). Call "
                "optimizer.synchronize() after step()"
            )

    def _require_zeroed(self, slot: Slot) -> None:
        """A gradient that is used once more, with others added, must be there on all ranks."""
        gradient = slot.parameter.grad
        if gradient is None or slot in self._own_sums:  # added to since, and looked at before
            return
        if not 0 < self._round.kept(committed=True).share[slot.flag] < 1:
            return
        with unguarded():
            zeroed = norm(gradient) == 0.0
        if not zeroed:
            raise UnsupportedError(
                f"the gradient of '{slot.name}' was kept over step(), but other ranks had none, so they have not kept the "
                "average: call optimizer.zero_grad() in every step"
            )

    def _on_gradient(self, slot: Slot) -> None:
        gradient = slot.parameter.grad
        if gradient is None:
            raise UnsupportedError(
                f"the gradient of '{slot.name}' was dropped within backward, by a hook that was registered before the "
                "optimizer was wrapped (one that makes the update, say): register it after that"
            )
        if not self.enabled:
            if self._round.is_open:
                self._round.guard_left(slot)  # the round that other gradients have begun takes it along
            else:
                self._own_sums.note(slot, gradient)
            if slot.users is None:
                slot.made = gradient
            return
        if not self._round.is_open:
            self._begin_round(slot)
            for left in self.places.all:
                if left is not slot:
                    self._round.guard_left(left)
        if self._observer is not None:
            began, self._last_gradient_at = self._last_gradient_at, monotonic()
            self._observer.on_span("backward", slot.name, began, self._last_gradient_at)
        self._round.take(slot, gradient)

    def _begin_round(self, first: Slot | None = None) -> None:
        """``first`` is what backward begins it with, and has added to; None: ``step()`` begins it, with gradients that are set
        by hand, which are new if they are other objects."""
        self._before_round()
        if self._committed:
            self._committed = False
            for slot in self.places.slots:
                if slot is not first and (first is not None or slot.parameter.grad is slot.gradient):
                    self._require_zeroed(slot)
        self._own_sums.forget()
        self._round.begin()

    def forward_began(self) -> None:
        """Backward spans of the trace are measured from the end of the forward before them."""
        self._last_gradient_at = monotonic()

    # --- the end of a round ---

    def commit(self) -> None:
        """Hand over the rest, and commit this rank to the update; all ranks must, or none. Does not wait for averages, unless
        what they are to be was edited."""
        if not self._accumulated and any(slot.parameter.grad is not None for slot in self.places.all):
            self.reader_unseen = "gradients are not made by backward, so what reads the parameters for them may not wait"
        own_changed = self._own_sums.changed()
        if not self._round.is_open:
            self._begin_round()
        places = self.places
        for slot in places.slots:
            slot.require_in_buffer()
            gradient = slot.parameter.grad
            if not slot.ready and gradient is not None and gradient.requires_grad:
                with unguarded():
                    slot.parameter.grad = gradient.detach()  # of torch.func.grad, say: nobody differentiates it any more
        self._round.complete()
        changed = [slot.is_changed() for slot in places.all]
        for slot in places.slots:
            gradient = slot.parameter.grad
            if gradient is not None and gradient is not slot.gradient:
                self._adopt(slot, gradient)
        for slot in places.late:
            if slot.parameter.grad is not None:
                raise UnsupportedError(
                    f"'{slot.name}'.grad was set after backward, or after other gradients were read; until now it had none, "
                    "so it would not be averaged: set it before"
                )
        keeps = [slot.parameter.grad is not None for slot in places.all]
        self._round.end(True, keeps, changed, own_changed)
        with unguarded():
            for slot, edit in zip(places.all, changed):
                if edit or slot.was_read:
                    slot.version = slot.gradient._version
        self._round.is_open = self._accumulated = False
        self._committed = True
        if places.use_order.is_open:
            places.use_order.end()
            unseen = places.use_order.unseen()
            if unseen is not None:
                self.reader_unseen = (
                    f"'{unseen}' is read by what does not wait for its update (TorchScript or an extension, say)"
                )

    def _adopt(self, slot: Slot, gradient: torch.Tensor) -> None:
        """What the user has put into ``.grad`` since backward is what the update uses."""
        self._round.await_average(slot)
        slot.require_averageable(gradient)
        if slot.rows is not None:
            slot.gradient = gradient
            return
        slot.copy_in(gradient)

    def _fold(self) -> None:
        """End the round without an update: its averages stay in ``.grad``, except where the user has dropped them.

        It blocks, within backward too, until every rank has come to the end of its round, and all is offered before anything
        is awaited. A rank that comes there by ``step()`` makes this an error on both.

        Raises:
            TransportError: another rank called step().
        """
        self._round.complete()
        changed = [slot.is_changed() for slot in self.places.all]
        # What has taken the place of an average that nobody has seen is a new sum, which begins on this rank alone.
        keeps = [
            slot.parameter.grad is slot.gradient or (slot.was_read and slot.parameter.grad is not None)
            for slot in self.places.all
        ]
        self._round.end(False, keeps, changed)
        self._round.used()
        kept = self._round.kept(committed=False)
        for slot in self.places.slots:
            self._round.await_average(slot)
            if not slot.has_gradient and slot.parameter.grad is None and kept.share[slot.flag] > 0:
                slot.parameter.grad = slot.gradient  # or what this rank adds would count for less than the others'
        self._round.is_open = False
        if self._says_accumulation and any(share > 0 for share in kept.share):
            self._says_accumulation = False
            log.info(
                "gradients accumulate over several backward passes, and each is averaged; all but the last within "
                "optimizer.no_sync() would save its traffic"
            )

    # --- averages ---

    def wait(self, slot: Slot) -> None:
        """Until the average of ``slot`` is in ``slot.gradient``.

        Raises:
            UnsupportedError: it is read before step() where its average cannot be there, or would not be of use.
            ClosedError: it is read in a forked process.
        """
        if os.getpid() != self._pid:
            raise ClosedError("a forked process reads gradients whose averages are outstanding")
        if self._round.is_open:
            if torch._C._current_graph_task_id() != -1:
                if slot.left is not None and not slot.ready:
                    return  # still this rank's own: an autograd function of the user's adds to it, say
                raise UnsupportedError(
                    f"the gradient of '{slot.name}' is read within backward: its average cannot be there yet"
                )
            task, thread = self._running
            if task != -1 and thread != threading.get_ident():
                raise UnsupportedError(
                    f"the gradient of '{slot.name}' is read while backward runs in another thread: its average cannot be there "
                    "yet; read it after backward"
                )
            with self.barrier.waiting("gradients are read before step()"):
                self._round.complete()
                self._round.require_gradients()
                self._round.await_average(slot)
            slot.was_read = True
            return
        self._round.await_average(slot)

    def wait_for_all(self) -> None:
        """Until every average is in its view, and the flags of ``step()`` are there."""
        for slot in self.places.slots:
            self.wait(slot)
        self.places.flags.kept()

    def updating(self) -> AbstractContextManager[object]:
        """Around an update: who reads the parameters after it reads them updated."""
        return self.places.device.updating()

    def is_there(self, slot: Slot) -> bool:
        """Whether :meth:`wait` and :meth:`kept_by_any_rank` would return at once."""
        return slot.proxies[0].is_open and slot.proxies[-1].is_open and self.places.flags.are_there()

    def kept_by_any_rank(self, slots: Sequence[Slot]) -> list[Slot]:
        """Those of ``slots`` of which any rank had a gradient when it called ``step()``.

        Raises:
            TransportError: some ranks called step() and others did not; an update would part them.
            UnsupportedError: some ranks have changed a gradient, or unfrozen a parameter, and others have not; likewise.
        """
        kept = self._round.kept(committed=True)
        return [slot for slot in slots if kept.share[slot.flag] > 0]
