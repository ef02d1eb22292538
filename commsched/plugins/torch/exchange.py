"""GradientExchange: gradients into the flat buffers as backward produces them, averages out of them.

A *round* is one exchange of all gradients. It begins with the first gradient of a backward and ends with ``end_round``:
in ``step()``, or when its gradients were dropped (an overflow step that ``GradScaler`` skips).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic
from weakref import WeakValueDictionary

import torch

import commsched

from ...core.errors import ConfigError, TransportError, UnsupportedError
from ...core.group import TensorGroup
from ...core.manifest import ITEMSIZE, Manifest, TensorSpec, require_equal
from .device import Device, open_device
from .guard import address, guard, release

_DTYPES = {getattr(torch, name): name for name in ("float16", "bfloat16", "float32", "float64")}


#: By id of parameter, which its exchange keeps alive.
_exchanges: WeakValueDictionary[int, GradientExchange] = WeakValueDictionary()


class Slot:
    """One parameter: its gradient's place in the flat buffer (``view``) and what is outstanding for it."""

    __slots__ = ("address", "group_index", "has_gradient", "name", "parameter", "pending", "ready", "tensor", "view")

    def __init__(self, name: str, parameter: torch.nn.Parameter, group_index: int) -> None:
        self.name = name
        self.parameter = parameter
        self.group_index = group_index  # its place in the optimizer's param_groups
        self.tensor = -1  # its index in the manifest
        self.view: torch.Tensor = parameter  # until the buffers are there
        self.address = 0  # of the view in the flat buffer
        self.ready = False  # handed over in this round
        self.has_gradient = False  # this rank contributed more than zeros
        self.pending = False  # step() was called and the update is not yet in place

    def spec(self) -> TensorSpec:
        parameter = self.parameter
        if parameter.dtype not in _DTYPES or parameter.layout != torch.strided:
            raise UnsupportedError(
                f"parameter '{self.name}' is {parameter.dtype}, {parameter.layout}; only dense gradients of "
                f"{', '.join(map(str, _DTYPES))} can be averaged"
            )
        return TensorSpec(self.name, tuple(parameter.shape), _DTYPES[parameter.dtype])


