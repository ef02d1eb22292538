"""What the plugin does for CUDA devices, with the device's part faked: what runs on a real one is in test_cuda.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
from commsched.plugins.torch.device import Cuda, Device, device_of, init_for, open_device
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


@pytest.mark.parametrize("session", ["cpu", "cuda:0"])
def test_what_a_device_lacks_is_told(session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> Any:
        raise ConfigError(f"the device '{name}' needs cupy")

    monkeypatch.setattr(device_module, "open_layer", lacking)
    with pytest.raises(ConfigError) as raised:
        open_device(session_on(session), [("w", on("cuda:0"))])
    assert str(raised.value) == "parameter 'w' is on cuda:0: the device 'cuda:0' needs cupy"


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
    def __init__(self) -> None:
        self.happened = threading.Event()
        self.error: Exception | None = None

    def synchronize(self) -> None:
        assert self.happened.wait(60)
        if self.error is not None:
            raise self.error


class FakeStream:
    cuda_stream = 17

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1


class FakeCuda:
    """As much of ``torch.cuda`` as the plugin uses."""

    Stream = FakeStream

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


class FakeLayer(SimulatedDevice):
    """A device of the layer beneath, whose only stream stands for PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "cuda:0"

    def current_stream(self, of: Any = None) -> SimulatedStream:
        assert of == FakeStream.cuda_stream
        return super().current_stream()


def wait_for_call(ask: Callable[[Callable[[], None]], None], what: str = "") -> None:
    """Wait as the core does, but no failure ends it."""
    called = threading.Event()
    ask(called.set)
    assert called.wait(60)


class Opened:
    event: FakeEvent

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_device: str = "cuda:0") -> None:
        self.cuda = FakeCuda()
        self.layer = FakeLayer()
        self.reported: list[Exception] = []
        self.cleanup = ExitStack()
        monkeypatch.setattr(device_module.torch, "cuda", self.cuda)
        monkeypatch.setattr(device_module, "open_layer", lambda name: self.layer)
        core = SimpleNamespace(wait_for_call=wait_for_call)
        session: Any = SimpleNamespace(device=on_device, report=self.reported.append, cleanup=self.cleanup, core=core)
        device = open_device(session, [("w", on("cuda:0"))])
        assert isinstance(device, Cuda)
        self.device = device


@pytest.fixture(params=["cuda:0", "cpu"], ids=["nccl", "staged"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    opened = Opened(monkeypatch, request.param)
    yield opened
    opened.cleanup.close()  # as the session does at its end, however it ends
    assert "commsched-digests" not in [thread.name for thread in threading.enumerate()]


def test_a_gradient_is_notified_at_once_with_the_event_behind_its_kernel(opened: Opened) -> None:
    buffer = opened.layer.allocate(4)
    opened.layer.current_stream(17).launch(lambda gradient: gradient.fill(7), writes=[buffer])
    events: list[Any] = []
    opened.device.when_written(events.append)
    assert opened.layer.outstanding == 1
    events[0].synchronize()
    assert opened.layer.peek(buffer) == bytes([7] * 4)


@pytest.fixture
def digested(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """A digest is computed at once. The test controls the event behind it, ``opened.event``, which is one of the layer beneath:
    torch's would open device 0 in the thread that waits for it."""
    opened.event = FakeEvent()
    monkeypatch.setattr(opened.layer, "current_stream", lambda of: SimpleNamespace(record=lambda: opened.event))
    monkeypatch.setattr(device_module, "digest_on_device", lambda values: values)
    empty = torch.empty
    monkeypatch.setattr(device_module.torch, "empty", lambda *shape, pin_memory, **options: empty(*shape, **options))
    return opened


def test_a_digest_is_reported_when_it_is_there(digested: Opened) -> None:
    reported: list[int] = []
    digested.device.digest(torch.tensor(-1), reported.append)
    assert reported == []
    digested.event.happened.set()
    digested.device.settle()
    assert reported == [2**64 - 1]


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (
            RuntimeError("an illegal memory access was encountered"),
            ["cuda:0 failed while it computed a digest of weights: RuntimeError: an illegal memory access was encountered"],
        ),
        (ClosedError("this session is closed"), []),
    ],
)
def test_a_device_that_fails_is_reported_unless_the_session_has(
    digested: Opened, error: Exception, reported: list[str]
) -> None:
    digested.device.digest(torch.tensor(1), pytest.fail)
    digested.event.error = error
    digested.event.happened.set()
    digested.device.settle()
    assert [str(each) for each in digested.reported] == reported


def test_a_captured_backward_is_refused(opened: Opened) -> None:
    opened.cuda.capturing = True
    with pytest.raises(UnsupportedError, match="backward is captured in a CUDA graph: gradients would be averaged once"):
        opened.device.when_written(lambda event: None)


def test_an_update_within_a_capture_is_refused(opened: Opened) -> None:
    opened.device.require_no_capture("w")
    opened.cuda.capturing = True
    with pytest.raises(UnsupportedError, match=r"'w', whose update is outstanding, is read while a CUDA graph is captured"):
        opened.device.require_no_capture("w")


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


@pytest.mark.parametrize("opened", ["cuda:0"], indirect=True)
def test_averages_that_nccl_made_need_no_wait(opened: Opened) -> None:
    assert opened.device.arrived is None


@pytest.mark.parametrize("opened", ["cpu"], indirect=True)
def test_the_stream_waits_for_a_staged_average_until_several_read_parameters(opened: Opened) -> None:
    waits: list[Any] = []
    proxy: Any = SimpleNamespace(wait=waits.append)
    assert opened.device.arrived is not None
    opened.device.arrived([proxy])  # which stream will be the one of the training is not known yet
    opened.device.read()
    opened.device.arrived([proxy])
    with opened.cuda.stream(FakeStream()):
        opened.device.arrived([proxy])  # a gradient is read, and the training would not wait for it again
        opened.device.read()
    opened.device.arrived([proxy])
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
        wait_for_call(self._watcher.when_settled)

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
