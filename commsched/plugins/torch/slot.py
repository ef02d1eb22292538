"""Slot: one parameter of the optimizer, and where its gradient travels."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

import commsched

from ...core.errors import UnsupportedError
from ...core.group import TensorGroup
from ...core.manifest import TensorSpec
from ...core.proxy import DependencyProxy
from .device import Device
from .flat import register_flat, spec_of
from .guard import address, release, unguarded
from .sparse import Rows

log = logging.getLogger("commsched")


class Slot:
    """One parameter: its gradient's place in a flat buffer and what is outstanding for it.

    ``view`` is the place; only we have this object. ``gradient`` is what ``.grad`` is, or is to be: of a dense parameter an
    object that the user may know, in the view's memory.

    A parameter that was frozen so far, or is new, has no place yet: then ``proxies`` is empty.
    """

    __slots__ = (
        "address",
        "await_average",
        "filled",
        "flag",
        "gradient",
        "has_gradient",
        "is_sparse",
        "left",
        "made",
        "name",
        "notify_ready",
        "param_group",
        "parameter",
        "pending",
        "proxies",
        "ready",
        "references",
        "rows",
        "users",
        "version",
        "view",
        "was_read",
    )

    def __init__(self, name: str, parameter: torch.nn.Parameter, param_group: int, is_sparse: bool) -> None:
        self.name = name
        self.parameter = parameter
        self.param_group = param_group  # the index of its group in the optimizer
        self.is_sparse = is_sparse  # its module makes sparse gradients
        self.flag = -1  # its place in the flags
        self.proxies: tuple[DependencyProxy, ...] = ()
        self.notify_ready: Callable[[], None]  # with the proxies: tells the core that the gradient is in its place
        self.view: torch.Tensor = parameter  # until the buffers are there
        self.address = 0  # of the view
        self.gradient: torch.Tensor = parameter  # until there is one
        self.references = 0  # to ``gradient``, if this object is the only one that has it
        self.left: torch.Tensor | None = None  # guarded: takes part in the open round, and is not handed over yet
        self.made: torch.Tensor | None = None  # by backward, within no_sync()
        self.users: torch.Tensor | None = None  # what was in ``.grad`` when backward came to add to it
        self.rows: Rows | None = None  # beside the view of a sparse gradient
        self.filled = True  # a sparse ``gradient`` holds the average
        self.version = 0  # of ``gradient`` when it was handed over: in-place operations of the user count on
        self.ready = False  # handed over in this round
        self.has_gradient = False  # this rank contributed more than zeros
        self.was_read = False  # in this round, before step()
        self.await_average: Callable[[], None]  # what a reader of the gradient does first
        self.pending = False  # step() was called and the update is not yet in place

    def specs(self) -> list[TensorSpec]:
        """What travels for it.

        Raises:
            UnsupportedError: its type cannot be averaged.
        """
        spec = spec_of(self.name, self.parameter)
        return [spec, TensorSpec(f"{self.name}.rows", spec.shape[:1], "float32")] if self.is_sparse else [spec]

    def require_averageable(self, gradient: torch.Tensor) -> None:
        """
        Raises:
            UnsupportedError: ``gradient`` is not of the kind that was announced for this parameter.
        """
        if gradient.requires_grad:
            raise UnsupportedError(f"the gradient of '{self.name}' has a graph (create_graph=True): it cannot be averaged")
        expected = torch.sparse_coo if self.is_sparse else torch.strided
        if gradient.layout != expected and gradient.layout == torch.sparse_coo:
            raise UnsupportedError(
                f"the gradient of '{self.name}' is sparse, but when it was wrapped no Embedding or EmbeddingBag with "
                "sparse=True had this weight: use dense gradients"
            )
        if gradient.layout != expected and self.is_sparse:
            raise UnsupportedError(
                f"the gradient of '{self.name}' is dense, but its module says sparse=True; something else uses the weight "
                "too: set sparse=False"
            )
        if gradient.layout != expected or gradient.dtype != self.view.dtype or gradient.device != self.view.device:
            raise UnsupportedError(
                f"the gradient of '{self.name}' is {gradient.dtype}, {gradient.layout} on {gradient.device}; when it was "
                f"wrapped, the parameter was dense {self.view.dtype} on {self.view.device}"
            )

    def require_in_buffer(self) -> None:
        """
        Raises:
            UnsupportedError: the user has given the gradient other memory, or moved that of all.
        """
        if self.rows is not None or address(self.gradient) == self.address:
            return
        if self.parameter.grad is self.gradient or self.view.data_ptr() != self.address:
            raise UnsupportedError(
                f"the memory of '{self.name}'.grad was replaced through .data: assign to .grad instead; if it was model.to(), "
                "float(), share_memory() or the like, call zero_grad() before that"
            )
        self.gradient = self.view.detach()  # what was replaced is not used any more

    def require_own_memory(self, gradient: torch.Tensor) -> None:
        """
        Raises:
            UnsupportedError: ``gradient``, which the user has put into ``.grad``, is a part of a larger tensor.
        """
        if gradient.layout == torch.strided and gradient.untyped_storage().nbytes() > gradient.nbytes:
            raise UnsupportedError(
                f"'{self.name}'.grad is a view of a larger tensor, a flat buffer of gradients, say: it is averaged elsewhere, "
                "so what is done to that tensor would not reach it; give each parameter a gradient of its own, or zero_grad()"
            )

    def is_changed(self) -> bool:
        """Whether the user has changed, replaced or dropped ``.grad`` since it was handed over."""
        gradient = self.parameter.grad
        if gradient is not self.gradient:
            return self.has_gradient or gradient is not None
        if not self.was_read:
            return False
        with unguarded():
            return gradient._version != self.version

    @torch.no_grad()
    def move_in(self, gradient: torch.Tensor) -> None:
        """Give ``gradient`` the view's memory, with its values: it is an object that the user may know and be about to read.
        Not for sparse ones."""
        self._keep_what_is_held()
        self.view.copy_(gradient)
        gradient.data = self.view
        self.gradient = gradient

    @torch.no_grad()
    def copy_in(self, gradient: torch.Tensor) -> None:
        """Put the values of ``gradient`` into the view, and the object that has it into ``.grad``. Not for sparse ones."""
        self._keep_what_is_held()
        self.view.copy_(gradient)
        self.parameter.grad = self.gradient

    @torch.no_grad()
    def zero(self) -> None:
        """Zeros in ``.grad``, in the object that the user knows; what is outstanding keeps its values in another."""
        gradient = self.parameter.grad
        if gradient is None:
            return
        with unguarded():
            if self.rows is not None:
                self.parameter.grad = torch.zeros_like(gradient)
            elif self.proxies and gradient is self.gradient:
                release(gradient)
                gradient.data = torch.zeros_like(self.view)
                self.gradient = self.view.detach()
            else:
                gradient.detach_().zero_()

    @torch.no_grad()
    def put_zeros(self) -> None:
        """This rank has no gradient. Not for sparse ones."""
        self._keep_what_is_held()
        self.view.zero_()

    def release_left(self) -> torch.Tensor | None:
        """Nobody waits any more who reads the gradient that was to be handed over later; which that was."""
        left, self.left = self.left, None
        if left is not None:
            release(left)
        return left

    def own_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Put a copy of ``gradient`` into ``.grad``: it was set by hand, so other parameters may have the same object."""
        with unguarded():
            self.parameter.grad = gradient.clone()
        return self.parameter.grad

    def _keep_what_is_held(self) -> None:
        """The memory is about to be written; whoever else holds the last gradient still finds there what it was."""
        if sys.getrefcount(self.gradient) > self.references:
            self.gradient.data = self.view.clone()
            self.gradient = self.view.detach()


