"""Memory of gradients: flat buffers, and the operations that differ between the host and a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import commsched

from ...core.device import Device as DeviceLayer
from ...core.device import DeviceStream
from ...core.device_events import EventWatcher
from ...core.errors import CommschedError, ConfigError, TransportError, UnsupportedError, error_text
from ...core.group import DependencyProxy, TensorGroup
from ...core.manifest import Manifest, TensorSpec
from ...devices import open_device as open_layer
from ..common.collectives import register_flat
from ..common.weights_check import digest_of

#: Time limit for queued work when the device is closed. Longer than the kernels of a backward take, which may still be queued
#: when a session ends in an error.
_CLOSE_SECONDS = 5.0

_DIGEST_BLOCK = 1 << 20  # number of elements that are widened to int64 at a time
_ODD = 0x1E3779B97F4A7C15

_DTYPES = {getattr(torch, name): name for name in ("float16", "bfloat16", "float32", "float64")}


class Device:
    """The device that holds the parameters of one exchange, their gradients and the flat buffers.

    This class is the CPU, where operations are done when they return.

    ``name`` is that of the parameters' device, as PyTorch writes it. ``layer`` is given with the flat buffers: see
    ``Session.register``. ``arrived`` is called when averages are there and before they are read; None means that there is
    nothing to do.
    """

    name = "cpu"
    layer: DeviceLayer | None = None
    arrived: Callable[[Iterable[DependencyProxy]], None] | None = None

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Allocate zeros, and return them as a tensor of uint8 and as the buffer to register."""
        # Not by torch: share_memory() on a gradient would free the old memory, while averages are still written there.
        memory = np.zeros(nbytes, np.uint8)
        return torch.from_numpy(memory), memory.data

    def when_written(self, notify: Callable[..., None]) -> None:
        """Call ``notify``, with an event behind the work queued so far on the current stream. Never waits."""
        notify()

    def require_no_capture(self, name: str) -> None:
        """Called before the update of the parameter ``name`` is made by a reader. Raises UnsupportedError if that would not be
        made now, but in each replay of a CUDA graph."""

    def copying(self) -> AbstractContextManager[object]:
        """Return a context for copies between host and device. They do not wait for the kernels of the training, and are done
        when the block ends."""
        return nullcontext()

    def read(self) -> None:
        """Called when a parameter is read for the first time."""

    def order(self) -> None:
        """Let what this thread does to parameters from now on come behind the updates that other streams have made."""

    def updating(self) -> AbstractContextManager[object]:
        """Return the context to run an update in. Any thread or stream may read the parameters once the block has ended."""
        return nullcontext()

    def digest(self, values: torch.Tensor, report: Callable[[int], None]) -> None:
        """Call ``report`` with a digest of ``values`` (bytes in one dimension), as of this point of the current stream. It is
        called now, or later from another thread. Never waits."""
        report(digest_of(values.numpy().data))

    def settle(self) -> None:
        """Wait until every ``report`` was called."""

    def close(self) -> None:
        """End the watcher's thread, if there is one. No ``report`` may be outstanding."""


class Cuda(Device):
    """A CUDA device.

    The host runs ahead of the device. A gradient is therefore notified with the event behind its kernel.

    If the session's transport averages on the device, an average is complete when the device has it. The host waits for it
    before it reads it; no stream waits for a collective, so a broken collective cannot block the stream of the training.

    If the transport averages in the host's memory, the core copies gradients and averages, by the device layer's streams (see
    ``core/staging.py``), and the stream that reads an average waits for its copy to the device. A reader on any other stream
    than that of the training waits in the host: the gradient is not guarded after it, so the training would find no wait.

    Updates run on the stream that reads the parameter first. Where one stream reads all parameters, as nearly everywhere, the
    order on that stream suffices. Once several streams have read parameters, every update waits for the whole device before it
    and for its own stream after it.
    """

    def __init__(self, device: torch.device, session: commsched.Session, layer: DeviceLayer) -> None:
        self.name = str(device)
        self.layer: DeviceLayer = layer
        self.arrived = self._arrived if session.device == "cpu" else None
        self._device = device
        self._report = session.report
        self._wait_for_call = session.core.wait_for_call
        self._stream: torch.cuda.Stream | None = None  # the first stream that read a parameter
        self._several_streams = False
        self._copies = torch.cuda.Stream(device, priority=-1)
        self._watcher = EventWatcher("commsched-digests")
        session.cleanup.callback(self.close)

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, Any]:
        flat = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()  # another stream may write to it next
        return flat, self.layer.view(flat)

    def when_written(self, notify: Callable[..., None]) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("backward is captured in a CUDA graph: gradients would be averaged once, not in each replay")
        notify(self._current_stream().record())

    def require_no_capture(self, name: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"'{name}', whose update is outstanding, is read while a CUDA graph is captured: call optimizer.synchronize() "
                "before the capture"
            )

    def _arrived(self, proxies: Iterable[DependencyProxy]) -> None:
        is_usual = not self._several_streams and torch.cuda.current_stream(self._device) == self._stream
        stream = self._current_stream() if is_usual else None
        for proxy in proxies:
            proxy.wait(stream)

    def _current_stream(self) -> DeviceStream:
        return self.layer.current_stream(torch.cuda.current_stream(self._device).cuda_stream)

    @contextmanager
    def copying(self) -> Iterator[None]:
        with torch.cuda.stream(self._copies):
            yield
            self._copies.synchronize()

    def read(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream = stream
        self._several_streams = self._several_streams or stream != self._stream

    def order(self) -> None:
        self.read()
        if self._several_streams:
            torch.cuda.synchronize(self._device)

    @contextmanager
    def updating(self) -> Iterator[None]:
        self.order()
        yield
        if self._several_streams:
            torch.cuda.current_stream(self._device).synchronize()

    def digest(self, values: torch.Tensor, report: Callable[[int], None]) -> None:
        there = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
        there.copy_(digest_on_device(values), non_blocking=True)
        event = self._current_stream().record()  # torch's would wait on device 0 in the watcher's thread, and open it
        self._watcher.call_after(event, lambda: report(int(there) % 2**64), self._failed)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, CommschedError):  # the session's own error is raised by the next call anyway
            cause = error_text(error)
            self._report(TransportError(f"{self._device} failed while it computed a digest of weights: {cause}"))

    def settle(self) -> None:
        self._wait_for_call(self._watcher.when_settled, "for digests of weights")

    def close(self) -> None:
        self._watcher.close(_CLOSE_SECONDS)


