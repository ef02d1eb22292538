"""Slot: one parameter of the optimizer, and its gradient's place in a flat buffer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import torch

import commsched

from ...core.device_events import Event
from ...core.errors import UnsupportedError
from ...core.group import DependencyProxy, TensorGroup
from ...core.manifest import TensorSpec
from .checks import Rows
from .device import Device, register_on, spec_of
from .guard import Record, address, guard, record_of, release, unguarded
from .marked import Twin, increment_versions

if TYPE_CHECKING:
    from .edits import AwaitedGradient
    from .packs import Pack

log = logging.getLogger("commsched")

_STRIDED = torch.strided


class GradientState(Enum):
    """The state of the gradient of one parameter on this rank; see :data:`GRADIENT_TRANSITIONS`.

    The states before the submission do not say whether ``.grad`` is there: user code assigns to it at any time.
    """

    EXPECTED = "expected"  # nothing, in this round; or there is no round, and no update is outstanding
    WAITING = "waiting"  # there is one that the running backward did not make; it is submitted when backward is over
    NO_PLACE = "without a place"  # it is submitted as soon as ranks have given the parameter a place, still in this round
    SUBMITTED = "submitted"  # submitted it
    ZEROS = "zeros"  # submitted zeros, because there is none
    OUTSTANDING = "outstanding"  # called step(), and the update is not complete

    __hash__ = object.__hash__  # the hash of an Enum is a call of Python, and each step looks up several for each parameter


#: All transitions between the states of a gradient. Any other event is a bug of ours and raises KeyError.
GRADIENT_TRANSITIONS: dict[tuple[GradientState, str], GradientState] = {
    (GradientState.EXPECTED, "begin"): GradientState.EXPECTED,
    (GradientState.WAITING, "begin"): GradientState.EXPECTED,
    (GradientState.SUBMITTED, "begin"): GradientState.EXPECTED,
    (GradientState.ZEROS, "begin"): GradientState.EXPECTED,
    (GradientState.EXPECTED, "hold"): GradientState.WAITING,
    (GradientState.WAITING, "hold"): GradientState.WAITING,
    (GradientState.EXPECTED, "need place"): GradientState.NO_PLACE,
    (GradientState.WAITING, "need place"): GradientState.NO_PLACE,
    (GradientState.EXPECTED, "submit"): GradientState.SUBMITTED,
    (GradientState.WAITING, "submit"): GradientState.SUBMITTED,
    (GradientState.NO_PLACE, "submit"): GradientState.SUBMITTED,
    (GradientState.EXPECTED, "submit zeros"): GradientState.ZEROS,
    (GradientState.WAITING, "submit zeros"): GradientState.ZEROS,
    (GradientState.SUBMITTED, "step"): GradientState.OUTSTANDING,
    (GradientState.ZEROS, "step"): GradientState.OUTSTANDING,
    (GradientState.OUTSTANDING, "update"): GradientState.EXPECTED,
}

#: The states in which this rank has neither submitted anything in the round, nor noted what it will submit.
BEFORE_SUBMISSION = (GradientState.EXPECTED, GradientState.WAITING)
#: The states in which this rank contributes more than zeros to the round.
CONTRIBUTED = (GradientState.SUBMITTED, GradientState.NO_PLACE)


class Slot:
    """One parameter: its gradient's place in a flat buffer, and its outstanding average and update.

    ``view`` is the place; no user code has this object. ``gradient`` is the tensor that is, or will be, in ``.grad``. For a
    dense parameter it lies in the view's memory, and user code may hold it.

    A parameter that was frozen so far, or is new, has no place yet; then ``proxies`` is empty.

    ``state`` says what this rank has done with the gradient. The training thread changes it by :meth:`advance`, or, when a
    gradient is read, the one thread that submits the rest; the end of an update may come in any thread, with the optimizer's
    lock held. The fields below that are not part of the state are independent of it; the comment of each says why.
    """

    __slots__ = (
        "address",
        "await_gradient",
        "await_update",
        "device",
        "dtype",
        "filled",
        "flag",
        "gradient",
        "gradient_record",
        "group",
        "is_sparse",
        "is_undefined",
        "made",
        "name",
        "notify_ready",
        "pack",
        "param_group",
        "parameter",
        "proxies",
        "record",
        "references",
        "rows",
        "shape",
        "state",
        "stride",
        "tensor",
        "twin",
        "users",
        "version",
        "view",
        "waiting",
        "was_read",
        "zero_later",
    )

    def __init__(self, name: str, parameter: torch.nn.Parameter, param_group: int, is_sparse: bool) -> None:
        self.name = name
        self.parameter = parameter
        self.param_group = param_group  # the index of its group in the optimizer
        self.is_sparse = is_sparse  # its module makes sparse gradients
        self.flag = -1  # its index in the flags
        self.proxies: tuple[DependencyProxy, ...] = ()
        self.notify_ready: Callable[..., None]  # set with the proxies: notifies the core that the gradient is in the view
        self.group: TensorGroup  # set with the proxies
        self.tensor = -1  # its index in the group, if exactly one tensor travels for it
        self.pack: Pack | None = None  # submits the gradient by the shortest way
        self.view: torch.Tensor = parameter  # a placeholder until the buffers exist
        self.address = 0  # the view's address; the next four are the view's device, dtype, shape and stride
        self.device, self.dtype = parameter.device, parameter.dtype
        self.shape: torch.Size = parameter.shape
        self.stride: tuple[int, ...] = ()
        self.gradient: torch.Tensor = parameter  # a placeholder until there is a gradient
        self.references = 0  # reference count of ``gradient`` if only this slot holds it
        self.state = GradientState.EXPECTED
        self.waiting: torch.Tensor | None = None  # in state WAITING: the gradient, which is guarded
        self.made: torch.Tensor | None = None  # the ``.grad`` that backward has made within no_sync(); no round need be open
        self.users: torch.Tensor | None = None  # from one hook to the next: the ``.grad`` that backward was about to add to
        self.is_undefined = False  # from one hook to the next: backward had no gradient for the parameter
        self.rows: Rows | None = None  # the touched rows of a sparse gradient
        self.filled = True  # a sparse ``gradient`` holds the average; any thread that reads it, or updates, may fill it
        self.version = 0  # version of ``gradient`` when it was submitted; the user's in-place operations increase it
        self.was_read = False  # the gradient was read in this round, before step(); by any thread, which changes no state
        self.await_gradient: AwaitedGradient  # called before the gradient is read
        self.record = self.gradient_record = record_of(parameter)  # see ``record_of_gradient`` for the second
        self.await_update: Callable[[], None]  # called before the parameter is read, while an update is outstanding
        # Zero ``gradient`` after the outstanding update, which still needs its values. No state, because the training thread
        # sets it while another thread may end the update.
        self.zero_later = False
        self.twin: Twin  # the tensor that the update works on; set with the first outstanding update

    def advance(self, event: str) -> None:
        """Change the state by ``event``, one of the events in :data:`GRADIENT_TRANSITIONS`."""
        self.state = GRADIENT_TRANSITIONS[self.state, event]

    def record_of_gradient(self, gradient: torch.Tensor) -> Record:
        """Return the guard's record of ``gradient``, which is the slot's own. It is kept, because each step needs it twice."""
        record = self.gradient_record
        if record() is not gradient:
            record = self.gradient_record = record_of(gradient)
        return record

    def begin_round(self) -> None:
        """Note that a round begins. A gradient that waited for a round that was broken off is forgotten."""
        if self.waiting is not None:
            self.release_waiting()
        self.state = GRADIENT_TRANSITIONS[self.state, "begin"]  # advance() would be one more call for each parameter
        if self.was_read:
            self.was_read = self.await_gradient.is_there = False

    def specs(self) -> list[TensorSpec]:
        """Return the specs of the tensors that travel for this parameter. Raises UnsupportedError if the parameter's type
        cannot be averaged."""
        with unguarded():
            parameter = self.parameter.resolve_conj()  # PyTorch views no conjugate numbers as real ones
            spec = spec_of(self.name, torch.view_as_real(parameter) if parameter.is_complex() else parameter)
        return [spec, TensorSpec(f"{self.name}.rows", spec.shape[:1], "float32")] if self.is_sparse else [spec]

    def require_averageable(self, gradient: torch.Tensor) -> None:
        """Require that ``gradient`` has no graph, and the layout, shape, type and device registered for this parameter. Raises
        UnsupportedError if one of these differs; the message says which."""
        if gradient.requires_grad:
            raise UnsupportedError(f"the gradient of '{self.name}' has a graph (create_graph=True): it cannot be averaged")
        if (
            gradient.dtype is self.dtype
            and gradient.layout is _STRIDED
            and not self.is_sparse
            and gradient.shape == self.shape
            and gradient.device == self.device
        ):
            return  # the usual case
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
        if gradient.shape != self.view.shape:
            raise UnsupportedError(
                f"the gradient of '{self.name}' has the shape {list(gradient.shape)}; when it was wrapped, the parameter had "
                f"{list(self.view.shape)}: after changing shapes make a new optimizer, and a new ScheduledOptimizer of it"
            )
        if gradient.layout != expected or gradient.dtype != self.view.dtype or gradient.device != self.view.device:
            raise UnsupportedError(
                f"the gradient of '{self.name}' is {gradient.dtype}, {gradient.layout} on {gradient.device}; when it was "
                f"wrapped, the parameter was dense {self.view.dtype} on {self.view.device}: after changing the dtype or the "
                "device make a new optimizer, and a new ScheduledOptimizer of it"
            )

    def bring_into_buffer(self, given: dict[Slot, torch.UntypedStorage]) -> None:
        """Move the gradient back into the view's memory if the user has given it other memory or strides, through ``.data`` or
        by transposing it in place.

        The view takes the values, and the gradient counts as edited. ``given`` receives the other memory, which the user may
        still hold.

        Raises:
            UnsupportedError: the average may be outstanding, the values do not fit the view, or the memory of the view itself
                was moved; or backward has added to a part of a larger tensor.
        """
        gradient = self.gradient
        if self.rows is not None or not self.has_moved():
            return
        if address(gradient) == self.address:
            self.require_averageable(gradient)
        is_before = self.state in BEFORE_SUBMISSION
        if self.parameter.grad is gradient and (self.was_read or is_before) and self._fits(gradient):
            with torch.no_grad(), unguarded():
                if gradient.data_ptr() != self.address:
                    if is_before:
                        self.require_own_memory(gradient)
                    given[self] = gradient.untyped_storage()
                self.view.copy_(gradient.clone())
                gradient.data = self.view
                increment_versions([gradient])
        self.require_in_buffer()

    def has_moved(self) -> bool:
        """Whether the gradient has another address than the view or, if it is still in ``.grad``, another shape or strides."""
        gradient = self.gradient
        if address(gradient) != self.address:
            return True
        return self.parameter.grad is gradient and (gradient.stride() != self.stride or gradient.shape != self.shape)

    def require_released(self, given: torch.UntypedStorage) -> None:
        """Require that ``given``, the memory that the user once gave to the gradient in ``.grad``, is not in use any more.
        Raises UnsupportedError if something holds it: what was done to it since is not in the gradient."""
        if self.parameter.grad is self.gradient and is_held(given):
            raise UnsupportedError(
                f"'{self.name}'.grad was given memory through .data, and something else still holds that memory; changes "
                "to it would not reach the gradient: assign to .grad instead, copy in place, or call zero_grad()"
            )

    def _fits(self, gradient: torch.Tensor) -> bool:
        view = self.view
        kinds = [(each.shape, each.dtype, each.layout, each.device) for each in (gradient, view)]
        return kinds[0] == kinds[1] and view.data_ptr() == self.address

    def require_in_buffer(self) -> None:
        """Require that the gradient, if it is still in ``.grad``, lies in the view's memory. Raises UnsupportedError if the
        user has given the gradient other memory, or moved the memory of the view."""
        gradient = self.gradient
        if self.rows is not None:
            return
        if (gradient.data_ptr() if type(gradient) is torch.Tensor else address(gradient)) == self.address:
            return
        if self.parameter.grad is self.gradient or self.view.data_ptr() != self.address:
            raise UnsupportedError(
                f"the memory of '{self.name}'.grad was replaced through .data: assign to .grad instead; if it was model.to(), "
                "float(), share_memory() or the like, call zero_grad() before that"
            )
        self.gradient = self.view.data  # the replaced gradient is not used any more

    def require_own_memory(self, gradient: torch.Tensor) -> None:
        """Require that ``gradient``, which the user has put into ``.grad``, does not share memory with other tensors. Raises
        UnsupportedError if it is a part of a larger tensor."""
        if gradient.layout == torch.strided and gradient.untyped_storage().nbytes() > gradient.nbytes:
            raise UnsupportedError(
                f"'{self.name}'.grad is a view of a larger tensor, a flat buffer of gradients, say: it is averaged elsewhere, "
                "so changes to that tensor would not reach it; give each parameter a gradient of its own, or zero_grad()"
            )

    def is_changed(self) -> bool:
        """Whether the user has changed, replaced or dropped ``.grad`` since it was submitted."""
        gradient = self.parameter.grad
        if gradient is not self.gradient:
            return self.state in CONTRIBUTED or gradient is not None
        if not self.was_read:
            return False
        with unguarded():
            return gradient._version != self.version

    @torch.no_grad()
    def move_in(self, gradient: torch.Tensor) -> None:
        """Copy the values of ``gradient`` into the view, and let ``gradient`` use the view's memory: user code may hold this
        object and read it later. Not for sparse gradients."""
        self._keep_what_is_held()
        self.view.copy_(gradient)
        gradient.data = self.view
        self.gradient = gradient

    def copy_in(self, gradient: torch.Tensor) -> None:
        """Copy the values of ``gradient``, which has no graph, into the view, and put the slot's own gradient object into
        ``.grad``. Not for sparse gradients."""
        if sys.getrefcount(self.gradient) > self.references:
            self._keep_what_is_held()
        self.view.copy_(gradient)
        self.parameter.grad = self.gradient

    @torch.no_grad()
    def zero(self, in_round: bool) -> None:
        """Zero ``.grad``, keeping the object that the user holds.

        An outstanding update still needs the values; then the gradient is zeroed after the update.

        Args:
            in_round: whether a round is open. The averages of an open round must not be lost, so the object then gets zeros
                in other memory.
        """
        gradient = self.parameter.grad
        if gradient is None:
            return
        with unguarded():
            if self.rows is not None:
                self.parameter.grad = torch.zeros_like(gradient)
            elif self.proxies and gradient is self.gradient and not in_round:
                self.zero_later = True
                if self.state is not GradientState.OUTSTANDING:
                    self.zero_if_asked()
            elif self.proxies and gradient is self.gradient:
                release(gradient)
                gradient.data = torch.zeros_like(self.view)
                self.gradient = self.view.data
            else:
                gradient.detach_().zero_()

    def zero_if_asked(self) -> None:
        """Zero the gradient if the user has asked for it. The thread that ran the last outstanding update calls this before it
        releases the readers of the parameter."""
        if self.zero_later:
            self.zero_later = False
            with torch.inference_mode(False), torch.no_grad(), unguarded():
                self.gradient.zero_()

    def put_zeros(self) -> None:
        """Put zeros into the view, because this rank has no gradient. Not for sparse gradients."""
        self._keep_what_is_held()
        self.view.zero_()

    def hold(self, gradient: torch.Tensor) -> None:
        """Let ``gradient`` wait until it is submitted. Its readers wait for its average from now on."""
        self.release_waiting()
        self.advance("hold")
        self.waiting = gradient
        guard(gradient, self.await_gradient)

    def release_waiting(self) -> None:
        """Release the gradient that waits to be submitted, if there is one. The state has to change then."""
        if self.waiting is not None:
            release(self.waiting)
            self.waiting = None

    def own_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Put a copy of ``gradient`` into ``.grad`` and return it: the original was set by hand, so other parameters may have
        the same object."""
        with unguarded():
            self.parameter.grad = gradient.clone()
        return self.parameter.grad

    def _keep_what_is_held(self) -> None:
        """Called before the view is written: if user code holds the last gradient, move its values to memory of its own."""
        if sys.getrefcount(self.gradient) > self.references:
            self.gradient.data = self.view.clone()
            self.gradient = self.view.data