def give_places(session: commsched.Session, device: Device, slots: Sequence[Slot]) -> TensorGroup:
    """Register the gradients of ``slots``, in forward order. Collective.

    Raises:
        ManifestMismatch: the ranks' parameters differ.
        UnsupportedError: the type of a parameter cannot be averaged.
    """
    specs = [slot.specs() for slot in slots]
    views, group = register_flat(session, device, [spec for each in specs for spec in each])
    first = 0
    for slot, (spec, *beside) in zip(slots, specs):
        last = first + len(beside)
        slot.view, slot.gradient = views[first], views[first].data  # of its own version counter
        slot.references = sys.getrefcount(slot.gradient)
        slot.address = slot.view.data_ptr()
        slot.proxies = group.proxies[first : last + 1]
        slot.notify_ready = _make_notify(group, first, last)
        if beside:
            slot.rows = Rows(views[last])
            if session.rank == 0:
                log.info("the gradient of '%s' is sparse; it travels densely: %d bytes per step", slot.name, spec.nbytes)
        first = last + 1
    return group


def _make_notify(group: TensorGroup, first: int, last: int) -> Callable[[], None]:
    def notify_ready() -> None:
        for tensor in range(first, last + 1):
            group.notify_ready(tensor)

    return notify_ready if last > first else partial(group.notify_ready, first)
