"""Arrays of numpy's interface in the memory of a simulated device, as cupy's are in that of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from commsched.testing import SimulatedBuffer, SimulatedDevice


class SimulatedArray(NDArrayOperatorsMixin):
    """An array on a device. Every operation queues a kernel on the thread's current stream, and returns before it is done."""

    def __init__(self, memory: SimulatedBuffer, dtype: Any, shape: tuple[int, ...], layout: Callable[..., Any] | None = None):
        self.__simulated_memory__ = memory
        self.device = memory.device
        self.dtype, self.shape = np.dtype(dtype), shape
        self._layout = layout or (lambda flat: flat.view(self.dtype).reshape(self.shape))

    @property
    def flags(self) -> Any:
        return np.empty(0).flags

    @property
    def nbytes(self) -> int:
        return len(self.__simulated_memory__)

    @property
    def T(self) -> SimulatedArray:
        layout = self._layout
        return SimulatedArray(self.__simulated_memory__, self.dtype, self.shape[::-1], lambda flat: layout(flat).T)

    def view(self, dtype: Any) -> SimulatedArray:
        return SimulatedArray(self.__simulated_memory__, dtype, (self.nbytes // np.dtype(dtype).itemsize,))

    def reshape(self, *shape: Any) -> SimulatedArray:
        shape = np.empty(self.shape, bool).reshape(*shape).shape
        return SimulatedArray(self.__simulated_memory__, self.dtype, shape)

    def __getitem__(self, at: slice) -> SimulatedArray:
        start, stop, _ = at.indices(self.shape[0])
        size = self.dtype.itemsize
        return SimulatedArray(self.__simulated_memory__[start * size : stop * size], self.dtype, (stop - start,))

    def __setitem__(self, at: object, values: SimulatedArray) -> None:
        assert at is ...
        self._launch(lambda source, target: np.copyto(target, source), [values], self)

    def __len__(self) -> int:
        return self.shape[0]

    def fill(self, value: Any) -> None:
        self._launch(lambda array: array.fill(value), [], self)

    def copy(self) -> SimulatedArray:
        copied = _empty(self.device, self.dtype, self.shape)
        self._launch(lambda source, target: np.copyto(target, source), [self], copied)
        return copied

    def get(self) -> NDArray[Any]:
        """The values, in the host's memory. Waits for the current stream, as cupy's ``get`` does."""
        memory = self.device.allocate_host(self.nbytes)
        stream = self.device.current_stream()
        stream.copy(memory, self.__simulated_memory__)
        stream.synchronize()
        return self._layout(np.frombuffer(memory, np.uint8)).copy()

    def _launch(self, kernel: Callable[..., Any], operands: list[Any], target: SimulatedArray) -> None:
        on_device = [operand for operand in operands if isinstance(operand, SimulatedArray)]

        def run(*memories: NDArray[np.uint8]) -> None:
            arrays: Iterator[Any] = iter([array._layout(memory) for array, memory in zip([*on_device, target], memories)])
            values = [next(arrays) if isinstance(operand, SimulatedArray) else operand for operand in operands]
            with np.errstate(all="ignore"):  # a kernel that reads too early finds NaN
                kernel(*values, next(arrays))

        reads = [array.__simulated_memory__ for array in on_device]
        self.device.current_stream().launch(run, reads, [target.__simulated_memory__])

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        assert method == "__call__", method
        return self._call(lambda *values: ufunc(*values[:-1], out=values[-1], **options), inputs, out and out[0], ufunc)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        if function is np.zeros_like:
            zeros = _empty(self.device, options.get("dtype", self.dtype), options.get("shape", self.shape))
            zeros.fill(0)
            self.device.current_stream().synchronize()  # another stream may use it next
            return zeros
        assert function in (np.sum, np.exp), function
        out = options.pop("out", None)
        probe = function(*(np.zeros(array.shape, array.dtype) for array in arguments), **options)
        return self._call(lambda *values: np.copyto(values[-1], function(*values[:-1], **options)), arguments, out, probe)

    def _call(self, kernel: Callable[..., Any], inputs: Any, out: SimulatedArray | None, like: Any) -> SimulatedArray:
        if out is None:
            if isinstance(like, np.ufunc):
                like = like(*(np.zeros(x.shape, x.dtype) if isinstance(x, SimulatedArray) else x for x in inputs))
            out = _empty(self.device, like.dtype, like.shape)
        self._launch(kernel, list(inputs), out)
        return out


def _empty(device: SimulatedDevice, dtype: Any, shape: Any) -> SimulatedArray:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = np.dtype(dtype)
    return SimulatedArray(device.allocate(dtype.itemsize * int(np.prod(shape))), dtype, shape)


def to_device(device: SimulatedDevice, values: NDArray[Any]) -> SimulatedArray:
    """Copy ``values`` to the device."""
    array = _empty(device, values.dtype, values.shape)
    memory = device.allocate_host(values.nbytes)
    memory[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    stream = device.current_stream()
    stream.copy(array.__simulated_memory__, memory)
    stream.synchronize()
    return array


@contextmanager
def own_stream(device: SimulatedDevice) -> Iterator[None]:
    """A stream of this thread's own."""
    with device.using(device.stream()):
        yield
