"""The host's own memory as a device. Work is done when the call that queues it returns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.device import DeviceEvent
from ...core.errors import ConfigError, UnsupportedError
from ...core.interfaces import Buffer
from ..arithmetic import add_elements, cast_elements, divide_elements, require_equal_sizes


class _Now:
    """The event behind work that is done."""

    def synchronize(self) -> None:
        pass

    def is_done(self) -> bool:
        return True


class HostStream:
    """See ``DeviceStream``. The host waits for events of other devices itself."""

    def record(self) -> DeviceEvent:
        return _Now()

    def wait(self, event: DeviceEvent) -> None:
        event.synchronize()

    def copy(self, target: Buffer, source: Buffer) -> None:
        require_equal_sizes(target, source)
        _array(target)[:] = _array(source)

    def add(self, into: Buffer, values: Buffer, dtype: str) -> None:
        add_elements(_array(into), _array(values), dtype)

    def divide(self, values: Buffer, by: int, dtype: str) -> None:
        divide_elements(_array(values), by, dtype)

    def cast(self, target: Buffer, to: str, source: Buffer, dtype: str) -> None:
        cast_elements(_array(target), to, _array(source), dtype)

    def synchronize(self) -> None:
        pass


class HostDevice:
    """See ``Device``. Its buffers are memoryviews of format ``B``."""

    name = "host"

    def allocate(self, nbytes: int) -> memoryview:
        return np.zeros(nbytes, np.uint8).data

    def allocate_host(self, nbytes: int) -> memoryview:
        return self.allocate(nbytes)

    def pin(self, memory: memoryview) -> memoryview:
        return memory

    def view(self, array: Any) -> memoryview:
        try:
            values = array if isinstance(array, np.ndarray) else np.from_dlpack(array)
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedError(f"the memory of a {type(array).__name__} is not to be had in the host: {error}") from error
        if not values.flags.c_contiguous:
            raise UnsupportedError(f"the memory of a {type(array).__name__} of shape {values.shape} is not in one piece")
        flat: NDArray[np.uint8] = values.reshape(-1).view(np.uint8)
        return flat.data

    def stream(self, priority: int = 0) -> HostStream:
        return HostStream()

    def current_stream(self, of: Any = None) -> HostStream:
        return HostStream()


def model_of(number: int) -> str:
    """Empty: what computes in the host's memory is its processor."""
    return ""


def open_device(number: int) -> HostDevice:
    """Return the host. Raises ConfigError if ``number`` is not 0."""
    if number:
        raise ConfigError(f"there is no device 'host:{number}'; the host's memory is one device, 'host'")
    return HostDevice()


def _array(buffer: Buffer) -> NDArray[np.uint8]:
    if not isinstance(buffer, memoryview):
        raise ValueError(f"a {type(buffer).__name__} is not memory of the host; give a memoryview")
    return np.asarray(buffer)
