"""CudaDevice: memory, streams and events by cupy. Everything runs with the device as the thread's current one, since CUDA
creates and uses streams and events of the current device only."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from typing import Any, TypeVar
from weakref import finalize

import cupy
import numpy as np

from ....core.device import DeviceEvent
from ....core.errors import UnsupportedError
from ....core.interfaces import Buffer
from ....core.manifest import ITEMSIZE
from ...arithmetic import require_cast, require_equal_sizes, require_quotients

_NOT_READY = 600  # cudaErrorNotReady

#: Pinned memory of so many bytes or more is mapped by itself. cupy's pool would make it a power of two, and keep it.
_OWN_PAGES = 1 << 20

_Method = TypeVar("_Method", bound=Callable[..., Any])


def entered(device: Any) -> Any:
    """Return cupy's ``device``, to be entered. A thread that has not used CUDA has it as its current one from then on. To go
    back to GPU 0, where every thread begins, would open a context there. That takes memory, and fails if GPUs are exclusive."""
    try:
        is_new = not cupy.cuda.driver.ctxGetCurrent()
    except cupy.cuda.driver.CUDADriverError:  # nothing in this process has used CUDA
        is_new = True
    if is_new:
        device.use()
    return device


def _on_device(method: _Method) -> _Method:
    """Run a method of a stream or device with its device as the current one."""

    @wraps(method)
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        with entered(self._device):
            return method(self, *arguments, **options)

    return run  # type: ignore[return-value]


class CudaEvent:
    """See ``DeviceEvent``. A thread that waits for it sleeps."""

    def __init__(self, stream: Any, device: Any) -> None:
        self._device = device  # a thread that only waits for events must open no other one
        self.event = cupy.cuda.Event(block=True, disable_timing=True)
        self.event.record(stream)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():
            return
        # In whichever thread drops it: without the device, CUDA would open another one there.
        with suppress(Exception), entered(self._device):
            address, self.event.ptr = self.event.ptr, 0  # cupy then destroys nothing
            cupy.cuda.runtime.eventDestroy(address)

    @_on_device
    def synchronize(self) -> None:
        self.event.synchronize()

    @_on_device
    def is_done(self) -> bool:
        status: int = cupy.cuda.runtime.eventQuery(self.event.ptr)  # Event.done takes an error for "not yet"
        if status not in (0, _NOT_READY):
            raise cupy.cuda.runtime.CUDARuntimeError(status)
        return status == 0


class CudaStream:
    """See ``DeviceStream``."""

    def __init__(self, number: int, stream: Any) -> None:
        self._number = number
        self._device = cupy.cuda.Device(number)
        self._stream = stream

    @_on_device
    def record(self) -> CudaEvent:
        return CudaEvent(self._stream, self._device)

    @_on_device
    def wait(self, event: DeviceEvent) -> None:
        if not isinstance(event, CudaEvent):
            raise ValueError(f"a {type(event).__name__} is not an event of cuda:{self._number}")
        self._stream.wait_event(event.event)

    @_on_device
    def copy(self, target: Buffer, source: Buffer) -> None:
        require_equal_sizes(target, source)
        if isinstance(target, memoryview):
            self._memory(source).copy_to_host_async(_address(target), len(target), self._stream)
        elif isinstance(source, memoryview):
            self._memory(target).copy_from_host_async(_address(source), len(target), self._stream)
        else:
            self._memory(target).copy_from_device_async(self._memory(source), len(target), self._stream)

    @_on_device
    def add(self, into: Buffer, values: Buffer, dtype: str) -> None:
        require_equal_sizes(into, values, ITEMSIZE[dtype])
        self._memory(into), self._memory(values)
        with self._stream:
            total = _elements(into, dtype)
            if dtype in ("bfloat16", "float32"):
                _kernels()[f"{dtype}_add"](total, _elements(values, dtype), total)
            else:
                cupy.add(total, _elements(values, dtype), out=total)  # of another array in its memory cupy would make a copy

    @_on_device
    def divide(self, values: Buffer, by: int, dtype: str) -> None:
        require_quotients(values, dtype)
        self._memory(values)
        with self._stream:
            numbers = _elements(values, dtype)
            if dtype == "float32":
                _kernels()["float32_divide"](numbers, np.float32(by), numbers)
            else:
                cupy.true_divide(numbers, by, out=numbers)

    @_on_device
    def cast(self, target: Buffer, to: str, source: Buffer, dtype: str) -> None:
        require_cast(target, to, source, dtype)
        self._memory(target), self._memory(source)
        with self._stream:
            if "bfloat16" in (to, dtype):
                _kernels()["bfloat16_widen" if to == "float32" else "bfloat16_narrow"](
                    _elements(source, dtype), _elements(target, to)
                )
            else:
                cupy.copyto(_elements(target, to), _elements(source, dtype), casting="same_kind")

    @_on_device
    def synchronize(self) -> None:
        self._stream.synchronize()

    @property
    def address(self) -> int:
        """The address of CUDA's stream."""
        address: int = self._stream.ptr
        return address

    def address_of(self, buffer: Buffer) -> int:
        """The address of memory of the device. Raises ValueError if it is not flat bytes there."""
        address: int = self._memory(buffer).ptr
        return address

    def _memory(self, buffer: Any) -> Any:
        """The pointer to a buffer. Raises ValueError if it is not flat bytes on this device."""
        if not isinstance(buffer, cupy.ndarray):
            raise ValueError(f"a {type(buffer).__name__} is no memory of cuda:{self._number}")
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
            raise ValueError(f"an array of {buffer.dtype}, shape {buffer.shape}, is not flat bytes")
        if buffer.data.device_id != self._number:
            raise ValueError(f"the memory is on cuda:{buffer.data.device_id}, not on cuda:{self._number}")
        return buffer.data