def is_held(storage: torch.UntypedStorage) -> bool:
    """Whether any tensor uses ``storage``."""
    count = torch._C._storage_Use_Count
    alone = torch.empty(1).untyped_storage()
    return count(storage._cdata) > count(alone._cdata)


def give_places(session: commsched.Session, device: Device, slots: Sequence[Slot]) -> tuple[TensorGroup, list[torch.Tensor]]:
    """Register the gradients of ``slots``, in forward order. Return the group and the tensors in its buffers. Collective.
    Raises ManifestMismatch if the ranks' parameters differ, and UnsupportedError if the type of a parameter cannot be
    averaged."""
    specs = _aligned(slots)
    group, views = register_on(session, device, [spec for each in specs for spec in each], may_freeze=True)
    first = 0
    for slot, (spec, *beside) in zip(slots, specs):
        last = first + len(beside)
        if slot.parameter.dtype.is_complex:
            view = torch.view_as_complex(views[last])
            beside = []
        else:
            view = views[first]
        slot.view, slot.gradient = view, view.data  # .data, here and below, gives the gradient its own version counter
        slot.references = sys.getrefcount(slot.gradient)
        slot.address, slot.shape, slot.stride = view.data_ptr(), view.shape, view.stride()
        slot.device, slot.dtype = view.device, view.dtype
        slot.proxies = group.proxies[first : last + 1]
        slot.notify_ready = _make_notify(group, first, last)
        slot.group, slot.tensor = group, first if first == last else -1
        if beside:
            slot.rows = Rows(views[last])
            if session.rank == 0:
                log.info("the gradient of '%s' is sparse; it travels densely: %d bytes per step", slot.name, spec.nbytes)
        first = last + 1
    return group, views


def _aligned(slots: Sequence[Slot]) -> list[list[TensorSpec]]:
    """Return the specs that travel for each of ``slots``. A complex number is sent as two real ones, and must begin at an even
    index of its buffer; an extra element aligns it where necessary."""
    numels: dict[str, int] = {}
    specs = []
    for slot in slots:
        each = slot.specs()
        if slot.parameter.dtype.is_complex and numels.get(each[0].dtype, 0) % 2:
            each.insert(0, TensorSpec(f"{slot.name}.alignment", (1,), each[0].dtype))
        for spec in each:
            numels[spec.dtype] = numels.get(spec.dtype, 0) + spec.numel
        specs.append(each)
    return specs


def _make_notify(group: TensorGroup, first: int, last: int) -> Callable[..., None]:
    def notify_ready(after: Event | None = None) -> None:
        group.notify_all_ready(range(first, last + 1), after)

    return notify_ready if last > first else partial(group.notify_ready, first)
