"""Round: one exchange of all gradients, from the first gradient of a backward until all ranks have reported how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

import commsched

from ...core.errors import UnsupportedError
from .agreement import (
    BackwardShares,
    StepShares,
    require_added_alike,
    require_averaged_before_changed,
    require_changed_alike,
    require_equal_hyper_parameters,
    require_equal_values,
    require_same_end,
    require_unfrozen_alike,
)
from .compared import HyperParameters
from .edits import Edits
from .guard import guard, is_guarded, release, unguarded
from .layout import GradientLayout
from .no_gradient import NoGradients
from .norms import Measures
from .packs import Packs
from .samples import Samples
from .slot import BEFORE_SUBMISSION, CONTRIBUTED, GradientState, Slot
from .timing import profiled


class RoundState(Enum):
    """The state of a round on this rank; see :data:`ROUND_TRANSITIONS`."""

    IDLE = "idle"  # no round has begun yet, or the session was closed during the last one
    OPEN = "open"  # a round has begun, and backward may make further gradients
    SUBMITTED = "submitted"  # all gradients are submitted, and so are the first flags
    COMPLETE = "complete"  # and every parameter with a gradient on any rank has a place
    FILLED = "filled"  # and gradients were read, so every rank has the same set of gradients
    LEFT = "left"  # this rank has run out of batches within the round: the live ranks decide how it ends
    COMMITTED = "committed"  # the round has ended with step()
    FOLDED = "folded"  # the round has ended without step(): its averages are in .grad, and backward adds to them


#: All transitions between a round's states. Any other event is a bug of ours and raises KeyError.
ROUND_TRANSITIONS: dict[tuple[RoundState, str], RoundState] = {
    (RoundState.IDLE, "begin"): RoundState.OPEN,
    (RoundState.COMMITTED, "begin"): RoundState.OPEN,
    (RoundState.FOLDED, "begin"): RoundState.OPEN,
    (RoundState.OPEN, "submit"): RoundState.SUBMITTED,
    (RoundState.SUBMITTED, "complete"): RoundState.COMPLETE,
    (RoundState.COMPLETE, "fill"): RoundState.FILLED,
    (RoundState.COMPLETE, "commit"): RoundState.COMMITTED,
    (RoundState.FILLED, "commit"): RoundState.COMMITTED,
    (RoundState.COMPLETE, "fold"): RoundState.FOLDED,
    (RoundState.FILLED, "fold"): RoundState.FOLDED,
    (RoundState.SUBMITTED, "leave"): RoundState.LEFT,
    (RoundState.COMPLETE, "leave"): RoundState.LEFT,
    (RoundState.FILLED, "leave"): RoundState.LEFT,
    (RoundState.LEFT, "commit"): RoundState.COMMITTED,
    (RoundState.LEFT, "fold"): RoundState.FOLDED,
    (RoundState.LEFT, "close"): RoundState.IDLE,
    (RoundState.SUBMITTED, "close"): RoundState.IDLE,
    (RoundState.COMPLETE, "close"): RoundState.IDLE,
    (RoundState.FILLED, "close"): RoundState.IDLE,
}

_ENDED = (RoundState.IDLE, RoundState.COMMITTED, RoundState.FOLDED)


class Round:
    """The open round of one exchange, or its last round. One object serves all rounds; ``state`` is where it is.

    Two sets of flags travel beside the gradients, with entries for all parameters of the optimizer. The first set, when
    backward is over, says for which parameters this rank has a gradient. The second set, when the round ends, says whether
    this rank commits to the update, for which parameters it still has a gradient, and to what values it has changed the
    gradients that it has read.

    Parameters that require no gradient at first have no place in a buffer. They get a place, in a group of their own, in the
    first round in which any rank has a gradient for one. All ranks learn of that from the first flags. A rank that has an
    unfrozen parameter without a place therefore waits for the first flags, in ``step()`` at the latest.

    Args:
        ask_for_gradients: called when the ``.grad`` of a parameter noted by ``without`` is read. It has to call
            :meth:`complete` and :meth:`fill`.
        compared: keys of the hyper-parameters that must be the same on all ranks. The set may grow.
    """

    def __init__(
        self, session: commsched.Session, places: GradientLayout, ask_for_gradients: Callable[[], None], compared: Set[str]
    ) -> None:
        self.state = RoundState.IDLE
        # Held while the rest of the gradients is submitted, completed or filled in. Threads may read gradients at once: one of
        # them does the work, and the others, and the training thread, go on when it is done.
        self._lock = threading.RLock()
        self._session = session
        self._places = places
        self._packs = Packs()
        self._missing = 0  # number of parameters with a place that backward has not reached
        self._has_ended = False  # the second flags are submitted
        self._unfrozen = False  # a slot without a place has a gradient or requires one
        #: Called before parameters get a place in the round, if ranks may have run out of batches: those must take part.
        self.announce_late: Callable[[], None] | None = None
        #: Called before a wait for gradients or flags of other ranks, if ranks may run out of batches.
        self.before_wait: Callable[[], object] | None = None
        self.factor = 1.0  # every gradient of this rank is multiplied by it, for another divisor than the number of ranks
        self.given: dict[Slot, torch.UntypedStorage] = {}  # the memory that the user gave to gradients through .data
        self.edits = Edits()
        self.measures = Measures(session, places.device.name == "cpu")
        self.without = NoGradients(ask_for_gradients)
        self._own_changed: str | None = None  # the name of a parameter whose gradient was changed before it was averaged
        self._turn = 0  # rounds so far
        self._samples = Samples(())
        self._compared = compared
        self._digests = HyperParameters(compared)
        self._hyper_parameters: Sequence[Mapping[str, Any]] = ()  # by group, from the step() that ended the round
        self._agreed: StepShares | None = None  # all ranks' flags at the end of the round, once checked

    @property
    def is_open(self) -> bool:
        """Whether the round has begun and not ended."""
        return self.state not in _ENDED

    def advance(self, event: str) -> None:
        """Change the state by ``event``, one of the events in :data:`ROUND_TRANSITIONS`."""
        self.state = ROUND_TRANSITIONS[self.state, event]

    def begin(self) -> None:
        self.without.forget()
        self.without.dropped.clear()
        self.edits.begin_round()
        flags = self._places.flags  # the first time, this makes the groups
        if self.state is RoundState.IDLE:
            self.measures.begin(self._places.groups)
        else:
            self._decide_norms(flags.kept())
            self.measures.begin_round(self._places.groups)
        for group in self._places.groups:
            group.begin_step()
        flags.begin_step()
        self._packs.begin(self._places.groups, self._places.slots, self._may_pack())
        self.advance("begin")
        self._turn += 1
        self._has_ended = False
        self._unfrozen = False
        self._missing = sum(slot.parameter.requires_grad for slot in self._places.slots)
        for slot in self._places.all:
            slot.begin_round()

    def _decide_norms(self, ended: StepShares) -> None:
        self.measures.decide(ended.asked, ended.committed > 0)

    def drop(self) -> None:
        """There are no more rounds. Another session may go on from what this one knows. Never waits."""
        if self.state in (RoundState.COMMITTED, RoundState.FOLDED) and self._places.flags.are_kept:
            self._decide_norms(self._places.flags.kept())
        self.without.forget()

    def _may_pack(self) -> bool:
        """Whether there may be packs. A device says itself when each gradient is there, and an observer notes the time of
        each."""
        is_host = self._session.device == "cpu" and self._places.device.layer is None
        return is_host and not self._session.is_observed and self.factor == 1.0

    # --- gradients into the buffers ---

    def hold(self, slot: Slot) -> None:
        """Let the ``.grad`` of ``slot`` wait until backward is over, and submit it then. The current backward did not make it:
        it comes from an earlier pass or one within ``no_sync()``, or was set by hand."""
        gradient = slot.parameter.grad
        if gradient is not None and gradient is not slot.waiting:
            slot.hold(slot.own_gradient(gradient) if is_guarded(gradient) else gradient)

    def is_dropped(self) -> bool:
        """Whether the user has dropped all gradients that this rank has in the round, after a skipped step, say."""
        for slot in self._places.all:
            gradient = slot.gradient if slot.state in CONTRIBUTED else slot.waiting
            if gradient is not None and slot.parameter.grad is gradient:
                return False
        return True

    def take(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Submit ``gradient``, the ``.grad`` of ``slot`` that backward has just made."""
        if slot.pack is None or not slot.pack.take(slot, gradient):
            self._submit(slot, gradient)
        if slot.proxies:
            self._missing -= 1
        if self._missing == 0 and not any(
            late.state in BEFORE_SUBMISSION and late.parameter.requires_grad for late in self._places.late
        ):
            # Another rank may read averages while this one waits elsewhere before step(), so they are submitted now.
            self.submit_rest(in_backward=True)

    def _submit(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Put ``gradient`` (None: zeros) into the buffer and notify the core. From here on the average is outstanding."""
        if slot.proxies:
            slot.bring_into_buffer(self.given)
        known = slot.waiting
        if gradient is not None and gradient is not slot.gradient:
            with unguarded():  # else each attribute of a gradient that has waited would call its guard
                slot.require_averageable(gradient)
        slot.release_waiting()
        if not slot.proxies:
            assert gradient is not None
            self._keep_late(slot, gradient if gradient is known else slot.own_gradient(gradient))
            return
        slot.advance("submit" if gradient is not None else "submit zeros")
        if slot.rows is not None:
            slot.rows.write(gradient, slot.view)
            slot.gradient = gradient if gradient is not None else torch.zeros_like(slot.view, layout=torch.sparse_coo)
            slot.filled = False
        elif gradient is None:
            slot.put_zeros()
        elif gradient is not slot.gradient and (gradient is known or (gradient is slot.users and not is_guarded(gradient))):
            slot.move_in(gradient)
        elif gradient is not slot.gradient:
            slot.copy_in(gradient)
        if self.factor != 1.0 and gradient is not None:
            with torch.no_grad(), unguarded():
                slot.view.mul_(self.factor)
        slot.users = slot.made = None
        slot.version = slot.gradient._version
        if gradient is not None:
            guard(slot.gradient, slot.await_gradient)
        if slot.pack is not None:
            slot.pack.note(slot)
        else:
            self._places.device.when_written(slot.notify_ready)

    def submit_rest(self, live: bool = True, in_backward: bool = False) -> None:
        """Submit the gradients that backward did not produce (zeros, unless one was accumulated before), and the first flags.
        Waits for no other rank. ``live`` is False if this rank has run out of batches before the round."""
        is_late = False
        self.without.forget()
        with self._lock:
            if self.state is not RoundState.OPEN:
                return
            self.advance("submit")
            places = self._places
            for slot in [*places.slots, *places.late]:
                if slot.state in BEFORE_SUBMISSION:
                    gradient = slot.parameter.grad
                    if slot.proxies or gradient is not None:
                        is_late = is_late or bool(slot.proxies)
                        self._submit(slot, gradient)
            if is_late and live and not in_backward:
                # Since backward was over, this rank may have waited for another one that reads averages. Those must not wait
                # for the gradients that came only now, as in a static order.
                for group in places.groups:
                    group.keep_agreed()
            for slot in places.late if live else ():
                self._unfrozen = self._unfrozen or slot.state in CONTRIBUTED or slot.parameter.requires_grad
            places.flags.offer_used(live, self._unfrozen, False, [slot.state in CONTRIBUTED for slot in places.all])

    def complete(self) -> None:
        """Submit all gradients after backward. It waits for the other ranks' backward only while there are unfrozen
        parameters without a place."""
        with self._lock:
            self.submit_rest()
            if self.state is RoundState.SUBMITTED:
                self.advance("complete")
                if self._unfrozen:
                    if self.announce_late is not None:
                        self.announce_late()
                    self._exchange_late()

    def _keep_late(self, slot: Slot, gradient: torch.Tensor) -> None:
        slot.specs()  # raises if its type cannot be averaged, before other ranks wait for it
        if str(gradient.device) != (device := self._places.device.name):
            raise UnsupportedError(f"the gradient of '{slot.name}' is on {gradient.device}, but the others are on {device}")
        slot.advance("need place")
        slot.gradient = gradient
        guard(gradient, slot.await_gradient)

    def _exchange_late(self) -> None:
        """Give a place, still in this round, to each parameter without one for which any rank has a gradient."""
        used = self.used()
        late = [slot for slot in self._places.late if used.share[slot.flag] > 0]
        if not late:
            return
        gradients = {slot.flag: slot.gradient for slot in late if slot.state is GradientState.NO_PLACE}
        self._places.give(late).begin_step()
        for slot in late:
            gradient = gradients.get(slot.flag)
            if gradient is not None:
                release(gradient)
                if slot.rows is None:
                    slot.move_in(gradient)
            self._submit(slot, gradient)

    def end(
        self,
        keeps: list[bool],
        changed: list[bool],
        own_changed: str | None = None,
        hyper_parameters: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Submit the second flags: how the round ends on this rank. Never waits. Does nothing if they were submitted: ranks
        have then refused this end of the round, and whoever asks again, or closes the session, finds the same.

        ``keeps`` and ``changed`` say, by flag, whether this rank still has a gradient, and has changed it. ``own_changed``
        names a parameter whose gradient was changed before it was averaged, if there is one. ``hyper_parameters`` are those of
        the ``step()`` that ends the round, by group; ``None`` means that it ends without ``step()``.
        """
        if self._has_ended:
            return
        self._has_ended = True
        committed = hyper_parameters is not None
        digest = self._digests.digest(hyper_parameters) if hyper_parameters is not None else 0.0
        self._hyper_parameters = hyper_parameters or ()
        slots = self._places.all
        read = [kept and (slot.was_read or edit) for slot, kept, edit in zip(slots, keeps, changed)]
        for flag in self.edits.flags:
            changed[flag] = changed[flag] or keeps[flag]
        if len(self._samples) != len(slots):
            self._samples = Samples(tuple(slots))
        self._own_changed, self._agreed = own_changed, None
        self._places.flags.offer_kept(
            True,
            own_changed is not None,
            committed,
            self._unfrozen,
            keeps,
            changed,
            self._samples.of(read, self._turn, adopted=committed),
            (digest, self.edits.are_compared, self.edits.digest(), self.edits.sizes),
            self.measures.asks,
        )

    def leave(self, changed: list[bool], own_changed: str | None = None) -> None:
        """Submit the second flags of a rank that has run out of batches: the live ranks decide how the round ends. Call it
        after :meth:`submit_rest`. Never waits. ``changed`` and ``own_changed`` are those of :meth:`end`."""
        if self._unfrozen:
            late = next(slot.name for slot in self._places.late if slot.state in CONTRIBUTED or slot.parameter.requires_grad)
            raise UnsupportedError(
                f"this rank has run out of batches between backward and step(), in the first round of '{late}', which was "
                "frozen before: call step() in the round in which parameters are unfrozen"
            )
        self.advance("leave")
        if self._has_ended:
            return
        self._has_ended, self._own_changed, self._agreed = True, own_changed, None
        nothing = [False] * len(changed)
        samples = torch.zeros(2, len(changed), dtype=torch.float64, device=self._places.device.name)
        self._places.flags.offer_kept(
            False, own_changed is not None, False, False, nothing, changed, samples, (0.0, False, 0.0, 0.0), Measures.NOTHING
        )

    def exchange_late(self) -> None:
        """Take part when the live ranks of a round that this rank has left give places to parameters."""
        with self._lock:
            self._exchange_late()

    def left(self) -> StepShares:
        """Wait until the round that this rank has left is over on all ranks, and return their second flags."""
        return self._with_gradients_left(self._places.flags.kept())

    def _with_gradients_left(self, kept: StepShares) -> StepShares:
        """Count a gradient that only ranks without batches have contributed as kept, unless a rank has dropped it."""
        if kept.live == 1.0:
            return kept
        flags = zip(kept.share, kept.changed, self._places.flags.used().share)
        share = [1.0 if mine == 0.0 and used > 0.0 and not changed else mine for mine, changed, used in flags]
        return replace(kept, share=share)

    # --- averages out of the buffers ---

    def await_average(self, slot: Slot) -> None:
        self.await_arrival(slot)
        self.edits.apply([slot])
        release(slot.gradient)

    def await_arrival(self, slot: Slot) -> None:
        for proxy in slot.proxies:
            if not proxy.is_open:
                if self.before_wait is not None:
                    self.before_wait()
                with profiled("wait", slot.name):
                    proxy.wait()
        if self._places.device.arrived is not None:
            self._places.device.arrived(slot.proxies)
        if slot.rows is not None and not slot.filled:
            slot.filled = True
            with torch.no_grad(), unguarded():
                slot.gradient.copy_(slot.rows.read(slot.view))
                slot.version = slot.gradient._version

    def used(self) -> BackwardShares:
        """Wait until backward is over on all ranks, and return their first flags. Raises UnsupportedError if some ranks add
        parameters instead, or have unfrozen parameters that others have not."""
        if self.before_wait is not None:
            self.before_wait()
        used = self._places.flags.used()
        require_added_alike(used.adding, self._session.rank)
        require_unfrozen_alike(used.unfrozen, self._places.late, self._session.rank)
        return used

    def backward_ended(self) -> None:
        """Note the parameters that the ended backward has left without a gradient."""
        if self.state is RoundState.OPEN:
            unmade = [slot for slot in self._places.all if slot.state in BEFORE_SUBMISSION and slot.parameter.requires_grad]
            if self._places.use_order.is_open:
                for slot in unmade:
                    self._places.use_order.leave_out(slot)
            self.without.note(slot.parameter for slot in unmade)

    def fill(self) -> None:
        """Put averages into ``.grad`` where other ranks have gradients and this rank has none nor has dropped it. Call it after
        :meth:`complete`. If this rank has no gradient somewhere, it waits until backward is over on all ranks, but never for
        averages."""
        with self._lock:
            if self.state is not RoundState.COMPLETE:
                return
            self.advance("fill")
            lacking = [slot for slot in self._places.slots if slot.state is GradientState.ZEROS and slot.parameter.grad is None]
            used = self.used() if lacking else None
            for slot in lacking:
                if used is not None and used.share[slot.flag] > 0 and id(slot.parameter) not in self.without.dropped:
                    slot.parameter.grad = slot.gradient
                    guard(slot.gradient, slot.await_gradient)

    def kept(self, committed: bool) -> StepShares:
        """Wait until the round is over on all ranks, and return their second flags, which agree.

        Args:
            committed: whether the round has ended with ``step()`` on this rank.

        Raises:
            TransportError: the round has ended differently on another rank.
            RanksDiverged: the ranks' hyper-parameters differ.
            UnsupportedError: the ranks have changed their gradients, or unfrozen parameters, differently.
        """
        if self._agreed is not None:
            return self._agreed
        kept = self._with_gradients_left(self._places.flags.kept())
        rank, slots, groups = self._session.rank, self._places.all, self._places.groups
        step = groups[0].step if groups else 0
        require_same_end(kept, committed, rank, step)
        require_equal_hyper_parameters(kept, self._session, self._places.label, step, self._hyper_parameters, self._compared)
        require_unfrozen_alike(kept.unfrozen, self._places.late, rank)
        require_averaged_before_changed(kept.own_changed, self._own_changed, rank)
        require_changed_alike(kept, slots)
        require_equal_values(kept, slots, self._samples, self.edits, self._places.unaveraged)
        self._agreed = kept
        return kept

    def await_all_ranks(self) -> None:
        """Wait for all ranks before parameters are added, by a round without gradients. A rank that continues training instead
        gets an error, too. Raises UnsupportedError if other ranks do not add parameters."""
        flags = self._places.flags
        nothing = [False] * len(self._places.all)
        flags.begin_step()
        flags.offer_used(True, False, True, nothing)
        flags.offer_kept(True, False, False, False, nothing, nothing, None, (0.0, False, 0.0, 0.0), Measures.NOTHING)
        self.used()
