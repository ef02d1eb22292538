"""Round: one exchange of all gradients, from the first of a backward until all ranks have said how it ends."""

from __future__ import annotations

import math

import torch

import commsched

from ...core.errors import UnsupportedError
from .agreement import (
    norms,
    projections,
    require_added_alike,
    require_averaged_before_changed,
    require_changed_alike,
    require_equal_norms,
    require_gradients,
    require_same_end,
    require_unfrozen_alike,
)
from .flags import Kept, Used
from .guard import guard, is_guarded, release, unguarded
from .places import Places
from .slot import Slot


class Round:
    """Of the rounds of one exchange, the one that is open, or the last.

    Beside the gradients go two sets of flags for all parameters of the optimizer: which of them this rank has a gradient of
    when backward is over; and, when the round ends, whether this rank commits to the update, of which it has one still, and
    what it has made of those that it has read.

    Parameters that require no gradient at first have no place in a buffer. In the round in which any rank has a gradient of
    one, they get theirs, in a group of their own: all ranks learn of it from the first flags, which ranks that have a
    parameter unfrozen but without a place therefore await in ``step()`` at the latest.
    """

    def __init__(self, session: commsched.Session, places: Places) -> None:
        self.is_open = False  # between the first gradient and the end
        self.all_handed_over = False  # and the ranks were told what this one has
        self._session = session
        self._places = places
        self._complete = False  # all is handed over, and what other ranks have gradients of has a place
        self._missing = 0  # parameters with a place that backward has not come to
        self._unfrozen = False  # a slot without a place has a gradient or requires one
        self._checked = False  # gradients are read, and all ranks have them
        self._own_changed: str | None = None  # the name of a parameter whose gradient was changed before it was averaged
        self._agreed: Kept | None = None  # once it has ended here, how it did on all ranks, which parts none

    def begin(self) -> None:
        flags = self._places.flags
        for group in self._places.groups:
            group.begin_step()
        flags.begin_step()
        self.is_open = True
        self.all_handed_over = self._complete = self._checked = self._unfrozen = False
        self._missing = sum(slot.parameter.requires_grad for slot in self._places.slots)
        for slot in self._places.all:
            slot.ready = slot.has_gradient = slot.was_read = False
            slot.release_left()

    # --- gradients into the buffers ---

    def guard_left(self, slot: Slot) -> None:
        """The gradient of a pass before, of one within ``no_sync()``, or set by hand, travels too, once backward is over: who
        reads it then waits for its average."""
        gradient = slot.parameter.grad
        if gradient is slot.left:
            return
        slot.release_left()
        if gradient is None:
            return
        slot.left = slot.own_gradient(gradient) if is_guarded(gradient) else gradient
        guard(slot.left, slot.await_average)

    def is_dropped(self) -> bool:
        """Whether none of the gradients that this rank has in it is there any more, after a step that is skipped, say."""
        held = ((slot, slot.left if slot.left is not None else slot.gradient) for slot in self._places.all)
        return not any(slot.parameter.grad is gradient for slot, gradient in held if slot.has_gradient or slot.left is not None)

    def take(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Backward has made ``gradient``, the ``.grad`` of ``slot``."""
        self._hand_over(slot, gradient)
        if slot.proxies:
            self._missing -= 1
        if self._missing == 0 and all(late.ready or not late.parameter.requires_grad for late in self._places.late):
            self.hand_over_rest()  # now: this rank may wait elsewhere before step(), and another for it, to read gradients

    def _hand_over(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Put ``gradient`` (None: zeros) into the buffer and tell the core. From here the average is on its way."""
        slot.ready = True
        slot.has_gradient = gradient is not None
        known = slot.release_left()
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
        elif gradient is not slot.gradient and (gradient is known or (gradient is slot.users and not is_guarded(gradient))):
            slot.move_in(gradient)
        elif gradient is not slot.gradient:
            slot.copy_in(gradient)
        slot.users = slot.made = None
        slot.version = slot.gradient._version
        if gradient is not None:
            guard(slot.gradient, slot.await_average)
        self._places.device.when_written(slot.notify_ready)

    def hand_over_rest(self) -> None:
        """What backward did not produce (zeros, unless it was accumulated before), and say what it was. Never waits."""
        if self.all_handed_over:
            return
        self.all_handed_over = True
        places = self._places
        for slot in [*places.slots, *places.late]:
            gradient = slot.parameter.grad
            if not slot.ready and (slot.proxies or gradient is not None):
                self._hand_over(slot, gradient)
        for slot in places.late:
            self._unfrozen = self._unfrozen or slot.has_gradient or slot.parameter.requires_grad
        places.flags.offer_used(self._unfrozen, False, [slot.has_gradient for slot in places.all])

    def complete(self) -> None:
        """Backward is over. Waits for the other ranks' only while there are unfrozen parameters without a place."""
        self.hand_over_rest()
        if not self._complete:
            self._complete = True
            if self._unfrozen:
                self._exchange_late()

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
        used = self.used()
        late = [slot for slot in self._places.late if used.share[slot.flag] > 0]
        if not late:
            return
        gradients = {slot.flag: slot.gradient for slot in late if slot.has_gradient}
        self._places.give(late).begin_step()
        for slot in late:
            gradient = gradients.get(slot.flag)
            if gradient is not None:
                release(gradient)
                if slot.rows is None:
                    slot.move_in(gradient)
            self._hand_over(slot, gradient)

    def end(self, committed: bool, keeps: list[bool], changed: list[bool], own_changed: str | None = None) -> None:
        """Say how it ends here. ``keeps`` and ``changed`` are by flag. Never waits."""
        slots = self._places.all
        edited = [slot if kept and (slot.was_read or edit) else None for slot, kept, edit in zip(slots, keeps, changed)]
        self._own_changed, self._agreed = own_changed, None
        self._places.flags.offer_kept(
            committed, self._unfrozen, own_changed is not None, keeps, changed, norms(edited), projections(edited)
        )

    # --- averages out of the buffers ---

    def await_average(self, slot: Slot) -> None:
        for proxy in slot.proxies:
            proxy.wait()
        if slot.rows is not None and not slot.filled:
            slot.filled = True
            with torch.no_grad(), unguarded():
                slot.gradient.copy_(slot.rows.read(slot.view))
                slot.version = slot.gradient._version
        release(slot.gradient)

    def used(self) -> Used:
        """Waits until backward is over on all ranks.

        Raises:
            UnsupportedError: some ranks do something else, or have unfrozen what others have not.
        """
        used = self._places.flags.used()
        require_added_alike(used.adding, self._session.rank)
        require_unfrozen_alike(used.unfrozen, self._places.late, self._session.rank)
        return used

    def require_gradients(self) -> None:
        """Waits until backward is over on all ranks.

        Raises:
            UnsupportedError: others have gradients that this one has not.
        """
        if not self._checked:
            self._checked = True
            require_gradients(self.used(), self._places.all, self._session.rank)

    def kept(self, committed: bool) -> Kept:
        """Waits until the round is over on all ranks. ``committed``: whether it has ended with ``step()`` here.

        Raises:
            TransportError: it has ended otherwise elsewhere.
            UnsupportedError: the ranks have made something else of their gradients.
        """
        if self._agreed is not None:
            return self._agreed
        kept = self._places.flags.kept()
        rank, slots, groups = self._session.rank, self._places.all, self._places.groups
        require_same_end(kept, committed, rank, groups[0].step if groups else 0)
        require_unfrozen_alike(kept.unfrozen, self._places.late, rank)
        require_averaged_before_changed(kept.own_changed, self._own_changed, rank)
        require_changed_alike(kept, slots)
        require_equal_norms(kept, slots, self._places.unaveraged)
        self._agreed = kept
        return kept

    def meet(self) -> None:
        """A round without gradients, before parameters are added, where ranks are to wait for each other: those that train on
        instead are told.

        Raises:
            UnsupportedError: other ranks add none.
        """
        flags = self._places.flags
        nothing, nobody = [False] * len(self._places.all), [math.nan] * len(self._places.all)
        flags.begin_step()
        flags.offer_used(False, True, nothing)
        flags.offer_kept(False, False, False, nothing, nothing, nobody, nobody)
        self.used()
