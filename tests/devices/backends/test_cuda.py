"""The device on CUDA: over a stand-in for cupy here, and on GPUs where there are some."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commsched.core.errors import ConfigError, UnsupportedError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.devices import model_of, open_device
from commsched.devices.backends import cuda
from commsched.session.local import local_sessions
from commsched.testing import SimulatedDevice, check_device

from .fake_cupy import CUDARuntimeError, in_place_of_cupy

MODULE = "commsched.devices.backends.cuda.device"


@pytest.fixture
def gpu() -> SimulatedDevice:
    return SimulatedDevice(3)


@pytest.fixture
def cupy(gpu: SimulatedDevice) -> Iterator[Any]:
    """The stand-in, with two GPUs, under the name of cupy."""
    with in_place_of_cupy(gpu, count=2) as fake:
        yield fake


def gpus() -> int:
    if find_spec("cupy") is None:
        return 0
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@pytest.mark.gpu
@pytest.mark.skipif(gpus() == 0, reason="needs a CUDA device and cupy")
def test_gpus_are_what_the_check_asks_for() -> None:
    import cupy

    for number in range(gpus()):

        def make_array(nbytes: int, number: int = number) -> Any:
            with cupy.cuda.Device(number):
                return cupy.zeros(nbytes // 4, cupy.float32)

        check_device(open_device(f"cuda:{number}"), make_array=make_array)


@pytest.mark.gpu
@pytest.mark.skipif(gpus() == 0, reason="needs a CUDA device and cupy")
def test_tensors_of_torch_are_viewed() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a PyTorch with CUDA")
    device = open_device("cuda:0")
    host = device.allocate_host(16)
    np.asarray(host)[:] = range(16)
    with torch.cuda.device(0):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.zeros(16 // dtype.itemsize, dtype=dtype, device="cuda:0")
            torch.cuda.current_stream().synchronize()
            stream = device.current_stream(torch.cuda.current_stream().cuda_stream)
            stream.copy(device.view(tensor), host)
            assert tensor.view(torch.uint8).tolist() == list(range(16))
        with pytest.raises(UnsupportedError, match=r"not in one piece"):
            device.view(torch.zeros(4, 4, device="cuda:0").t())
    with pytest.raises(UnsupportedError, match=r"^the memory of a Tensor is not to be had on cuda:0: "):
        device.view(torch.zeros(4))


def test_the_stand_in_passes_the_check(gpu: SimulatedDevice, cupy: Any) -> None:
    """So streams, events, sizes, offsets and dtypes reach cupy as they should."""
    check_device(
        open_device("cuda:1"), make_array=cupy_array(gpu, 1, dlpack=False), break_device=gpu.fail, rounds=5, busy_bytes=64
    )


def cupy_array(gpu: SimulatedDevice, number: int, *, dlpack: bool, strides: Any = None) -> Any:
    def make(nbytes: int) -> Any:
        memory = gpu.allocate(nbytes)
        described = {"typestr": "<V2", "shape": (2, nbytes // 4), "strides": strides, "data": (4711, False), "version": 3}
        if not dlpack:
            return SimpleNamespace(__cuda_array_interface__=described, __simulated_memory__=memory, device_id=number)
        fake = sys.modules["cupy"]
        pointer = fake.cuda.MemoryPointer(SimpleNamespace(buffer=memory, device_id=number), 0)
        array = fake.ndarray((nbytes // 4,), np.float32, pointer, strides)
        array.__dlpack__ = lambda: array
        return array

    return make


@pytest.mark.parametrize("dlpack", [False, True])
def test_arrays_are_viewed_by_both_protocols(gpu: SimulatedDevice, cupy: Any, dlpack: bool) -> None:
    device = open_device("cuda:0")
    array = cupy_array(gpu, 0, dlpack=dlpack)(64)
    assert len(device.view(array)) == 64
    said = r"^the memory of a \w+ is on cuda:1, not on cuda:0$"
    with pytest.raises(UnsupportedError, match=said):
        device.view(cupy_array(gpu, 1, dlpack=dlpack)(64))
    with pytest.raises(UnsupportedError, match=r"^the memory of a \w+ is not to be had on cuda:0: .* is not in one piece$"):
        device.view(cupy_array(gpu, 0, dlpack=dlpack, strides=(2, 4))(64))


def test_whole_arrays_may_have_strides(gpu: SimulatedDevice, cupy: Any) -> None:
    device = open_device("cuda:0")
    assert len(device.view(cupy_array(gpu, 0, dlpack=False, strides=(32, 2))(64))) == 64
    assert len(device.view(cupy_array(gpu, 0, dlpack=False, strides=(7, 5))(0))) == 0


def test_a_stream_of_an_engine_is_used_by_its_protocol_or_its_address(gpu: SimulatedDevice, cupy: Any) -> None:
    device, engines = open_device("cuda:0"), gpu.stream()
    host, memory = device.allocate_host(4), device.allocate(4)
    for of in (id(engines), SimpleNamespace(__cuda_stream__=lambda: (0, id(engines)))):
        stream = device.current_stream(of)
        stream.copy(host, memory)
        assert [len(each.queue) for each in gpu._streams if each.queue] == [1]
        assert engines.queue
        stream.record().synchronize()


def test_memory_that_cuda_does_not_pin_is_named_with_the_reason(cupy: Any) -> None:
    device, memory = open_device("cuda:1"), memoryview(bytearray(8))
    pinned = device.pin(memory)
    said = r"^8 bytes of the host's memory cannot be pinned for cuda:1: error 712$"
    with pytest.raises(UnsupportedError, match=said):
        device.pin(memory)
    del pinned
    device.pin(memory)


def test_memory_of_a_device_that_has_failed_is_freed_in_silence(cupy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pinned = open_device("cuda:0").pin(memoryview(bytearray(8)))
    cupy.cuda.runtime.hostUnregister = lambda ptr: translated_failure()
    del pinned
    assert capsys.readouterr().err == ""


def translated_failure() -> None:
    raise CUDARuntimeError(700)


def test_a_poll_learns_of_a_failure(gpu: SimulatedDevice, cupy: Any) -> None:
    event = open_device("cuda:0").stream().record()
    gpu.fail()
    with pytest.raises(CUDARuntimeError, match=r"^error 700$"):
        event.is_done()


def test_a_gpu_that_is_opened_again_is_staged_by_the_same_threads(gpu: SimulatedDevice, cupy: Any) -> None:
    [session] = local_sessions(1)

    def threads() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return sorted(name for name in names if name.startswith(("commsched-copies", "commsched-gradients")))

    def register(name: str) -> None:
        device = open_device(name)
        session.register(Manifest((TensorSpec("w", (4,), "uint8"),)), {"uint8": device.allocate(4)}, device)

    with session:
        register("cuda:0")
        before = threads()
        register("cuda:0")
        assert threads() == before
        register("cuda:1")
        assert len(threads()) == 2 * len(before)


def test_memory_and_events_of_others_are_refused(gpu: SimulatedDevice, cupy: Any) -> None:
    device, other = open_device("cuda:0"), open_device("cuda:1")
    stream = device.stream()
    with pytest.raises(ValueError, match=r"^the memory is on cuda:1, not on cuda:0$"):
        stream.copy(device.allocate(4), other.allocate(4))
    with pytest.raises(ValueError, match=r"^a SimulatedEvent is not an event of cuda:0$"):
        stream.wait(gpu.stream().record())
    with pytest.raises(ValueError, match=r"^an array of float32, shape \(1,\), is not flat bytes$"):
        stream.copy(device.allocate(1), device.allocate(4).view(np.float32))


INSTALL = r'pip install "commsched\[cuda\]" for CUDA 12, or "commsched\[cuda13\]" for CUDA 13$'


def test_a_thread_that_has_not_used_cuda_opens_no_other_gpu(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with GPU 0 as its current one, and would go back to it."""
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 2)
    device = open_device("cuda:1")

    def use() -> None:
        stream = device.stream()
        stream.copy(device.allocate(8), device.allocate(8))
        stream.record().synchronize()

    event = device.stream().record()
    cupy.contexts.clear()
    for first in (use, event.synchronize, event.is_done):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(first).result(60)
            thread.submit(use).result(60)
    assert cupy.contexts == {1}