class CudaDevice:
    """See ``Device``. Its buffers are cupy arrays of uint8. Two of the same :attr:`number` are equal: they are the same GPU."""

    def __init__(self, number: int) -> None:
        self.name = f"cuda:{number}"
        self.number = number
        self._device = cupy.cuda.Device(number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaDevice) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    @_on_device
    def allocate(self, nbytes: int) -> Any:
        memory = cupy.cuda.alloc(nbytes)
        # Memory of cupy's pool may still be in use by earlier work of this thread's stream. So it is cleared there.
        current = cupy.cuda.get_current_stream()
        memory.memset_async(0, nbytes, current)
        current.synchronize()
        return _flat(nbytes, memory)

    @_on_device
    def allocate_host(self, nbytes: int) -> memoryview:
        if nbytes == 0:
            return memoryview(bytearray())
        if nbytes >= _OWN_PAGES:
            pages = -(-nbytes // mmap.PAGESIZE)
            with suppress(UnsupportedError):  # where memory that exists cannot be pinned
                return self.pin(memoryview(mmap.mmap(-1, pages * mmap.PAGESIZE)))[:nbytes]
        memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
        memory.fill(0)
        return memory.data

    @_on_device
    def pin(self, memory: memoryview) -> memoryview:
        pinned, address = np.frombuffer(memory, np.uint8), _address(memory)
        try:
            cupy.cuda.runtime.hostRegister(address, len(memory), 0)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise UnsupportedError(
                f"{len(memory)} bytes of the host's memory cannot be pinned for {self.name}: {error}"
            ) from error
        # Views of ``pinned`` keep it. The finalizer keeps ``memory``, which stays mapped until it is no longer pinned. At the
        # end of the process the driver undoes it.
        finalize(pinned, self._unpin, memory).atexit = False
        return pinned.data

    @_on_device
    def _unpin(self, memory: memoryview) -> None:
        with suppress(cupy.cuda.runtime.CUDARuntimeError):  # the device has failed, or this is a forked process
            cupy.cuda.runtime.hostUnregister(_address(memory))

    @_on_device
    def view(self, array: Any) -> Any:
        kind = type(array).__name__
        try:
            memory, nbytes = _described(array) or _exchanged(array)
        except Exception as error:
            raise UnsupportedError(f"the memory of a {kind} is not to be had on {self.name}: {error}") from error
        if memory.device_id != self.number:
            raise UnsupportedError(f"the memory of a {kind} is on cuda:{memory.device_id}, not on {self.name}")
        return _flat(nbytes, memory)

    @_on_device
    def stream(self, priority: int = 0) -> CudaStream:
        return CudaStream(self.number, cupy.cuda.Stream(non_blocking=True, priority=priority))

    @_on_device
    def current_stream(self, of: Any = None) -> CudaStream:
        """``of`` has ``__cuda_stream__``, or is the address of CUDA's stream."""
        if of is None:
            return CudaStream(self.number, cupy.cuda.get_current_stream())
        return CudaStream(self.number, cupy.cuda.Stream.from_external(_Address(of) if isinstance(of, int) else of))


class _Address:
    """The address of a stream, in CUDA's protocol for streams."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def _described(array: Any) -> tuple[Any, int] | None:
    """The memory of an array that has ``__cuda_array_interface__``, and its size. It works for types that cupy does not know,
    such as bfloat16, and synchronises nothing."""
    described = getattr(array, "__cuda_array_interface__", None)
    if described is None:
        return None
    itemsize, shape = np.dtype(described["typestr"]).itemsize, described["shape"]
    if not _is_one_piece(shape, described.get("strides"), itemsize):
        raise ValueError(f"shape {shape} with strides of {described['strides']} bytes is not in one piece")
    nbytes = itemsize * int(np.prod(shape, dtype=np.int64))
    device = cupy.cuda.runtime.getDevice() if nbytes == 0 else -1  # -1: the device of that address
    owned = cupy.cuda.UnownedMemory(described["data"][0], nbytes, array, device)
    return cupy.cuda.MemoryPointer(owned, 0), nbytes


def _exchanged(array: Any) -> tuple[Any, int]:
    """The memory of an array by DLPack, and its size."""
    values = cupy.from_dlpack(array)
    if not values.flags.c_contiguous:
        raise ValueError(f"shape {values.shape} with strides of {values.strides} bytes is not in one piece")
    return values.data, values.nbytes


def _is_one_piece(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> bool:
    if strides is None or 0 in shape:
        return True
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _flat(nbytes: int, memory: Any) -> Any:
    return cupy.ndarray((nbytes,), np.uint8, memory)


def _elements(buffer: Any, dtype: str) -> Any:
    """A buffer as elements; those of bfloat16, which cupy may not know, as their bits."""
    return buffer.view(np.uint16 if dtype == "bfloat16" else dtype)


def _address(view: memoryview) -> int:
    address: int = np.asarray(view).__array_interface__["data"][0]
    return address


@cache
def _kernels() -> dict[str, Any]:
    """Kernels for float32 and bfloat16. A bfloat16 is the upper half of the float32 of the same value. See
    ``devices.arithmetic``. cupy compiles all kernels so that the smallest numbers of float32 become 0 (``-ftz=true``); these
    instructions keep them, as processors do, and so do bits that are moved."""
    preamble = """
        __device__ float added(float x, float y) {
            float z;
            asm("add.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
            return z;
        }
        __device__ float divided(float x, float y) {
            float z;
            asm("div.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
            return z;
        }
        __device__ float widened(unsigned short x) { return __uint_as_float((unsigned int)x << 16); }
        __device__ unsigned short narrowed(float x) {
            unsigned int bits = __float_as_uint(x);
            if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)((bits >> 16) | 0x40u);
            return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
        }
    """
    sources = {
        "float32_add": ("float32 x, float32 y", "float32 z", "z = added(x, y)"),
        "float32_divide": ("float32 x, float32 y", "float32 z", "z = divided(x, y)"),
        "bfloat16_add": ("uint16 x, uint16 y", "uint16 z", "z = narrowed(added(widened(x), widened(y)))"),
        "bfloat16_widen": ("uint16 x", "float32 y", "y = widened(x)"),
        "bfloat16_narrow": ("float32 x", "uint16 y", "y = narrowed(x)"),
    }
    return {name: cupy.ElementwiseKernel(*source, name, preamble=preamble) for name, source in sources.items()}
