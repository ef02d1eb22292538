"""What differs between gradients in the host's memory and those of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

import commsched

from ...core.errors import CommschedError, ConfigError, TransportError, UnsupportedError
from ...core.event_watcher import EventWatcher

#: More than the kernels of a backward take, which a session that ends in an error may still find queued.
_CLOSE_SECONDS = 5.0


class Device(Protocol):
    """Where the parameters of one exchange, their gradients and the flat buffers lie."""

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Zeros, as a tensor of uint8 and as the buffer to register."""
        ...

    def when_written(self, notify: Callable[[], None]) -> None:
        """Call ``notify`` once what the current stream was given is done. Never waits."""
        ...

    def aside(self) -> AbstractContextManager[object]:
        """Within, copies between host and device neither wait for the training's kernels nor outlast the block."""
        ...

    def read(self) -> None:
        """A parameter is read for the first time."""
        ...

    def updating(self) -> AbstractContextManager[object]:
        """Around an update that others may read as soon as the block has ended."""
        ...

    def settle(self) -> None:
        """Return when nothing more is to be notified."""
        ...

    def close(self) -> None:
        """Give back the thread, if there is one; nothing may be outstanding."""
        ...


class Host:
    """The CPU: what was given to do is done."""

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, memoryview]:
        # Not by torch: share_memory() on a gradient would free what it moves, while averages are written there.
        memory = np.zeros(nbytes, np.uint8)
        return torch.from_numpy(memory), memory.data

    def when_written(self, notify: Callable[[], None]) -> None:
        notify()

    def aside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def read(self) -> None:
        pass

    def updating(self) -> AbstractContextManager[object]:
        return nullcontext()

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


class Cuda:
    """A CUDA device. The host runs ahead of it, so a gradient is reported when its kernel is done and not when it is queued:
    in a queue of collectives, one that waits for the front layer's gradient, which comes last, would block all others.

    An average is there when the device has it, so the host waits for what it reads first; no stream waits for a collective,
    and a broken one cannot block the training's stream.

    Updates run on the stream that reads the parameter first. Where one stream reads all of them, as nearly everywhere, its
    order is all the order there needs to be. Once several are seen, every update waits for the device, before and after.
    """

    def __init__(self, device: torch.device, session: commsched.Session) -> None:
        self._device = device
        self._report = session.report
        self._stream: torch.cuda.Stream | None = None  # that reads the parameters
        self._several_streams = False
        self._aside = torch.cuda.Stream(device, priority=-1)
        self._watcher = EventWatcher("commsched-gradients")
        session.cleanup.callback(self.close)

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        flat = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()  # it is zeroed, whichever stream writes to it next
        return flat, flat

    def when_written(self, notify: Callable[[], None]) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("backward is captured in a CUDA graph: gradients would be averaged once, not in each replay")
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._watcher.call_after(event, notify, self._failed)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, CommschedError):  # the session's own failure is raised at the engine's next call
            cause = f"{type(error).__name__}: {error}"
            self._report(TransportError(f"{self._device} failed while it computed gradients: {cause}"))

    @contextmanager
    def aside(self) -> Iterator[None]:
        with torch.cuda.stream(self._aside):
            yield
            self._aside.synchronize()

    def read(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream = stream
        self._several_streams = self._several_streams or stream != self._stream

    @contextmanager
    def updating(self) -> Iterator[None]:
        self.read()
        if not self._several_streams:
            yield
            return
        torch.cuda.synchronize(self._device)
        yield
        torch.cuda.current_stream(self._device).synchronize()

    def settle(self) -> None:
        self._watcher.settle()

    def close(self) -> None:
        self._watcher.close(_CLOSE_SECONDS)


def device_of(parameters: Sequence[tuple[str, torch.Tensor]]) -> torch.device:
    """The device of all named ``parameters``.

    Raises:
        UnsupportedError: they are on several; names the first two.
    """
    first_name, first = parameters[0]
    for name, parameter in parameters:
        if parameter.device != first.device:
            raise UnsupportedError(
                f"parameter '{first_name}' is on {first.device} but '{name}' on {parameter.device}; one process averages "
                "gradients of one device"
            )
    return first.device


def open_device(session: commsched.Session, parameters: Sequence[tuple[str, torch.Tensor]]) -> Device:
    """
    Raises:
        UnsupportedError: the session's transport does not average what lies on the parameters' device.
    """
    device = device_of(parameters)
    if str(device) == session.device == "cpu":
        return Host()
    where = f"parameter '{parameters[0][0]}' is on {device}"
    if device.type == "cuda" and session.device == "cpu":
        raise UnsupportedError(
            f"{where}, but the session's transport averages in the host's memory; set transport=nccl, or let "
            "this plugin open the session"
        )
    if device.type == "cuda" and str(device) != session.device:
        raise UnsupportedError(
            f"{where}, but the session was opened on {session.device}; call torch.cuda.set_device before commsched.init"
        )
    if str(device) != session.device:
        raise UnsupportedError(
            f"{where}, but the session's transport averages on {session.device if session.device != 'cpu' else 'the CPU'} only"
        )
    return Cuda(device, session)


def init_for(parameters: Iterable[torch.Tensor]) -> commsched.Session:
    """The session of this process; if this call opens it, for the device that ``parameters`` are on.

    Raises:
        ConfigError: torch.distributed has ranks that commsched does not know of; or see ``commsched.init``.
    """
    for parameter in parameters:
        if parameter.device.type == "cuda":
            with torch.cuda.device(parameter.device):
                return _not_alone(commsched.init(device=str(parameter.device)))
    return _not_alone(commsched.init())


def _not_alone(session: commsched.Session) -> commsched.Session:
    """
    Raises:
        ConfigError: torch.distributed knows of other ranks, and ``session`` does not: they would train apart.
    """
    if session.world_size == 1 and not session.disabled and dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
        if ranks > 1:
            raise ConfigError(
                f"torch.distributed has {ranks} ranks, but commsched sees no launcher, so gradients would not be averaged; "
                "start with commsched run or torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE before"
            )
    return session