def digest_on_device(values: torch.Tensor) -> torch.Tensor:
    """Compute a digest of ``values`` (bytes in one dimension) on their device: one int64. Any single different bit changes the
    digest."""
    whole = len(values) % 4 == 0 and values.storage_offset() % 4 == 0
    words = values.view(torch.int32) if whole else values
    factors = torch.arange(1, 2 * _DIGEST_BLOCK, 2, dtype=torch.int64, device=values.device) * _ODD
    digest = torch.zeros((), dtype=torch.int64, device=values.device)
    for block in words.split(_DIGEST_BLOCK):
        digest = digest * _ODD + (block.to(torch.int64) * factors[: len(block)]).sum()  # modulo 2 ** 64
    return digest


def device_of(parameters: Sequence[tuple[str, torch.Tensor]]) -> torch.device:
    """Return the device of all named ``parameters``. Raises UnsupportedError if they are on several devices; the message names
    two parameters on different ones."""
    first_name, first = parameters[0]
    for name, parameter in parameters:
        if parameter.device != first.device:
            raise UnsupportedError(
                f"parameter '{first_name}' is on {first.device} but '{name}' on {parameter.device}; one process averages "
                "gradients of one device"
            )
    return first.device


def open_device(session: commsched.Session, parameters: Sequence[tuple[str, torch.Tensor]]) -> Device:
    """Return the Device for the parameters' device. Raises UnsupportedError if the session's transport does not average tensors
    of that device, and ConfigError if a package is missing that it needs for that."""
    device = device_of(parameters)
    if str(device) == session.device == "cpu":
        return Device()
    where = f"parameter '{parameters[0][0]}' is on {device}"
    if device.type == "cuda" and session.device in ("cpu", str(device)):
        try:
            return Cuda(device, session, open_layer(str(device)))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    if device.type == "cuda":
        raise UnsupportedError(
            f"{where}, but the session was opened on {session.device}; call torch.cuda.set_device before commsched.init"
        )
    raise UnsupportedError(
        f"{where}, but the session's transport averages on {session.device if session.device != 'cpu' else 'the CPU'} only"
    )


def spec_of(name: str, parameter: torch.Tensor) -> TensorSpec:
    """Return the spec by which the gradient of ``parameter`` is registered. Raises UnsupportedError if its type or layout
    cannot be averaged."""
    if parameter.dtype not in _DTYPES or parameter.layout != torch.strided:
        raise UnsupportedError(
            f"parameter '{name}' is {parameter.dtype}, {parameter.layout}; only dense gradients of "
            f"{', '.join(map(str, _DTYPES))} can be averaged"
        )
    return TensorSpec(name, tuple(parameter.shape), _DTYPES[parameter.dtype])


def register_on(
    session: commsched.Session, device: Device, specs: Sequence[TensorSpec], may_freeze: bool = False
) -> tuple[TensorGroup, list[torch.Tensor]]:
    """Register tensors, in forward order, in new flat buffers on ``device``. See :func:`register_flat`."""
    return register_flat(
        session,
        Manifest(tuple(specs)),
        as_dtype=partial(getattr, torch),
        allocate=device.allocate,
        device=device.layer,
        may_freeze=may_freeze,
    )


def init_for(parameters: Iterable[torch.Tensor]) -> commsched.Session:
    """Return the session of this process. If this call opens it, it is opened for the device of ``parameters``. Raises
    ConfigError if torch.distributed has ranks that commsched does not know of; or see ``commsched.init``."""
    for parameter in parameters:
        if parameter.device.type == "cuda":
            with torch.cuda.device(parameter.device):
                return _not_alone(commsched.init(device=str(parameter.device)))
    return _not_alone(commsched.init())


def _not_alone(session: commsched.Session) -> commsched.Session:
    """Return ``session``, unless it lacks ranks of torch.distributed. Raises ConfigError if torch.distributed has several ranks
    and ``session`` only one, so the ranks would train separately."""
    if session.world_size == 1 and not session.disabled and dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
        if ranks > 1:
            raise ConfigError(
                f"torch.distributed has {ranks} ranks, but commsched sees no launcher, so gradients would not be averaged; "
                "start with commsched run or torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE before"
            )
    return session