class GradientExchange:
    """Owns the flat buffers and the hooks.

    ``before_round`` is called before the averages of the last round may be overwritten. Hooks run in the thread that runs
    backward; everything else in the engine's main thread.

    Beside the gradients go two sets of flags: which parameters this rank has a gradient of when backward is over, for those
    who read gradients before ``step()``; and, from ``step()``, whether it commits to the update and of which it has one still.
    """

    def __init__(self, session: commsched.Session, slots: Sequence[Slot], before_round: Callable[[], None]) -> None:
        self.slots = list(slots)
        self.enabled = True  # False within no_sync()
        self._session = session
        self._before_round = before_round
        self._buffers: _Buffers | None = None
        self._round_open = False  # between the first gradient and end_round
        self._complete = False  # every slot was handed over in this round
        self._observer = session.observer
        self._last_gradient_at = 0.0
        # The model as it is registered; every rank's must be equal before anything else is exchanged.
        manifest = Manifest(tuple(slot.spec() for slot in slots))
        self._device = open_device(session, [(slot.name, slot.parameter) for slot in slots])
        require_equal([Manifest.from_record(record) for record in session.gather(manifest.to_record())])
        for slot in self.slots:
            if id(slot.parameter) in _exchanges:
                raise ConfigError(
                    f"parameter '{slot.name}' belongs to another ScheduledOptimizer; call that one's detach() first"
                )
        self._handles = []
        for slot in self.slots:
            _exchanges[id(slot.parameter)] = self
            self._handles.append(slot.parameter.register_hook(self._make_hook(slot, self._before_gradient)))
            self._handles.append(slot.parameter.register_post_accumulate_grad_hook(self._make_hook(slot, self._on_gradient)))

    def _make_hook(self, slot: Slot, hook: Callable[[Slot], None]) -> Callable[[torch.Tensor], None]:
        return lambda _: hook(slot)

    def detach(self) -> None:
        """Remove the hooks and let go of the buffers; nothing may be outstanding."""
        self.settle()
        for handle in self._handles:
            handle.remove()
        for slot in self.slots:
            _exchanges.pop(id(slot.parameter), None)
            release(slot.view)
            release(slot.parameter)
        if self._buffers is not None:
            self._buffers.release()
        self._device.close()

    def settle(self) -> None:
        """Return when every gradient that was handed over is ready for the network, also one that no step uses."""
        self._device.settle()

    def record_first_use(self) -> None:
        """From now on, note which parameter is used first, second, ..."""
        self._use_order = _FirstUse(self.slots, self._device)

    @property
    def buffers(self) -> _Buffers:
        """Made at the first gradient, when rank 0's forward has shown the order of the layers."""
        if self._buffers is None:
            order = self._session.gather(self._use_order.finish())[0]
            by_name = {slot.name: slot for slot in self.slots}
            self.slots = [by_name[name] for name in order]
            self._buffers = _Buffers(self._session, self.slots, self._device)
        return self._buffers

    # --- one round ---

    def _before_gradient(self, slot: Slot) -> None:
        """Before autograd adds to ``.grad``: what is outstanding for it must not be touched."""
        if slot.pending:  # a graph that was kept from before step(), so that no forward has read the parameter
            self._before_round()
        if self._round_open and slot.ready and (slot.parameter.grad is slot.view or not self.enabled):
            raise UnsupportedError(
                f"a second gradient of '{slot.name}' before step(): its first is being averaged already. To accumulate over "
                "several backward passes, run all but the last within optimizer.no_sync(); after a skipped step, call "
                "optimizer.zero_grad()"
            )

    def _on_gradient(self, slot: Slot) -> None:
        if not self.enabled:
            return
        gradient = slot.parameter.grad
        assert gradient is not None
        if self._round_open and slot.ready:
            self.end_round(committed=False)  # zero_grad() without step(): the round's gradients were dropped
        self._begin_round()
        if self._observer is not None:
            began, self._last_gradient_at = self._last_gradient_at, monotonic()
            self._observer.on_span("backward", slot.name, began, self._last_gradient_at)
        self._hand_over(slot, gradient)

    def _begin_round(self) -> None:
        if self._round_open:
            return
        self._before_round()
        self.buffers.begin_step()
        self._round_open = True
        self._complete = False
        for slot in self.slots:
            slot.ready = slot.has_gradient = False
            release(slot.view)  # of a round whose gradients were dropped: it is over, nothing is left to wait for

    def _hand_over(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Put ``gradient`` (None: zeros) into the buffer and tell the core. From here the average is on its way."""
        slot.ready = True
        slot.has_gradient = gradient is not None
        self._require_in_buffer(slot)
        if gradient is None:
            slot.view.zero_()
        elif gradient.requires_grad:
            raise UnsupportedError(f"the gradient of '{slot.name}' has a graph (create_graph=True): it cannot be averaged")
        elif gradient is not slot.view:
            if gradient.layout != torch.strided or gradient.dtype != slot.view.dtype or gradient.device != slot.view.device:
                raise UnsupportedError(
                    f"the gradient of '{slot.name}' is {gradient.dtype}, {gradient.layout} on {gradient.device}; when it was "
                    f"wrapped, the parameter was dense {slot.view.dtype} on {slot.view.device}"
                )
            with torch.no_grad():
                slot.view.copy_(gradient)
                slot.parameter.grad = slot.view
        if gradient is not None:
            guard(slot.view, lambda: self.wait(slot))
        self._device.when_written(partial(self.buffers.gradients.notify_ready, slot.tensor))

    def _complete_round(self, drop: bool = False) -> None:
        """Hand over what backward did not produce (zeros, unless it was accumulated before), and say what it was."""
        if self._complete:
            return
        self._complete = True
        for slot in self.slots:
            if not slot.ready:
                self._hand_over(slot, None if drop else slot.parameter.grad)
        self.buffers.offer_used([slot.has_gradient for slot in self.slots])

    def end_round(self, committed: bool) -> None:
        """Hand over the rest, and whether this rank commits to the update (``step()``); all ranks must, or none."""
        self._begin_round()
        if committed:
            for slot in self.slots:
                self._require_in_buffer(slot)
                # Handed over, and dropped since: if every rank did so, there is no update.
                slot.has_gradient = slot.has_gradient and slot.parameter.grad is not None
        self._complete_round(drop=not committed)
        if committed:
            self._adopt_replaced()
        self.buffers.offer_committed(committed, [slot.has_gradient for slot in self.slots])
        self._round_open = False

    def _adopt_replaced(self) -> None:
        """What the user has put into ``.grad`` since backward is what the update uses."""
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is not None and gradient is not slot.view:
                self._await_average(slot)
                with torch.no_grad():
                    slot.view.copy_(gradient)
                slot.parameter.grad = slot.view

    def _require_in_buffer(self, slot: Slot) -> None:
        if address(slot.view) != slot.address:
            raise UnsupportedError(f"the memory of '{slot.name}'.grad was replaced through .data; assign to .grad instead")

    # --- averages ---

    def wait(self, slot: Slot) -> None:
        """Until the average of ``slot`` is in ``slot.view``.

        Raises:
            UnsupportedError: it is read before step() where its average cannot be there, or would not be of use.
        """
        if self._round_open:
            if torch._C._current_graph_task_id() != -1:
                raise UnsupportedError(
                    f"the gradient of '{slot.name}' is read within backward: its average cannot be there yet"
                )
            self._complete_round()
            self._require_gradients_of_all_ranks()
        self._await_average(slot)

    def _await_average(self, slot: Slot) -> None:
        self.buffers.gradients.proxies[slot.tensor].wait()
        release(slot.view)

    def _require_gradients_of_all_ranks(self) -> None:
        used = self.buffers.used()
        for slot in self.slots:
            if used[slot.tensor] and not slot.has_gradient:
                raise UnsupportedError(
                    f"gradients are read before step() (to clip them, say), but '{slot.name}' has one on other ranks and none "
                    f"on rank {self._session.rank}: the ranks would part"
                )

    def updating(self) -> AbstractContextManager[object]:
        """Around an update: who reads the parameters after it reads them updated."""
        return self._device.updating()

    def is_there(self, slot: Slot) -> bool:
        """Whether :meth:`wait` and :meth:`kept_by_any_rank` would return at once."""
        return self.buffers.gradients.proxies[slot.tensor].is_open and self.buffers.flags_are_there()

    def kept_by_any_rank(self, slot: Slot) -> bool:
        """Whether any rank had a gradient of ``slot`` when it called ``step()``.

        Raises:
            TransportError: some ranks called step() and others dropped their gradients; an update would part them.
        """
        committed, kept = self.buffers.committed()
        if not committed:
            raise TransportError(
                f"rank {self._session.rank} called step() in step {self.buffers.gradients.step}, but another rank dropped the "
                "gradients of that round (a caught exception in its backward, or a skipped step): the ranks would part"
            )
        return kept[slot.tensor]

    def forward_began(self) -> None:
        """Backward spans of the trace are measured from the end of the forward before them."""
        self._last_gradient_at = monotonic()


class _Buffers:
    """The registered tensors: the gradients, in the order of the slots, and the flags.

    Each set of flags is a group of its own: nothing waits for it by sharing its partition, and both go before all but the
    first gradients.
    """

    def __init__(self, session: commsched.Session, slots: Sequence[Slot], device: Device) -> None:
        self._device = device
        views, self.gradients = _register(session, device, [slot.spec() for slot in slots])
        for tensor, (slot, view) in enumerate(zip(slots, views)):
            slot.tensor, slot.view, slot.address = tensor, view, view.data_ptr()
        (self._used,), self._used_group = _register(session, device, [TensorSpec("commsched.used", (len(slots),), "float32")])
        kept = TensorSpec("commsched.kept", (1 + len(slots),), "float32")
        (self._kept,), self._kept_group = _register(session, device, [kept])
        self._all_used: list[bool] | None = None  # of this round, once read
        self._all_kept: tuple[bool, list[bool]] | None = None

    def begin_step(self) -> None:
        for group in (self.gradients, self._used_group, self._kept_group):
            group.begin_step()

    def release(self) -> None:
        for group in (self.gradients, self._used_group, self._kept_group):
            group.release()

    def offer_used(self, used: list[bool]) -> None:
        self._all_used = None
        with self._device.aside():
            self._used.copy_(torch.tensor(used))
        self._used_group.notify_ready(0)

    def offer_committed(self, committed: bool, kept: list[bool]) -> None:
        self._all_kept = None
        with self._device.aside():
            self._kept.copy_(torch.tensor([committed, *kept]))
        self._kept_group.notify_ready(0)

    def flags_are_there(self) -> bool:
        return self._used_group.proxies[0].is_open and self._kept_group.proxies[0].is_open

    def used(self) -> list[bool]:
        """For each slot, whether any rank had a gradient of it after backward; waits for the flags of all ranks."""
        if self._all_used is None:
            self._used_group.proxies[0].wait()
            with self._device.aside():
                self._all_used = [share > 0 for share in self._used.tolist()]
        return self._all_used

    def committed(self) -> tuple[bool, list[bool]]:
        """Whether all ranks called ``step()``, and for each slot whether any rank still had a gradient of it then; waits."""
        if self._all_kept is None:
            self._kept_group.proxies[0].wait()
            with self._device.aside():
                committed, *kept = self._kept.tolist()
            self._all_kept = committed == 1.0, [share > 0 for share in kept]
        return self._all_kept


def _register(
    session: commsched.Session, device: Device, specs: Sequence[TensorSpec]
) -> tuple[list[torch.Tensor], TensorGroup]:
    """Flat buffers for tensors in forward order, and each tensor's view of them."""
    manifest = Manifest(tuple(specs))
    flat = {
        dtype: torch.zeros(nbytes, dtype=torch.uint8, device=session.device) for dtype, nbytes in manifest.buffer_bytes.items()
    }
    views = []
    for tensor, spec in enumerate(manifest.tensors):
        start = manifest.offset(tensor) // ITEMSIZE[spec.dtype]
        views.append(flat[spec.dtype].view(getattr(torch, spec.dtype))[start : start + spec.numel].view(spec.shape))
    return views, session.register(manifest, {dtype: device.bytes_of(buffer) for dtype, buffer in flat.items()})


class _FirstUse:
    """In which order the parameters are first used. Parameters never used come last, as registered."""

    def __init__(self, slots: Sequence[Slot], device: Device) -> None:
        self._slots = slots
        self._device = device
        self._order: list[str] = []
        for slot in slots:
            guard(slot.parameter, self._make_recorder(slot))

    def _make_recorder(self, slot: Slot) -> Callable[[], None]:
        def record() -> None:
            release(slot.parameter)
            self._device.read()
            self._order.append(slot.name)

        return record

    def finish(self) -> list[str]:
        for slot in self._slots:
            release(slot.parameter)
        seen = set(self._order)
        return self._order + [slot.name for slot in self._slots if slot.name not in seen]
