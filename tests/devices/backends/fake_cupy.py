"""The part of cupy that ``commsched.devices.backends.cuda`` uses, over a simulated device: the names, arguments and meanings of
cupy 14, as its source has them. The kernels for bfloat16 are functions of numpy here."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest

from commsched.core.errors import UnsupportedError
from commsched.devices.arithmetic import HALVES
from commsched.testing import SimulatedBuffer, SimulatedDevice

from . import fake_nccl

NOT_READY, ILLEGAL_ADDRESS = 600, 700


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


@contextmanager
def in_place_of_cupy(device: SimulatedDevice, count: int = 1) -> Iterator[Any]:
    """Within the block, who imports cupy gets the stand-in."""
    fake: Any = install(device, count)
    user = "commsched.devices.backends.cuda.device"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", fake)
        patch.setitem(sys.modules, "cupy.cuda", fake.cuda)
        patch.delitem(sys.modules, user, raising=False)
        yield fake
    sys.modules.pop(user, None)


def install(device: SimulatedDevice, count: int = 1) -> ModuleType:
    """Return a module ``cupy`` whose GPU is ``device``. All ``count`` GPUs share its memory, but are checked to be different.
    ``cupy.cuda.nccl`` is :func:`fake_nccl.make`."""
    thread = threading.local()
    allocated: dict[int, ref[Any]] = {}  # by address
    events: dict[int, Any] = {}

    def translated(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (ValueError, TypeError):
            raise
        except Exception as error:
            raise CUDARuntimeError(ILLEGAL_ADDRESS) from error

    def require_current(number: int) -> None:
        if getattr(thread, "devices", [0])[-1] != number:
            raise CUDARuntimeError(400)  # cudaErrorInvalidResourceHandle

    class Device:
        def __init__(self, device: int | None = None) -> None:
            self.id = getDevice() if device is None else device
            self.pci_bus_id = f"0000:0{self.id}:00.0"

        def __enter__(self) -> Device:
            thread.devices = [*getattr(thread, "devices", [0]), self.id]
            open_context()
            return self

        def __exit__(self, *exception: object) -> None:
            thread.devices = thread.devices[:-1]
            open_context()

        def use(self) -> None:
            thread.devices = [self.id]
            open_context()

    contexts: set[int] = set()  # the devices that any thread has set

    def open_context() -> None:
        thread.has_context = True
        contexts.add(getDevice())

    def getDevice() -> int:
        return int(getattr(thread, "devices", [0])[-1])

    class Stream:
        def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None) -> None:
            assert non_blocking, "a stream that waits for the null stream"
            self.device_id = getDevice()
            self.of = device.stream(priority or 0)
            self.ptr = id(self.of)

        @classmethod
        def from_external(cls, obj: Any) -> Stream:
            version, address = obj.__cuda_stream__()
            assert version == 0
            assert isinstance(address, int)
            return cls._around(stream_at(address), obj)

        @classmethod
        def _around(cls, of: Any, owner: Any = None) -> Stream:
            stream = cls.__new__(cls)
            stream.of, stream.ptr, stream.device_id, stream.owner = of, id(of), -1, owner
            return stream

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.ptr

        def __enter__(self) -> Stream:
            if self.device_id != -1:
                require_current(self.device_id)
            thread.streams = [*getattr(thread, "streams", []), self]
            return self

        def __exit__(self, *exception: object) -> None:
            thread.streams.pop()

        def wait_event(self, event: Event) -> None:
            translated(lambda: self.of.wait(event.of))

        def synchronize(self) -> None:
            translated(self.of.synchronize)

    class Event:
        def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
            assert block, "a thread that waits for it spins"
            assert disable_timing
            self.device_id = getDevice()
            self.ptr = id(self)
            events[self.ptr] = ref(self)

        def __del__(self) -> None:
            if self.ptr:
                eventDestroy(self.ptr)

        def record(self, stream: Stream) -> None:
            require_current(self.device_id)
            self.of = translated(stream.of.record)

        def synchronize(self) -> None:
            open_context()
            translated(self.of.synchronize)

    def eventQuery(ptr: int) -> int:
        open_context()  # of the thread's current device
        try:
            return 0 if events[ptr]().of.is_done() else NOT_READY
        except Exception:
            return ILLEGAL_ADDRESS

    def eventDestroy(ptr: int) -> None:
        open_context()  # of the thread's current device
        events.pop(ptr)

    def get_current_stream(device_id: int = -1) -> Stream:
        inner = getattr(thread, "streams", [])
        return inner[-1] if inner else Stream._around(device.current_stream())

    class MemoryPointer:
        def __init__(self, mem: Any, offset: int) -> None:
            self.mem = mem
            self.buffer = mem.buffer[offset:]
            self.device_id = mem.device_id
            self.ptr = int(self.buffer._memory.__array_interface__["data"][0])

        def memset_async(self, value: int, size: int, stream: Stream) -> None:
            translated(lambda: stream.of.launch(lambda out: out.fill(value), writes=[self.buffer[:size]]))

        def copy_to_host_async(self, mem: int, size: int, stream: Stream) -> None:
            if size > 0:
                translated(lambda: stream.of.copy(at(mem, size), self.buffer[:size]))

        def copy_from_host_async(self, mem: int, size: int, stream: Stream) -> None:
            if size > 0:
                translated(lambda: stream.of.copy(self.buffer[:size], at(mem, size)))

        def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Stream) -> None:
            translated(lambda: stream.of.copy(self.buffer[:size], src.buffer[:size]))

    def at(address: int, size: int) -> memoryview:
        assert isinstance(address, int)
        return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")

    def alloc(size: int) -> MemoryPointer:
        buffer = device.allocate(size)
        buffer._memory.fill(0xEE)  # cupy's memory is not cleared
        note(buffer)
        return MemoryPointer(SimpleNamespace(buffer=buffer, device_id=getDevice()), 0)

    def alloc_pinned_memory(size: int) -> Any:
        """A little more than was asked for, and not cleared."""
        memory = device.allocate_host(size + 512)
        np.asarray(memory).fill(0xEE)
        return memory

    pinned: dict[int, memoryview] = {}  # by address: views that keep the memory pinned

    def hostRegister(ptr: int, size: int, flags: int) -> None:
        assert flags == 0
        try:
            pinned[ptr] = device.pin(at(ptr, size))
        except UnsupportedError as error:
            raise CUDARuntimeError(712) from error  # cudaErrorHostMemoryAlreadyRegistered

    def hostUnregister(ptr: int) -> None:
        if pinned.pop(ptr, None) is None:
            raise CUDARuntimeError(713)  # cudaErrorHostMemoryNotRegistered

    class UnownedMemory:
        def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
            self.buffer = device.view(owner)[:size] if size else device.allocate(0)
            self.device_id = owner.device_id if device_id == -1 else device_id
            note(self.buffer)

    class ndarray:
        def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None) -> None:
            self.shape, self.dtype, self.data, self.strides = shape, np.dtype(dtype), memptr, strides
            self.ndim = len(shape)
            self.nbytes = self.dtype.itemsize * int(np.prod(shape))
            self.flags = SimpleNamespace(c_contiguous=strides is None)

        def __len__(self) -> int:
            return int(self.shape[0])

        def __getitem__(self, span: slice) -> ndarray:
            start, stop, step = span.indices(len(self))
            assert step == 1
            memory = MemoryPointer(self.data, start * self.dtype.itemsize)
            return ndarray((max(0, stop - start),), self.dtype, memory)

        def view(self, dtype: Any) -> ndarray:
            return ndarray((self.nbytes // np.dtype(dtype).itemsize,), dtype, self.data)

        @property
        def bytes(self) -> Any:
            return self.data.buffer[: self.nbytes]

    def note(buffer: SimulatedBuffer) -> None:
        memory = buffer._memory
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        allocated[memory.__array_interface__["data"][0]] = ref(memory)

    def memory_at(address: int, size: int) -> SimulatedBuffer:
        """The memory of the device that begins at ``address``, as a pointer in C would have it."""
        for begin, known in list(allocated.items()):
            if (memory := known()) is None:
                allocated.pop(begin, None)
            elif begin <= address and address + size <= begin + memory.size:
                return SimulatedBuffer(device, memory[address - begin : address - begin + size])
        raise AssertionError(f"{size} bytes at {address:#x} are not memory of the device")

    def stream_at(address: int) -> Any:
        return next(each for each in device._streams if id(each) == address)

    def kernel(run: Callable[..., None], reads: list[ndarray], write: ndarray, flushes: bool = True) -> None:
        """``flushes``: the smallest numbers of float32 become 0, as in all that cupy compiles, but for assembly."""
        stream = get_current_stream()

        def flushed(values: Any) -> Any:
            small = flushes and values.dtype == np.float32 and np.abs(values) < np.finfo(np.float32).tiny
            return np.where(small, np.copysign(np.float32(0), values), values) if np.any(small) else values

        def work(*arrays: Any) -> None:
            *inputs, output = (each.view(array.dtype) for each, array in zip(arrays, [*reads, write]))
            with np.errstate(all="ignore"):
                run(*map(flushed, inputs), output)
                if output.dtype == np.float32:
                    output[...] = flushed(output)

        translated(lambda: stream.of.launch(work, [array.bytes for array in reads], [write.bytes]))

    def add(x: ndarray, y: ndarray, *, out: ndarray) -> None:
        assert x is out, "cupy would make a copy"
        kernel(lambda a, b, c: np.add(a, b, out=c), [x, y], out)

    def true_divide(x: ndarray, by: int, *, out: ndarray) -> None:
        assert x is out, "cupy would make a copy"
        assert isinstance(by, int)  # a weak scalar: the type of the quotient is that of x
        kernel(lambda a, b: np.divide(a, by, out=b), [x], out)

    def copyto(dst: ndarray, src: ndarray, casting: str = "same_kind") -> None:
        halves = {src.dtype.name, dst.dtype.name} == {"float16", "float32"}  # all of float16 are normal numbers in float32
        kernel(lambda a, b: np.copyto(b, a, casting=casting), [src], dst, not halves)  # type: ignore[arg-type]

    def ElementwiseKernel(in_params: str, out_params: str, operation: str, name: str, **options: Any) -> Callable[..., None]:
        assert options.keys() == {"preamble"}
        half = HALVES["bfloat16"]

        def added(a: Any, b: Any, c: Any) -> None:
            one, other = np.empty((2, a.size), np.float32)
            half.widen(a, one)
            half.widen(b, other)
            half.narrow(one + other, c)

        run: Callable[..., None] = {
            "float32_add": lambda a, b, c: np.add(a, b, out=c),
            "float32_divide": lambda a, by, c: np.divide(a, by, out=c),
            "bfloat16_add": added,
            "bfloat16_widen": half.widen,
            "bfloat16_narrow": half.narrow,
        }[name]
        types = [part.split()[0] for part in f"{in_params}, {out_params}".split(", ")]

        def call(*arguments: Any) -> None:
            assert [argument.dtype.name for argument in arguments] == types
            *inputs, output = arguments
            arrays = [each for each in inputs if isinstance(each, ndarray)]
            scalars = [each for each in inputs if not isinstance(each, ndarray)]  # they come last
            kernel(lambda *given: run(*given[:-1], *scalars, given[-1]), arrays, output, flushes=False)

        return call

    def from_dlpack(array: Any) -> ndarray:
        if not hasattr(array, "__dlpack__"):
            raise AttributeError(f"{type(array).__name__!r} object has no attribute '__dlpack__'")
        result: ndarray = array.__dlpack__()
        return result

    cupy: Any = ModuleType("cupy")
    cupy.__version__ = "14.2.0"
    runtime = SimpleNamespace(
        getDeviceCount=lambda: count,
        getDevice=getDevice,
        getDeviceProperties=lambda number: {"uuid": b"a GPU", "name": b"a model"},
        eventDestroy=eventDestroy,
        eventQuery=eventQuery,
        hostRegister=hostRegister,
        hostUnregister=hostUnregister,
        CUDARuntimeError=CUDARuntimeError,
    )
    cupy.contexts = contexts
    driver = SimpleNamespace(ctxGetCurrent=lambda: int(getattr(thread, "has_context", False)), CUDADriverError=CUDARuntimeError)
    cupy.cuda = ModuleType("cupy.cuda")
    vars(cupy.cuda).update(
        runtime=runtime,
        driver=driver,
        Device=Device,
        Stream=Stream,
        Event=Event,
        MemoryPointer=MemoryPointer,
        UnownedMemory=UnownedMemory,
        alloc=alloc,
        alloc_pinned_memory=alloc_pinned_memory,
        get_current_stream=get_current_stream,
        nccl=fake_nccl.make(device, memory_at, stream_at, getDevice),
    )
    for each in (ndarray, add, true_divide, copyto, ElementwiseKernel, from_dlpack):
        setattr(cupy, each.__name__, each)
    return cupy
