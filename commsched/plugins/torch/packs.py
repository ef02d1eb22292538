"""Packs: the shortest way from ``.grad`` to the core, for gradients that backward has made as usual. Small ones that share a
partition are copied and submitted together.

A call of torch and a call of the core for each small gradient would take longer than to copy it. Nothing is sent later than
without packs, because a partition is sent when all its gradients are there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from ...core.group import TensorGroup
from ...core.plan import Plan
from .slot import GRADIENT_TRANSITIONS, GradientState, Slot

#: The size up to which a gradient waits for others. A larger one should be copied early: its copy takes longer than the calls.
_MAX_BYTES = 1 << 16

_STRIDED = torch.strided
_EXPECTED = GradientState.EXPECTED
_SUBMITTED = GRADIENT_TRANSITIONS[_EXPECTED, "submit"]


class Pack:
    """The small gradients of one partition, or one gradient. The last of them copies them all into the flat buffer and notifies
    the core."""

    __slots__ = ("_gradients", "_group", "_tensors", "_views", "slots")

    def __init__(self, group: TensorGroup, slots: list[Slot]) -> None:
        self._group = group
        self.slots = slots
        self.begin()

    def begin(self) -> None:
        """Begin a round."""
        self._tensors: list[int] = []  # that have come in this round
        self._views: list[torch.Tensor] = []  # places to copy to
        self._gradients: list[torch.Tensor] = []  # what to copy there

    def take(self, slot: Slot, gradient: torch.Tensor) -> bool:
        """Take ``gradient``, which backward has put into the ``.grad`` of ``slot``, and put the slot's own gradient there. Its
        readers wait from now on.

        Return whether that was possible. It is not if ``gradient`` is other than registered, or if somebody holds the slot's
        own gradient or has moved it; then nothing was done.
        """
        if sys.getrefcount(slot.gradient) > slot.references:  # counted as in ``slot.py``: Python versions count differently
            return False
        held = slot.gradient
        if (
            slot.users is not None
            or slot.state is not _EXPECTED
            or gradient is held
            or type(gradient) is not torch.Tensor
            or gradient.dtype is not slot.dtype
            or gradient.layout is not _STRIDED
            or gradient.requires_grad
            or not gradient.is_cpu
            or gradient.shape != slot.shape
            or type(held) is not torch.Tensor
            or held.data_ptr() != slot.address
        ):
            return False
        slot.parameter.grad = held
        slot.state = _SUBMITTED
        slot.made, slot.version = None, held._version
        slot.record_of_gradient(held).guard(held, slot.await_gradient)
        self._views.append(slot.view)
        self._gradients.append(gradient)
        self.note(slot)
        return True

    def note(self, slot: Slot) -> None:
        """Note that the gradient of ``slot`` was taken, or is in its place."""
        self._tensors.append(slot.tensor)
        self._group.on_hand.add(slot.tensor)
        if len(self._tensors) == len(self.slots):
            self._submit()

    def _submit(self) -> None:
        try:
            if self._gradients:
                torch._foreach_copy_(self._views, self._gradients)
                self._views, self._gradients = [], []
        except BaseException:
            self._group.on_hand.difference_update(self._tensors)  # this rank is late with them
            raise
        self._group.notify_all_ready(self._tensors)


class Packs:
    """The packs of all groups of one exchange."""

    def __init__(self) -> None:
        self._plans: list[Plan] = []  # of the groups, when the packs were made
        self._packs: list[Pack] = []

    def begin(self, groups: list[TensorGroup], slots: Iterable[Slot], allowed: bool) -> None:
        """Begin a round of all ``groups``, which hold the gradients of ``slots``.

        Args:
            allowed: whether there may be packs. Otherwise each gradient is submitted by the long way.
        """
        plans = [group.plan for group in groups] if allowed else []
        if len(plans) != len(self._plans) or any(plan is not known for plan, known in zip(plans, self._plans)):
            self._plans = plans
            self._pack(groups, slots, allowed)
        else:
            for pack in self._packs:
                pack.begin()

    def _pack(self, groups: list[TensorGroup], slots: Iterable[Slot], allowed: bool) -> None:
        together: dict[tuple[int, int], list[Slot]] = {}  # by group and partition
        alone: list[list[Slot]] = []
        for slot in slots:
            slot.pack = None
            if allowed and slot.tensor >= 0:
                at = slot.group.plan.by_tensor[slot.tensor]
                if len(at) == 1 and slot.view.nbytes <= _MAX_BYTES:
                    together.setdefault((slot.group.index, at[0]), []).append(slot)
                else:
                    alone.append([slot])
        self._packs = []
        for members in [*together.values(), *alone]:
            pack = Pack(members[0].group, members)
            self._packs.append(pack)
            for slot in members:
                slot.pack = pack