def test_an_event_that_a_thread_drops_opens_no_other_gpu(cupy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The garbage collector drops it in whichever thread."""
    held = [open_device("cuda:1").stream().record() for _ in range(2)]
    cupy.contexts.clear()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(held.pop).result(60)
    assert cupy.contexts == {1}
    cupy.cuda.runtime.eventDestroy = lambda ptr: translated_failure()  # the device has failed
    del held[:]
    assert capsys.readouterr().err == ""


def test_large_pinned_memory_takes_its_own_size(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """cupy's pool would make it a power of two."""
    monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", lambda size: pytest.fail(f"{size} bytes of the pool"))
    memory = open_device("cuda:0").allocate_host(5_000_001)
    assert (len(memory), memory.format, memory.readonly, any(memory)) == (5_000_001, "B", False, False)


def test_the_model_of_a_device(cupy: Any) -> None:
    assert model_of("cuda:0") == model_of("cuda") == repr(b"a model")
    assert [model_of(name) for name in ("cpu", "host", "cuda:7", "xpu:0")] == ["", "", "", ""]


def test_a_missing_cupy_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"^the device 'cuda:0' needs cupy: {INSTALL}"):
        open_device("cuda")


def test_a_cupy_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=rf"^the device 'cuda:0' needs cupy, which does not load \(.*\): {INSTALL}"):
        open_device("cuda:0")


def test_an_old_cupy_is_named(cupy: Any) -> None:
    cupy.__version__ = "13.6.0"
    with pytest.raises(ConfigError, match=rf"^the device 'cuda:0' needs cupy 14 or newer, and this is 13.6.0: {INSTALL}"):
        open_device("cuda:0")


@pytest.mark.parametrize(
    ("name", "count", "said"),
    [
        ("cuda:2", 2, r"^there is no device 'cuda:2': this process sees 2 GPUs, cuda:0 to cuda:1$"),
        ("cuda:7", 1, r"^there is no device 'cuda:7': this process sees one GPU, cuda:0$"),
        ("cuda", 0, r"^there is no device 'cuda:0': this process sees no GPU$"),
    ],
)
def test_a_gpu_that_is_not_there_is_named(cupy: Any, name: str, count: int, said: str) -> None:
    cupy.cuda.runtime.getDeviceCount = lambda: count
    with pytest.raises(ConfigError, match=said):
        open_device(name)


def test_a_machine_without_a_gpu_is_one_line(cupy: ModuleType) -> None:
    def count() -> int:
        raise CUDARuntimeError(35)

    cupy.cuda.runtime.getDeviceCount = count
    with pytest.raises(ConfigError, match=r"^there is no device 'cuda:0': this process sees no GPU \(error 35\)$"):
        open_device("cuda:0")
