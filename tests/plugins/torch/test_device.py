"""What the plugin does for CUDA devices, with the device's part faked: what runs on a real one is in test_cuda.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commsched import Session
from commsched.core.device_events import EventWatcher
from commsched.core.errors import ClosedError, ConfigError, UnsupportedError
from commsched.plugins.torch import ScheduledOptimizer
from commsched.plugins.torch import device as device_module
from commsched.plugins.torch import layout as places
from commsched.plugins.torch.device import Cuda, Device, StagedCuda, device_of, init_for, open_device
from commsched.session.local import local_sessions
from commsched.testing import SimulatedDevice, SimulatedStream
from commsched.testing.world import run_world

from .test_equality import OPTIMIZERS
from .training import MLP, require_equal, train_alone, train_scheduled


def on(name: str) -> Any:
    return SimpleNamespace(device=torch.device(name))


def session_on(device: str) -> Any:
    return SimpleNamespace(device=device, report=[].append, cleanup=ExitStack())


def test_parameters_on_the_cpu_cost_nothing() -> None:
    assert type(open_device(session_on("cpu"), [("w", on("cpu"))])) is Device


@pytest.mark.parametrize(
    ("devices", "session", "message"),
    [
        (
            ["cuda:0", "cuda:1"],
            "cuda:0",
            "parameter 'p0' is on cuda:0 but 'p1' on cuda:1; one process averages gradients of one device",
        ),
        (["cpu", "cuda:0"], "cpu", "parameter 'p0' is on cpu but 'p1' on cuda:0; one process averages gradients of one device"),
        (
            ["cuda:1"],
            "cuda:0",
            "parameter 'p0' is on cuda:1, but the session was opened on cuda:0; call torch.cuda.set_device before "
            "commsched.init",
        ),
        (["cpu"], "cuda:0", "parameter 'p0' is on cpu, but the session's transport averages on cuda:0 only"),
        (["meta"], "cpu", "parameter 'p0' is on meta, but the session's transport averages on the CPU only"),
    ],
)
def test_devices_that_do_not_fit_are_named(devices: list[str], session: str, message: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        open_device(session_on(session), [(f"p{i}", on(name)) for i, name in enumerate(devices)])
    assert str(raised.value) == message


def test_what_staging_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> Any:
        raise ConfigError(f"the device '{name}' needs cupy")

    monkeypatch.setattr(device_module, "open_layer", lacking)
    with pytest.raises(ConfigError) as raised:
        open_device(session_on("cpu"), [("w", on("cuda:0"))])
    where = "parameter 'w' is on cuda:0, and the session's transport averages in the host's memory"
    assert str(raised.value) == f"{where}: the device 'cuda:0' needs cupy; or set transport=nccl"


def test_the_device_of_all() -> None:
    assert device_of([("a", on("cuda:1")), ("b", on("cuda:1"))]) == torch.device("cuda:1")


def test_the_session_is_opened_on_the_device_of_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    current: list[Any] = []

    @contextmanager
    def set_device(device: Any) -> Any:
        current.append(str(device))
        yield
        current.pop()

    def init(**settings: Any) -> Any:
        opened.append((settings, list(current)))
        return SimpleNamespace(world_size=2)

    monkeypatch.setattr(device_module.commsched, "init", init)
    monkeypatch.setattr(torch.cuda, "device", set_device)
    init_for([on("cpu")])
    init_for([on("cpu"), on("cuda:2")])
    assert opened == [({}, []), ({"device": "cuda:2"}, ["cuda:2"])]


# --- a fake device ---


class FakeEvent:
    def __init__(self, blocking: bool = False) -> None:
        assert blocking, "who waits for it would spin"
        self.happened = threading.Event()
        self.error: Exception | None = None

    def record(self, stream: FakeStream) -> None:
        stream.events.append(self)

    def synchronize(self) -> None:
        assert self.happened.wait(60)
        if self.error is not None:
            raise self.error


class FakeStream:
    cuda_stream = 17

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.events: list[FakeEvent] = []
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1


class FakeCuda:
    """As much of ``torch.cuda`` as the plugin uses."""

    Stream = FakeStream
    Event = FakeEvent

    def __init__(self) -> None:
        self.now = self.default = FakeStream()
        self.synchronized = 0
        self.capturing = False

    def current_stream(self, device: Any) -> FakeStream:
        return self.now

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def synchronize(self, device: Any) -> None:
        self.synchronized += 1

    @contextmanager
    def stream(self, stream: FakeStream) -> Any:
        before, self.now = self.now, stream
        yield
        self.now = before


class Opened:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_device: str = "cuda:0") -> None:
        self.cuda = FakeCuda()
        self.reported: list[Exception] = []
        self.cleanup = ExitStack()
        monkeypatch.setattr(device_module.torch, "cuda", self.cuda)
        session: Any = SimpleNamespace(device=on_device, report=self.reported.append, cleanup=self.cleanup)
        device = open_device(session, [("w", on("cuda:0"))])
        assert isinstance(device, Cuda)
        self.device = device


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    opened = Opened(monkeypatch)
    yield opened
    opened.cleanup.close()  # as the session does at its end, however it ends
    assert "commsched-gradients" not in [thread.name for thread in threading.enumerate()]


def test_a_gradient_is_reported_when_its_kernel_is_done(opened: Opened) -> None:
    notified: list[str] = []
    for name in ("last layer", "first layer"):
        opened.device.when_written(lambda name=name: notified.append(name))
    assert notified == []
    for event in opened.cuda.default.events:
        event.happened.set()
    opened.device.settle()
    assert notified == ["last layer", "first layer"]


def test_a_device_that_fails_is_reported(opened: Opened) -> None:
    opened.device.when_written(lambda: None)
    event = opened.cuda.default.events[0]
    event.error = RuntimeError("an illegal memory access was encountered")
    event.happened.set()
    opened.device.settle()
    assert [str(error) for error in opened.reported] == [
        "cuda:0 failed while it computed gradients: RuntimeError: an illegal memory access was encountered"
    ]


def test_a_session_that_has_failed_is_not_reported_again(opened: Opened) -> None:
    def notify() -> None:
        raise ClosedError("this session is closed")

    opened.device.when_written(notify)
    opened.cuda.default.events[0].happened.set()
    opened.device.settle()
    assert opened.reported == []


def test_a_captured_backward_is_refused(opened: Opened) -> None:
    opened.cuda.capturing = True
    with pytest.raises(UnsupportedError, match="backward is captured in a CUDA graph: gradients would be averaged once"):
        opened.device.when_written(lambda: None)


def test_flags_are_copied_beside_the_training_and_are_there_at_the_end(opened: Opened) -> None:
    with opened.device.copying():
        aside = opened.cuda.now
        assert aside is not opened.cuda.default
        assert aside.synchronized == 0
    assert opened.cuda.now is opened.cuda.default
    assert aside.synchronized == 1
    assert opened.cuda.default.synchronized == 0


def test_updates_on_the_one_stream_wait_for_nothing(opened: Opened) -> None:
    opened.device.read()
    with opened.device.updating():
        pass
    assert (opened.cuda.synchronized, opened.cuda.default.synchronized) == (0, 0)


@pytest.mark.parametrize("seen", ["in the first forward", "at an update"])
def test_once_two_streams_read_parameters_every_update_waits_for_the_device(opened: Opened, seen: str) -> None:
    opened.device.read()
    with opened.cuda.stream(FakeStream()):
        if seen == "in the first forward":
            opened.device.read()
        else:
            with opened.device.updating():
                assert opened.cuda.synchronized == 1
            assert opened.cuda.now.synchronized == 1
    before = opened.cuda.synchronized
    with opened.device.updating():
        assert (opened.cuda.synchronized, opened.cuda.default.synchronized) == (before + 1, 0)
    assert opened.cuda.default.synchronized == 1


# --- gradients that the core copies to the host ---


class FakeLayer(SimulatedDevice):
    """A device of the layer beneath, whose only stream stands for PyTorch's."""

    name = "cuda:0"

    def current_stream(self, of: Any = None) -> SimulatedStream:
        assert of == FakeStream.cuda_stream
        return super().current_stream()


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    monkeypatch.setattr(device_module, "open_layer", lambda name: FakeLayer())
    opened = Opened(monkeypatch, on_device="cpu")
    assert isinstance(opened.device, StagedCuda)
    yield opened
    opened.cleanup.close()


