"""GradientExchange: copies gradients into the flat buffers as backward produces them, and averages out of the buffers.

A *round* is one exchange of all gradients. It begins with the first gradient of a backward. It ends with ``commit``, in
``step()``, or it is *folded*: when backward makes a second gradient of a parameter before ``step()``, averages replace the
submitted gradients, so that autograd adds to the averages, and the sum is submitted in the next round. This is correct because
the average of (an average + the gradient that each rank adds) is the average of the ranks' sums.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, finalize, ref

import torch

import commsched

from ...core.errors import ClosedError, CommschedError, UnsupportedError
from ..common.waits import require_may_wait
from .agreement import OwnSums, norm
from .edits import AwaitedGradient, Edits
from .guard import address, release, unguarded
from .join import require_joined
from .layout import GradientLayout, end_abandoned
from .norms import Measures
from .rounds import Round, RoundState
from .slot import BEFORE_SUBMISSION, GradientState, Slot, is_held
from .timing import FullWaitReport
from .torch_state import adds_to_grad, at_end, current_task, is_nested, keeps_graph

if TYPE_CHECKING:
    from .join import Join

log = logging.getLogger("commsched")

_SAVES_REENTRANT = (
    ". Reentrant checkpointing runs a backward for every use of a block: for one that is used several times in a forward, "
    "checkpoint(..., use_reentrant=False) would save it"
)


class GradientExchange:
    """Owns the backward hooks, and decides when a round begins and how it ends.

    Hooks run in the thread that runs backward. Guards wait for averages and updates in the thread that reads. Everything else
    runs in the training thread.

    The exchange lives as long as the parameters: while a parameter exists, its gradient is averaged, whatever else was
    dropped. The parameters refer to the exchange by their tensor hooks, which the garbage collector can traverse. The
    collector cannot traverse references that PyTorch keeps in C++ (post-accumulate hooks, ``.grad``), and guards have no
    owner; so post-accumulate hooks and guards refer to the exchange weakly.

    Args:
        before_round: a bound method, held weakly. It is called before the averages of the last round may be overwritten.
        superseded: a bound method, held weakly. It is called with a parameter's name when another optimizer is made for that
            parameter.
        compared: see :class:`Round`.
    """

    def __init__(
        self,
        session: commsched.Session,
        model: torch.nn.Module,
        slots: Sequence[Slot],
        before_round: Callable[[], None],
        superseded: Callable[[str], None],
        compared: Set[str],
    ) -> None:
        self.enabled = True  # False within no_sync()
        self.join: Join | None = None  # while ranks may run out of batches
        self.barrier = FullWaitReport(session.report_full_wait if session.rank == 0 else None)
        self.places = GradientLayout(session, model, slots, self._end)
        self._round = Round(session, self.places, self._ask_for_gradients, compared)
        self._complete_updates, self._superseded = WeakMethod(before_round), WeakMethod(superseded)
        self.put_in_place: Callable[[Slot], None] | None = None  # while updates are outstanding: runs one parameter's update
        self._own_sums = OwnSums()  # gradients that do not travel yet; used between rounds
        self._accumulated = False  # autograd has made a gradient since the last commit
        self._is_announced = False  # within a Join: the round that begins next is announced
        self._average_in_sum: str | None = None  # within a Join: a parameter whose ``.grad`` is an average plus an own sum
        self._left_with: list[bool] = []  # by flag: had a gradient when it left the round, for want of batches
        self._backward = -1  # the last backward that made a gradient (its graph task)
        self._running = (-1, -1)  # the running backward and its thread; remains set if that backward ended in an error
        # Then missing gradients are filled in when backward ends, not when the first of them is read, and a gradient that was
        # read is a plain tensor.
        self._compiled_code_reads = False
        self._graph_kept = False  # a backward has run with retain_graph
        self.reader_unseen: str | None = None  # why step() should wait for all updates from now on, as a clause
        self._says_accumulation = session.rank == 0  # log once that gradients accumulate
        self._session = session
        self._observer = session.observer
        self._last_gradient_at = 0.0
        self._before, self._after = self._before_gradient, self._on_gradient  # called by the hooks
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._hook_all(slots)
        self._at_close = _finish_at_close(session, WeakMethod(self._finish))
        self._collected = finalize(self, self.places.registered.abandon)
        self._collected.atexit = False
        self._released = finalize(self, self._at_close)
        self._released.atexit = False

    def _hook_all(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.await_gradient = AwaitedGradient(ref(self), slot.flag, slot.name)
            slot.await_update = self._weakly(slot)
            parameter = slot.parameter
            if not (parameter.is_floating_point() or parameter.dtype.is_complex) or parameter.is_inference():
                continue  # it can never have a gradient
            frozen = not parameter.requires_grad
            parameter.requires_grad_(True)  # required to register hooks; they remain when it is frozen again
            self._handles += self._hook(slot)
            parameter.requires_grad_(not frozen)

    def _hook(self, slot: Slot) -> list[torch.utils.hooks.RemovableHandle]:
        weak, flag, name = ref(self), slot.flag, slot.name  # not by _weakly: an extra call costs with many small parameters

        def after(_: torch.Tensor) -> None:
            exchange = weak()
            if exchange is None:
                raise ClosedError(
                    f"backward has made the gradient of '{name}', but the ScheduledOptimizer that averaged it is gone"
                )
            exchange._after(exchange.places.all[flag])

        return [
            slot.parameter.register_hook(lambda gradient: self._before(slot, gradient)),
            slot.parameter.register_post_accumulate_grad_hook(after),
        ]

    def _weakly(self, slot: Slot) -> Callable[[], None]:
        """Return a function that awaits the update of ``slot`` and does not keep this exchange alive."""
        weak, flag, name = ref(self), slot.flag, slot.name

        def await_update() -> None:
            exchange = weak()
            if exchange is None:
                raise ClosedError(f"parameter '{name}' is read, but its model is gone, and its update with it")
            exchange._await_update(exchange.places.all[flag])

        return await_update

    def await_gradient(self, slot: Slot) -> None:
        """Called when the gradient is read: waits for its average, and between ``step()`` and the update for the update."""
        if slot.state is GradientState.OUTSTANDING:
            self._await_update(slot)
        else:
            self.wait(slot)

    def _await_update(self, slot: Slot) -> None:
        put_in_place = self.put_in_place  # another thread may set it to None
        if put_in_place is not None:
            put_in_place(slot)

    def _before_round(self) -> None:
        complete_updates = self._complete_updates()
        if complete_updates is not None:  # else no update is outstanding
            complete_updates()

    def _end(self, name: str) -> None:
        """Called when all ranks make another optimizer that takes parameter ``name``, among others."""
        superseded = self._superseded()
        if superseded is not None:
            superseded(name)
        else:
            self.detach()

    @property
    def is_round_open(self) -> bool:
        """Whether there are averages, outstanding or complete, that no ``step()`` has committed to."""
        return self._round.is_open

    def await_all_ranks(self) -> None:
        """Wait for all ranks before parameters are added. A rank that continues training instead gets an error, too. Raises
        UnsupportedError if other ranks do not add parameters, and TransportError if they are in another round, too."""
        if self._round.is_open:
            self._fold()
        elif self._round.state is RoundState.COMMITTED:
            self._round.kept(committed=True)  # read the last round's flags before the meeting overwrites them
        if self.places.are_made:  # else there was no round yet, so that there are no flags to exchange
            self._round.await_all_ranks()

    def add(self, slots: Sequence[Slot]) -> None:
        """Add further parameters of the optimizer. Every rank adds the same ones in the same order. No update may be
        outstanding. Raises ManifestMismatch if the ranks' parameters differ."""
        self.places.add(slots)
        self._hook_all(slots)

    def detach(self) -> None:
        """Remove the hooks and release the buffers. No update may be outstanding. Collective."""
        if self._round.is_open:
            self._fold()
        self.settle()
        self.measures.end_round()
        self._own_sums.forget()
        for handle in self._handles:
            handle.remove()
        self._collected.detach()
        self._at_close()
        with torch.no_grad(), unguarded():
            for slot in self.places.all:
                gradient = slot.gradient
                if slot.rows is None and slot.proxies and slot.parameter.grad is gradient and address(gradient) == slot.address:
                    gradient.data = gradient.clone()  # it outlives the buffer
        self.places.release()

    def drop(self) -> None:
        """Release the model without the other ranks, from a session that has ended. Gradients, averages and outstanding updates
        are lost. Not collective."""
        for handle in self._handles:
            handle.remove()
        self._collected.detach()
        self._released.detach()  # it refers to the session, and so to the failure, whose traceback refers to this exchange
        self._at_close()
        self._own_sums.forget()
        self._round.drop()
        with unguarded():
            for slot in self.places.all:
                if slot.waiting is not None:
                    release(slot.waiting)
                    slot.waiting = None
                slot.parameter.grad = None
        self.places.drop()

    def _finish(self) -> None:
        """Called when the session closes. If the last backward had no ``step()``, its round is still open and can complete
        only if all ranks submit all gradients; so submit the rest."""
        self._before_round()
        if self._round.is_open:
            self._round.submit_rest()
            nothing = [False] * len(self.places.all)
            self._round.end(nothing, nothing)
            self._round.advance("close")
        self.settle()
        with suppress(CommschedError):  # whoever reads one of them gets the error
            self.measures.end_round()

    def forget_missing(self) -> None:
        """Called when gradients are dropped or zeroed: from now on, reading a missing ``.grad`` need not fill in the averages
        of other ranks' gradients."""
        self._round.without.forget()

    def settle(self) -> None:
        """Return when every submitted gradient is ready for the network, including gradients that no step uses."""
        self.places.device.settle()

    def before_compiling(self) -> None:
        """Called before code is compiled. The compiler must not find guarded parameters, so recording the order of first use
        ends here. It must not compile the hooks either, which backward calls within a compiled step."""
        self.places.use_order.end()
        self.edits.are_compared = False
        self._before, self._after = torch.compiler.disable(self._before_gradient), torch.compiler.disable(self._on_gradient)
        if self._round.without.noted:  # NoGradients changes the classes of parameters, too
            self._ask_for_gradients()

    def gradients_are_read_by_compiled_code(self) -> None:
        """Fill in missing gradients at the end of each backward from now on, because compiled code does not ask for them."""
        self._compiled_code_reads = True

    # --- backward ---

    def _before_gradient(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Called before autograd adds ``gradient`` to ``.grad``: completes the work that still needs the value of ``.grad``.

        Autograd adds nothing if ``gradient`` is None (an autograd function returned none for this parameter), or if the
        parameter was frozen since the forward.
        """
        current, parameter = self._round, slot.parameter
        slot.is_undefined = gradient is None or not parameter.requires_grad
        if slot.is_undefined:
            return
        if (
            current.state is RoundState.OPEN
            and self._running[0] == current_task()
            and parameter.grad is None
            and slot.state is GradientState.EXPECTED
        ):
            slot.users = None
            self._accumulated = True
            return  # the usual case, except for the first gradient of a backward. ``without`` has nothing in an open round
        if current.without.noted:
            current.without.forget()
        if slot.state is GradientState.OUTSTANDING:  # no forward has read the parameter since step()
            self._require_graph_from_before(slot)
            self._before_round()
        held = slot.users = slot.parameter.grad
        if held is not None:
            if current.given:
                self._require_given_released([slot])
            if current.state is RoundState.COMMITTED and slot.proxies:  # else it was added after that round
                self._require_zeroed(slot)
            self._require_own_memory(slot, held)
        self._accumulated = True
        before, self._backward = self._backward, current_task()
        if self._running[0] != self._backward:
            self._running = self._backward, threading.get_ident()
            self._graph_kept = self._graph_kept or keeps_graph()
            at_end(partial(self._backward_ended, self._backward, is_nested()))
        folds = current.is_open and (
            slot.state not in BEFORE_SUBMISSION
            or current.state is not RoundState.OPEN
            or (before != self._backward and current.is_dropped())
        )
        if (folds or self.join is not None) and adds_to_grad(slot.parameter):
            if folds:
                # All ranks fold, or all get an error. A round dropped here is dropped on all ranks, whatever parts each used.
                self._fold()
            if self.join is not None and not current.is_open:
                self._before_joined_gradient(slot)

    def _backward_ended(self, task: int, nested: bool) -> None:
        if self._running[0] == task:
            self._running = -1, -1
        if nested:
            return
        if self._compiled_code_reads:
            self._ask_for_gradients()
        else:
            self._round.backward_ended()

    def _ask_for_gradients(self) -> None:
        """Fill in averages where this rank has no gradient but other ranks have one: they are read, or may be read."""
        self._round.without.forget()
        if self._round.is_open:
            self._require_this_process()
            with self.barrier.waiting("gradients are read before step()"):
                self._round.complete()
                self._round.fill()

    def _require_own_memory(self, slot: Slot, gradient: torch.Tensor) -> None:
        if gradient is slot.gradient or gradient is slot.made or not adds_to_grad(slot.parameter):
            return
        with unguarded():
            slot.require_own_memory(gradient)

    def _require_given_released(self, slots: Iterable[Slot]) -> None:
        given = self._round.given
        for slot in slots:
            if slot in given:
                slot.require_released(given[slot])
                del given[slot]

    def _require_graph_from_before(self, slot: Slot) -> None:
        if not self._graph_kept and self.kept_by_any_rank([slot]):
            raise UnsupportedError(
                f"'{slot.name}' has a gradient, but since step() no reader that waits for its update has read it: TorchScript, "
                "an extension or a CUDA graph read the old value, or this backward is of a graph from before step(). Call "
                "optimizer.synchronize() after step()"
            )

    def _require_zeroed(self, slot: Slot) -> None:
        """Raise if a gradient kept over ``step()`` gets gradients added, but is not an average that all ranks have."""
        gradient = slot.parameter.grad
        if gradient is None or slot in self._own_sums:  # in _own_sums: checked when backward first added to it
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
        if slot.is_undefined:
            return  # nothing was added to .grad
        gradient = slot.parameter.grad
        if gradient is None:
            raise UnsupportedError(
                f"the gradient of '{slot.name}' was dropped within backward, by a hook that was registered before the "
                "optimizer was wrapped (one that makes the update, say): register it after that"
            )
        if not self.enabled:
            if self._round.is_open:
                self._round.hold(slot)  # it is submitted with the round that other gradients have begun
            else:
                self._own_sums.note(slot, gradient)
            if slot.users is None:
                slot.made = gradient
            return
        if self._round.state is not RoundState.OPEN and not self._round.is_open:
            self._begin_round(slot)
        if self._observer is not None:
            began, self._last_gradient_at = self._last_gradient_at, monotonic()
            self._observer.on_span("backward", slot.name, began, self._last_gradient_at)
        self._round.take(slot, gradient)

    def _begin_round(self, first: Slot | None = None) -> None:
        """Begin a round. ``first`` is the slot whose gradient begins it; backward has just added to it. ``None`` means that
        ``step()`` begins it, with gradients that were set by hand. Such a gradient is new if it is another object than the
        slot's."""
        self._before_round()
        held = [slot for slot in self.places.all if slot is not first and slot.parameter.grad is not None]
        if self._round.state is RoundState.COMMITTED:
            for slot in held:
                if slot.proxies and (first is not None or slot.parameter.grad is slot.gradient):
                    self._require_zeroed(slot)
        if self.join is None:
            require_joined(self._session)
        elif not self._is_announced:
            self._announce_round()
        self._is_announced, self._average_in_sum = False, None
        self._own_sums.forget()
        self._round.begin()
        if first is not None:
            for slot in held:
                self._round.hold(slot)

    # --- a rank that has run out of batches (see join.py) ---

    def use_join(self, join: Join | None) -> None:
        """From now on ranks may run out of batches as ``join`` says. ``None`` means that none may."""
        self.join, self._round.factor, self._is_announced = join, 1.0, False
        self._round.announce_late = None if join is None else partial(join.gives_places, self)
        self._round.before_wait = None if join is None else partial(join.live_share, self)

    def _before_joined_gradient(self, slot: Slot) -> None:
        """Called within a Join, before autograd adds to the ``.grad`` of ``slot`` and no round is open."""
        if self.enabled:
            if not self._is_announced:
                self._announce_round()
        elif slot.parameter.grad is slot.gradient and slot not in self._own_sums:
            with unguarded():
                if norm(slot.gradient) != 0.0:
                    self._average_in_sum = slot.name

    def _announce_round(self) -> None:
        """Announce that this rank begins a round. Averages that the live ranks have kept in ``.grad`` are contributed again, by
        them only, so they are scaled to count for all ranks."""
        assert self.join is not None
        self._before_round()
        again = [slot for slot in self.places.slots if slot.parameter.grad is slot.gradient and slot not in self._own_sums]
        self._is_announced = True
        self._round.factor, factor = self.join.begins(self, waits=bool(again) or self._average_in_sum is not None)
        if factor != 1.0:
            self._require_sums_alone()
            with torch.no_grad(), unguarded():
                for slot in again:
                    slot.gradient.mul_(factor)
        self._average_in_sum = None

    def _require_sums_alone(self) -> None:
        if self._average_in_sum is not None:
            raise UnsupportedError(
                f"the gradient of '{self._average_in_sum}' is an average plus gradients made within no_sync(), and a rank has "
                "run out of batches, so the average would not count for all ranks: put only the last of several backward "
                "passes outside no_sync(), and call zero_grad() after step()"
            )

    def leave_round(self) -> bool:
        """Submit the rest of the open round, if there is one, and leave its end to the live ranks. Return whether there is one.
        Waits for no rank."""
        if not self._round.is_open:
            return False
        self._round.submit_rest()
        gradients = [slot.parameter.grad for slot in self.places.all]
        self._left_with = [gradient is slot.gradient for slot, gradient in zip(self.places.all, gradients)]
        self._round.leave(self._changed(gradients))
        return True

    def follow_round(self, factor: float) -> None:
        """Take part in a round that the live ranks have begun, with sums that this rank has not sent yet, and zeros. It does
        not wait for the round's end. ``factor`` is the first that :meth:`Join.begins` returns."""
        self._require_sums_alone()
        own_changed = self._own_sums.changed()
        unsent = {slot for slot in self.places.all if slot in self._own_sums}
        self._own_sums.forget()
        self._round.factor = factor
        self._round.begin()
        with unguarded():
            for slot in self.places.all:
                if slot.parameter.grad is None:
                    continue
                if slot in unsent:
                    self._round.hold(slot)
                else:
                    slot.parameter.grad = None  # it is of a step that is over
        self._round.submit_rest(live=False)
        self._left_with = nothing = [False] * len(self.places.all)
        self._round.leave(nothing, own_changed)

    def follow_places(self) -> None:
        """Take part when the live ranks of a round that this rank has left give places to parameters."""
        self._round.exchange_late()

    def take_over_end(self) -> bool:
        """Wait until the round that this rank has left, if there is one, is over, and end it as the live ranks did: with
        averages in ``.grad``, or without any gradients. Return whether they made an update."""
        current = self._round
        if current.state is not RoundState.LEFT:
            return False
        kept = current.left()
        committed = kept.committed > 0
        keeps = [not committed and share > 0 for share in kept.share]
        if kept.live == 0.0:  # all have left it, each with what it had; Join takes over one rank's choice in the end
            keeps = self._left_with
        for slot in self.places.slots:
            current.await_average(slot)
        current.advance("commit" if committed else "fold")
        self.keep_averages([flag for flag, keep in enumerate(keeps) if keep])
        return committed

    @property
    def averages_kept(self) -> list[int] | None:
        """The flags of the gradients that stay in ``.grad`` after a round that ended without ``step()``; ``None`` if the last
        round ended otherwise."""
        if self._round.state is not RoundState.FOLDED:
            return None
        return [slot.flag for slot in self.places.all if slot.parameter.grad is not None]

    def keep_averages(self, flags: Iterable[int]) -> None:
        """Put the averages of the last round into the ``.grad`` of the parameters with ``flags``. Drop all other gradients."""
        flags = set(flags)
        with unguarded():
            for slot in self.places.all:
                slot.parameter.grad = slot.gradient if slot.flag in flags and slot.proxies else None

    def forward_began(self) -> None:
        """Note the time from which the trace measures the next backward span: the last forward hook before the backward."""
        self._last_gradient_at = monotonic()

    # --- the end of a round ---

    def commit(self, hyper_parameters: Sequence[Mapping[str, Any]]) -> list[bool]:
        """Submit the remaining gradients, and commit this rank to the update with ``hyper_parameters`` (by group).

        Either all ranks commit, with the same hyper-parameters, or none. It does not wait for averages, unless the user has
        replaced gradients. Returns by flag whether this rank has a gradient.
        """
        self._round.without.forget()
        if not self._accumulated and any(slot.parameter.grad is not None for slot in self.places.all):
            self.reader_unseen = (
                "gradients are not made by backward, so the code that reads the parameters for them may not wait"
            )
        own_changed = self._own_sums.changed()
        if self._round.given:
            self._require_given_released(self.places.slots)
        if not self._round.is_open:
            self._begin_round()
        places = self.places
        with unguarded():  # once, because each of these loops runs over all parameters in each step
            for slot in places.slots:
                if slot.rows is None and (slot.was_read or slot.gradient.data_ptr() != slot.address):
                    slot.bring_into_buffer(self._round.given)
                gradient = slot.parameter.grad if slot.state in BEFORE_SUBMISSION else None
                if gradient is not None and gradient.requires_grad:
                    slot.parameter.grad = gradient.detach()  # from torch.func.grad, say: it is not differentiated any more
        self._round.complete()
        if self._round.given:
            self._round.given = {slot: given for slot, given in self._round.given.items() if is_held(given)}
        gradients = [slot.parameter.grad for slot in places.all]
        keeps = [gradient is not None for gradient in gradients]
        changed = self._changed(gradients)
        if any(changed):
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
        self._round.end(keeps, changed, own_changed, hyper_parameters)
        with unguarded():
            for slot, edit in zip(places.all, changed):
                if edit or slot.was_read:
                    slot.version = slot.gradient._version
        self._round.advance("commit")
        self._accumulated = False
        if places.use_order.is_open:
            places.use_order.end()
            unseen = places.use_order.unseen()
            if unseen is not None:
                self.reader_unseen = (
                    f"'{unseen}' is read by code that does not wait for its update (TorchScript or an extension, say)"
                )
        return keeps

    def _changed(self, gradients: Sequence[torch.Tensor | None]) -> list[bool]:
        """Whether each of ``gradients``, the ``.grad`` of all slots, was changed, by flag (see ``Slot.is_changed``). A gradient
        that was not read and whose object is the same needs no check."""
        return [
            (slot.was_read or gradient is not slot.gradient) and slot.is_changed()
            for slot, gradient in zip(self.places.all, gradients)
        ]

    def _adopt(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Make the update use ``gradient``, which the user has put into ``.grad`` since backward."""
        self._round.await_average(slot)
        slot.require_averageable(gradient)
        if slot.rows is not None:
            slot.gradient = gradient
            return
        slot.copy_in(gradient)

    def _fold(self) -> None:
        """End the round without an update: its averages stay in ``.grad``, except where the user has dropped them.

        It blocks, within backward too, until every rank has reached the end of its round. Everything is submitted before
        anything is awaited. If another rank ends the round by ``step()``, both ranks get the error. Raises TransportError if
        another rank called step().
        """
        self._round.complete()
        with unguarded():
            for slot in self.places.slots:
                if slot.rows is None and (slot.was_read or slot.gradient.data_ptr() != slot.address):
                    slot.bring_into_buffer(self._round.given)
        gradients = [slot.parameter.grad for slot in self.places.all]
        changed = self._changed(gradients)
        # A tensor that replaced an average which was never read is the start of a new sum, on this rank alone.
        keeps = [
            gradient is slot.gradient or (slot.was_read and gradient is not None)
            for slot, gradient in zip(self.places.all, gradients)
        ]
        self._round.end(keeps, changed)
        self._round.used()
        kept = self._round.kept(committed=False)
        for slot in self.places.slots:
            self._round.await_average(slot)
            if slot.state is GradientState.ZEROS and slot.parameter.grad is None and kept.share[slot.flag] > 0:
                slot.parameter.grad = slot.gradient  # else the gradient that this rank adds next would count less
        self._round.advance("fold")
        if self._says_accumulation and any(share > 0 for share in kept.share):
            self._says_accumulation = False
            log.info(
                "gradients accumulate over several backward passes, and each is averaged; all but the last within "
                "optimizer.no_sync() would save its traffic%s",
                _SAVES_REENTRANT if is_nested() else "",
            )

    # --- averages ---

    def wait(self, slot: Slot) -> None:
        """Wait until the average of ``slot`` is in ``slot.gradient``. Raises UnsupportedError if the gradient is read during
        backward, when its average cannot be complete, and ClosedError if the gradient is read in a forked process."""
        self._require_this_process()
        require_may_wait(f"the gradient of '{slot.name}'")
        if self._round.is_open:
            if current_task() != -1:
                if slot.state is GradientState.WAITING:
                    return  # still this rank's own sum: an autograd function of the user adds to it, say
                raise UnsupportedError(
                    f"the gradient of '{slot.name}' is read within backward: its average cannot be there yet. A hook that "
                    "edits or logs gradients: register it before the optimizer is wrapped, or read gradients after backward, "
                    "as a signal handler must. Compiled Autograd reads them so: go without it"
                )
            task, thread = self._running
            if task != -1 and thread != threading.get_ident():
                raise UnsupportedError(
                    f"the gradient of '{slot.name}' is read while backward runs in another thread: its average cannot be there "
                    "yet; read it after backward"
                )
            if slot.was_read:
                return  # its edits are done, too
            with self.barrier.waiting("gradients are read before step()"):
                self._round.complete()
                self._round.fill()
                self._round.await_arrival(slot)
                self.edits.apply([slot])
            slot.was_read = slot.await_gradient.is_there = True
            if slot.rows is not None or self._compiled_code_reads:
                release(slot.gradient)  # edits of it are not recorded
            return
        self._round.await_average(slot)

    @property
    def edits(self) -> Edits:
        return self._round.edits

    @property
    def measures(self) -> Measures:
        return self._round.measures

    def prepare_to_edit(self) -> bool:
        """Called before gradients are edited. Returns whether edits may be recorded: whether this is between backward and
        ``step()``."""
        if not self._round.is_open or self._session.is_forked or current_task() != -1 or self._compiled_code_reads:
            return False  # step() waits for all updates if there is compiled code
        task, thread = self._running
        if task != -1 and thread != threading.get_ident():
            return False
        self._round.complete()
        self._round.fill()  # all ranks edit the same gradients
        return True

    def _require_this_process(self) -> None:
        if self._session.is_forked:
            raise ClosedError("a forked process reads gradients whose averages are outstanding")

    def wait_to_update(self, slot: Slot) -> None:
        """Wait until the average of ``slot`` is in the flat buffer. Readers of the gradient still wait for the update. Raises
        CommschedError if the session failed or was closed."""
        self._round.await_arrival(slot)

    def wait_for_all(self) -> None:
        """Wait until every average is in its view, and the flags of ``step()`` have arrived."""
        for slot in self.places.slots:
            self._round.await_arrival(slot)
        self.edits.apply(self.places.slots)
        for slot in self.places.slots:
            self.wait(slot)
        self.places.flags.kept()

    def is_there(self, slot: Slot) -> bool:
        """Whether the average of ``slot`` has arrived. On a device it may still be on its way there."""
        return slot.proxies[0].is_open and slot.proxies[-1].is_open

    def those_there(self, slots: Iterable[Slot]) -> Iterator[Slot]:
        """Yield ``slots`` up to the first one for which :meth:`wait` or :meth:`kept_by_any_rank` would not return at once."""
        if self.places.flags.are_there() and self.edits.are_ready:
            for slot in slots:
                if not self.is_there(slot):
                    return
                if slot.rows is not None or self.places.device.arrived is not None:
                    self.wait_to_update(slot)
                yield slot

    def kept_by_any_rank(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the slots of ``slots`` for which any rank had a gradient when it called ``step()``. Raises as ``Round.kept``,
        where an update would make the ranks diverge."""
        kept = self._round.kept(committed=True)
        return [slot for slot in slots if kept.share[slot.flag] > 0]


def _finish_at_close(session: commsched.Session, finish: WeakMethod[Any]) -> Callable[[], None]:
    """Call ``finish`` when the session closes, if its object still exists. The returned function cancels that call, and may be
    called more than once."""

    def call() -> None:
        bound = finish()
        if bound is not None:
            bound()
        else:  # the object was collected after the session began to close
            end_abandoned(session)

    cancel = session.on_close(call)

    def forget() -> None:
        with suppress(ValueError):
            cancel()

    return forget
