"""GradientExchange: gradients into the flat buffers as backward produces them, averages out of them.

A *round* is one exchange of all gradients. It begins with the first gradient of a backward and ends with ``end_round``:
in ``step()``, or when its gradients were dropped (an overflow step that ``GradScaler`` skips).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

import torch

import commsched

from ...core.errors import TransportError, UnsupportedError
from ...core.group import TensorGroup
from ...core.manifest import ITEMSIZE, Manifest, TensorSpec, require_equal
from .guard import guard, release

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


class Slot:
    """One parameter: its gradient's place in the flat buffer (``view``) and what is outstanding for it."""

    __slots__ = ("group_index", "has_gradient", "name", "parameter", "pending", "ready", "tensor", "view")

    def __init__(self, name: str, parameter: torch.nn.Parameter, group_index: int) -> None:
        self.name = name
        self.parameter = parameter
        self.group_index = group_index  # its place in the optimizer's param_groups
        self.tensor = -1  # its index in the manifest
        self.view: torch.Tensor = parameter  # until the buffers are there
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
        if parameter.device.type != "cpu":
            raise UnsupportedError(f"parameter '{self.name}' is on {parameter.device}; this version averages on the CPU only")
        return TensorSpec(self.name, tuple(parameter.shape), _DTYPES[parameter.dtype])


class GradientExchange:
    """Owns the flat buffers and the hooks.

    ``before_round`` is called before the averages of the last round may be overwritten. Hooks run in the thread that runs backward; everything else in the engine's main thread.
    """

    def __init__(self, session: commsched.Session, slots: Sequence[Slot], before_round: Callable[[], None]) -> None:
        self.slots = list(slots)
        self.enabled = True  # False within no_sync()
        self._session = session
        self._before_round = before_round
        self._group: TensorGroup | None = None
        self._round_open = False
        self._observer = session.observer
        self._last_gradient_at = 0.0
        # The model as it is registered; every rank's must be equal before anything else is exchanged.
        self._require_equal_models(Manifest(tuple(slot.spec() for slot in slots)))
        self._agreed: list[float] | None = None  # the flags of the round that ended, averaged
        self._handles = [slot.parameter.register_post_accumulate_grad_hook(self._make_hook(slot)) for slot in self.slots]

    def _make_hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        return lambda _: self._on_gradient(slot)

    def _require_equal_models(self, manifest: Manifest) -> None:
        require_equal([Manifest.from_record(record) for record in self._session.gather(manifest.to_record())])

    def record_first_use(self) -> None:
        """From now on, note which parameter is used first, second, ..."""
        self._use_order = _FirstUse(self.slots)

    # --- buffers, made when the order of layers is known ---

    def _open(self) -> TensorGroup:
        """At the first gradient: the layers are ordered by their first use in rank 0's forward."""
        order = self._session.gather(self._use_order.finish())[0]
        by_name = {slot.name: slot for slot in self.slots}
        self.slots = [by_name[name] for name in order]
        # The flags travel in front, so that they are there when the first parameter is (see end_round).
        first = self.slots[0].spec().dtype
        specs = [TensorSpec("commsched.flags", (1 + len(self.slots),), first), *(slot.spec() for slot in self.slots)]
        manifest = Manifest(tuple(specs))
        flat = {dtype: torch.zeros(nbytes, dtype=torch.uint8) for dtype, nbytes in manifest.buffer_bytes.items()}

        def view(tensor: int, like: torch.dtype) -> torch.Tensor:
            spec, start = manifest.tensors[tensor], manifest.offset(tensor)
            elements = flat[spec.dtype].view(like)[start // ITEMSIZE[spec.dtype] :][: spec.numel]
            return elements.view(spec.shape)

        self._flags = view(0, self.slots[0].parameter.dtype)
        for tensor, slot in enumerate(self.slots, 1):
            slot.tensor = tensor
            slot.view = view(tensor, slot.parameter.dtype)
        buffers = {dtype: buffer.numpy().data for dtype, buffer in flat.items()}
        return self._session.register(manifest, buffers)

    @property
    def group(self) -> TensorGroup:
        if self._group is None:
            self._group = self._open()
        return self._group

    # --- one round ---

    def _on_gradient(self, slot: Slot) -> None:
        if not self.enabled:
            return
        gradient = slot.parameter.grad
        assert gradient is not None
        if self._round_open and slot.ready:
            if gradient is slot.view:
                raise UnsupportedError(
                    f"a second gradient of '{slot.name}' before step(): its first is being averaged already. To accumulate "
                    "over several backward passes, run all but the last within optimizer.no_sync()"
                )
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
        self.group.begin_step()
        self._round_open = True
        for slot in self.slots:
            slot.ready = slot.has_gradient = False
            release(slot.view)  # of a round whose gradients were dropped: it is over, nothing is left to wait for

    def _hand_over(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Put ``gradient`` (None: zeros) into the buffer and tell the core. From here the average is on its way."""
        slot.ready = True
        slot.has_gradient = gradient is not None
        if gradient is None:
            slot.view.zero_()
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
        self.group.notify_ready(slot.tensor)

    def end_round(self, committed: bool) -> None:
        """Hand over what backward did not produce, and the flags: whether this rank commits to the update (it called
        ``step()``), and which parameters it has a gradient of. All ranks must commit, or none."""
        self._begin_round()
        for slot in self.slots:
            if not slot.ready:
                self._hand_over(slot, slot.parameter.grad if committed else None)
        self._agreed = None
        self._flags[0] = float(committed)
        self._flags[1:] = torch.tensor([slot.has_gradient for slot in self.slots]).to(self._flags.dtype)
        self.group.notify_ready(0)
        self._round_open = False

    # --- averages ---

    def wait(self, slot: Slot) -> None:
        """Until the average of ``slot`` is in ``slot.view``."""
        self.group.proxies[slot.tensor].wait()
        release(slot.view)

    def is_there(self, slot: Slot) -> bool:
        """Whether :meth:`wait` and :meth:`used_by_any_rank` would return at once."""
        proxies = self.group.proxies
        return proxies[slot.tensor].is_open and proxies[0].is_open

    def used_by_any_rank(self, slot: Slot) -> bool:
        """Whether any rank had a gradient of ``slot`` in the round that ended; waits for the flags.

        Raises:
            TransportError: some ranks called step() and others dropped their gradients; an update would part them.
        """
        if self._agreed is None:
            self.group.proxies[0].wait()
            self._agreed = self._flags.tolist()
        if self._agreed[0] != 1.0:
            raise TransportError(
                f"rank {self._session.rank} called step() in step {self.group.step}, but another rank dropped the gradients of "
                "that round (a caught exception in its backward, or a skipped step): the ranks would part"
            )
        return self._agreed[slot.tensor] > 0.0

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def forward_began(self) -> None:
        """Backward spans of the trace are measured from the end of the forward before them."""
        self._last_gradient_at = monotonic()


class _FirstUse:
    """In which order the parameters are first used. Parameters never used come last, as registered."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._order: list[str] = []
        for slot in slots:
            guard(slot.parameter, self._make_recorder(slot))

    def _make_recorder(self, slot: Slot) -> Callable[[], None]:
        def record() -> None:
            release(slot.parameter)
            self._order.append(slot.name)

        return record

    def finish(self) -> list[str]:
        for slot in self._slots:
            release(slot.parameter)
        seen = set(self._order)
        return self._order + [slot.name for slot in self._slots if slot.name not in seen]