def test_a_staged_gradient_is_notified_at_once_with_the_event_behind_its_kernel(staged: Opened) -> None:
    layer = staged.device.layer
    assert isinstance(layer, FakeLayer)
    buffer = layer.allocate(4)
    layer.current_stream(17).launch(lambda gradient: gradient.fill(7), writes=[buffer])
    events: list[Any] = []
    staged.device.when_written(events.append)
    assert layer.outstanding == 1
    events[0].synchronize()
    assert layer.peek(buffer) == bytes([7] * 4)
    staged.cuda.capturing = True
    with pytest.raises(UnsupportedError, match="backward is captured in a CUDA graph: gradients would be averaged once"):
        staged.device.when_written(events.append)


def test_the_stream_waits_for_a_staged_average_until_several_read_parameters(staged: Opened) -> None:
    waits: list[Any] = []
    proxy: Any = SimpleNamespace(wait=waits.append)
    assert staged.device.arrived is not None
    staged.device.arrived([proxy])  # which stream will be the one of the training is not known yet
    staged.device.read()
    staged.device.arrived([proxy])
    with staged.cuda.stream(FakeStream()):
        staged.device.arrived([proxy])  # a gradient is read, and the training would not wait for it again
        staged.device.read()
    staged.device.arrived([proxy])
    assert [type(stream) for stream in waits] == [type(None), SimulatedStream, type(None), type(None)]


# --- training ---


class LateHost(Device):
    """Reports gradients as a device does: later, from a thread of its own."""

    def __init__(self) -> None:
        self._watcher = EventWatcher("commsched-gradients")
        self._turn = threading.Semaphore(0)
        self.reported = 0

    def when_written(self, notify: Callable[[], None]) -> None:
        self.reported += 1

        def failed(error: Exception) -> None:
            raise error

        self._watcher.call_after(self, notify, failed)
        self._turn.release()

    def synchronize(self) -> None:
        assert self._turn.acquire(timeout=60)

    def settle(self) -> None:
        self._watcher.settle()

    def close(self) -> None:
        assert self._watcher.close(10)


@pytest.mark.parametrize("delay_seconds", [0.0, 0.002])
@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW"])
def test_gradients_that_are_reported_later_change_nothing(
    name: str, delay_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[LateHost] = []

    def open_late(session: Any, parameters: Any) -> LateHost:
        devices.append(LateHost())
        return devices[-1]

    monkeypatch.setattr(places, "open_device", open_late)
    by_rank = train_scheduled(MLP, OPTIMIZERS[name], 2, delay_seconds=delay_seconds)
    require_equal(by_rank, train_alone(MLP, OPTIMIZERS[name], 2), MLP.tolerance)
    assert [device.reported > 0 for device in devices] == [True, True]
    for device in devices:
        device.close()


def test_the_optimizer_is_detached_after_its_session_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has closed its device."""

    def open_late(session: Any, parameters: Any) -> LateHost:
        device = LateHost()
        session.cleanup.callback(device.close)
        return device

    monkeypatch.setattr(places, "open_device", open_late)

    def run(session: Session) -> None:
        model = torch.nn.Linear(4, 2)
        optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, session=session)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        session.close()
        optimizer.detach()

    sessions = local_sessions(2)
    run_world(2, lambda rank: run(sessions[rank]), timeout_seconds=300)


def test_ranks_of_torch_distributed_that_no_launcher_started_are_not_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of mp.spawn, which are told their number as an argument."""
    session = local_sessions(1)[0]
    monkeypatch.setattr(device_module.commsched, "init", lambda **_: session)
    monkeypatch.setattr(device_module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(device_module.dist, "get_world_size", lambda: 2)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"torch\.distributed has 2 ranks, but commsched sees no launcher"):
        ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    session.disabled = True
    ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    session.close()
