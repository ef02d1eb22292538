"""Gradients on a device: programs whose arrays lie on a simulated device, and training over a stand-in for NCCL."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.buffer_callback import ExecutionContext

import commsched.plugins.jax as cs
from commsched import Session
from commsched.core.errors import ConfigError, RanksDiverged, UnsupportedError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.staging import StagedGroup, StagedProxy
from commsched.plugins.jax import average_gradients, host_call, memory, state
from commsched.plugins.jax.exchange import _exchanges, take_failure
from commsched.plugins.jax.memory import DeviceArray, DeviceGradients, HostGradients, arrays_of, place_of
from commsched.session import local
from commsched.testing import SimulatedBuffer, SimulatedDevice, check_plugin
from commsched.testing.check_plugin import Weights
from commsched.testing.checked_world import Meeting
from commsched.transports.backends.nccl import open_transport
from tests.devices.backends.fake_cupy import in_place_of_cupy

from .test_average_gradients import train as train_with_averages
from .test_conformance import Adapter, weights_of
from .training import FEATURES, loss, make_batch, make_params, on_ranks, require_close, train, train_alone

TX = optax.sgd(0.1, momentum=0.9)


@pytest.fixture(params=[0, 1])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """The device of all programs, which all ranks share. A program goes on when a call returns, so its stream is then done."""
    gpu = SimulatedDevice(request.param)
    own = threading.local()

    def call(function: Callable[..., None], context: Any, results: Any, *operands: Any) -> None:
        own.stream = stream = getattr(own, "stream", None) or gpu.stream()
        arrays = [np.asarray(buffer) for buffer in (*results, *operands)]
        function(*(DeviceArray(gpu, stream, on_device(gpu, array)) for array in arrays))
        stream.synchronize()

    monkeypatch.setattr(host_call, "_call", call)
    for module in (state, sys.modules[average_gradients.__module__]):
        monkeypatch.setattr(module, "device_at", lambda place, session: gpu)
    return gpu


def on_device(gpu: SimulatedDevice, array: Any) -> Any:
    return SimpleNamespace(dtype=array.dtype, __simulated_memory__=SimulatedBuffer(gpu, array.reshape(-1).view(np.uint8)))


def test_training_equals_training_alone(gpu: SimulatedDevice) -> None:
    check_plugin(Adapter("float64", 1e-9, TX), world_sizes=(1, 3), steps=8)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(optax.exponential_decay(0.01, 2, 0.7))),
        optax.MultiSteps(optax.adam(0.01), 2),
    ],
    ids=["clip by global norm, schedule", "accumulation"],
)
def test_optimizers(gpu: SimulatedDevice, tx: optax.GradientTransformation) -> None:
    require_close(on_ranks(2, lambda session: train(session, tx, 4), check_weights=1), train_alone(tx, 2, 4))


def test_16_bit_parameters(gpu: SimulatedDevice) -> None:
    def start(seed: int) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_params(seed))

    tx = optax.sgd(0.1)
    by_rank = on_ranks(2, lambda session: train(session, tx, 3, params=start(session.rank)))
    require_close(by_rank, train_alone(tx, 2, 3, params=start(0)), 5e-2)


def test_average_gradients(gpu: SimulatedDevice) -> None:
    require_close(
        on_ranks(2, lambda session: train_with_averages(session, optax.chain(cs.average_gradients(session), TX), 3)),
        train_alone(TX, 2, 3),
    )


def without_synchronize(device: Any, stream: Any, source: Any) -> Any:
    copied = device.allocate_host(len(source))
    stream.copy(copied, source)
    return copied


@pytest.mark.parametrize(
    ("of", "name", "wrong"),
    [
        (memory, "to_host", without_synchronize),
        (StagedProxy, "wait", lambda proxy, stream=None: super(StagedProxy, proxy).wait()),
        (DeviceArray, "__setitem__", lambda array, at, value: None),
    ],
    ids=["a read that does not wait", "an average that is not there", "nothing written"],
)
def test_a_mistake_is_found(gpu: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, of: Any, name: str, wrong: Any) -> None:
    monkeypatch.setattr(of, name, wrong)
    with pytest.raises(Exception, match=r"not finite|differ|not bitwise equal|lacks an update|notified twice|has not begun"):
        check_plugin(Adapter("float64", 1e-9, TX), world_sizes=(2,), steps=5)


def test_a_gradient_is_notified_with_an_event_behind_its_copy(gpu: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    notified: list[Any] = []
    monkeypatch.setattr(StagedGroup, "notify_ready", lambda group, tensor, after: notified.append(after))
    values, stream = np.arange(FEATURES, dtype=np.float64), gpu.stream()

    def run(session: Session) -> None:
        gradients = DeviceGradients(session, Manifest((TensorSpec("w", (FEATURES,), "float64"),)), gpu)
        gpu.hold()
        gradients.submit(0, DeviceArray(gpu, stream, on_device(gpu, values)))
        [after] = notified
        assert not after.has_happened
        gpu.resume()
        after.synchronize()
        assert gpu.peek(gradients._places[0]) == values.tobytes()
        gradients.group.release()

    on_ranks(1, run)


# --- NCCL ---


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """Two GPUs by the stand-ins. Sessions average on them, and parameters are taken to lie on the one of the rank's thread."""
    device = SimulatedDevice(7)
    meetings: dict[int, Meeting] = {}

    def sessions(world_size: int, config: Any, *, wrap_transport: Any, check_weights: int) -> list[Session]:
        meeting = meetings.setdefault(len(meetings), Meeting(world_size))

        def open_rank(rank: int, control: Any) -> Any:
            return open_transport(replace(meeting.context(rank, control.report), device=f"cuda:{rank}"))

        return local.local_sessions(world_size, config, open_transport=open_rank, check_weights=check_weights)

    monkeypatch.setattr(sys.modules["commsched.testing.check_plugin"], "local_sessions", sessions)
    with in_place_of_cupy(device, 4) as fake:
        for module in (state, sys.modules[average_gradients.__module__]):
            monkeypatch.setattr(module, "place_of", lambda named: f"cuda:{fake.cuda.runtime.getDevice()}")
        memory._open_device.cache_clear()
        yield fake
    memory._open_device.cache_clear()
    memory._zero.cache_clear()


class OverNccl(Adapter):
    """Steps without ``jit``, so that calls are made at once, with arrays of the host."""

    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        with sys.modules["cupy"].cuda.Device(rank):
            state = cs.create(make_params(seed + rank, self.dtype), self.tx, session=session)
            step = cs.value_and_update(loss)
            for index in range(steps):
                _, state = step(state, *make_batch(rank, index, seed, self.dtype))
                self.after_step(state, rank)
            return weights_of(state.params)

    def after_step(self, state: Any, rank: int) -> None:
        pass


def test_training_over_nccl_equals_training_alone(cupy: Any) -> None:
    check_plugin(OverNccl("float64", 1e-9, TX), world_sizes=(1, 2), steps=3)


def test_different_rates_over_nccl_are_named(cupy: Any) -> None:
    class Differs(OverNccl):
        def after_step(self, state: Any, rank: int) -> None:
            state.opt_state.hyperparams["learning_rate"] = jnp.asarray([0.1, 0.25][rank])

    with pytest.raises(RanksDiverged, match=r"'hyperparams.learning_rate' is 0.1 on rank 0 but 0.25 on rank 1$"):
        check_plugin(Differs("float64", 1e-9, optax.inject_hyperparams(optax.sgd)(0.1)), world_sizes=(2,), steps=5)


# --- parts ---


class Buffer:
    """A buffer as a ``buffer_callback`` gets it."""

    def __init__(self, array: Any, number: int | None = None, gpu: Any = None) -> None:
        self.array, self.number, self.dtype = array, number, array.dtype
        if gpu is not None:
            self.__simulated_memory__ = on_device(gpu, array).__simulated_memory__

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0) if self.number is None else (2, self.number)

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        assert self.number is None, "the host cannot read it"
        return self.array


def test_programs_of_the_cpu_give_numpy_arrays_without_a_copy() -> None:
    array = np.arange(3.0)
    [given] = arrays_of(SimpleNamespace(), [Buffer(array)])
    assert np.shares_memory(given, array)


def test_programs_of_a_gpu_give_arrays_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    gpu = SimulatedDevice()
    stream = gpu.stream()
    monkeypatch.setattr(memory, "_open_device", lambda name: opened.append(name) or gpu)
    number, values = np.array(3, np.int32), np.arange(3.0)
    given = arrays_of(SimpleNamespace(stream=stream), [Buffer(number, 1, gpu), Buffer(values, 1, gpu)])
    assert opened == ["cuda:1"]
    assert int(given[0]) == 3
    given[0][...] = 5
    given[1][...] = 0
    assert given[0].item() == 5
    assert not given[1].to_host().any()
    with pytest.raises(TypeError, match="is written as a whole"):
        given[1][0] = 1


def test_the_stream_of_a_program_is_a_property() -> None:
    """No program on the CPU makes an object of that class of JAX."""
    assert isinstance(inspect.getattr_static(ExecutionContext, "stream"), property)


def test_an_array_of_a_type_that_cannot_be_viewed_may_be_given_if_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimulatedDevice()
    monkeypatch.setattr(memory, "_open_device", lambda name: gpu)
    [given] = arrays_of(SimpleNamespace(stream=gpu.stream()), [Buffer(np.zeros(3), 0)])
    with pytest.raises(UnsupportedError, match="is not in the memory of"):
        given.to_host()


def test_an_error_is_taken_by_one_program_and_leaves_the_others() -> None:
    class Exchange:
        def __init__(self) -> None:
            self.failures = deque([ValueError("first"), ValueError("second"), ValueError("  third\n"), KeyError()])

    kept = Exchange()
    _exchanges.add(kept)
    assert str(take_failure("ValueError: first")) == "first"
    assert take_failure("ValueError: first") is None
    assert str(take_failure("ValueError: second")) == "second"
    assert str(take_failure("CpuCallback error: ValueError:   third\n\nAt:\n")) == "  third\n"
    assert isinstance(take_failure("CpuCallback error: KeyError: \n\nAt:\n"), KeyError)


def test_a_step_elsewhere_than_where_training_began_is_refused(gpu: SimulatedDevice) -> None:
    elsewhere = SimulatedDevice(number=2)
    array = DeviceArray(elsewhere, elsewhere.stream(), on_device(elsewhere, np.zeros(FEATURES)))
    manifest = Manifest((TensorSpec("w", (FEATURES,), "float64"),))

    def run(session: Session) -> None:
        with pytest.raises(UnsupportedError, match=r"^the step computes 'w' on simulated:2, but .* on the CPU; begin anew"):
            HostGradients(session, manifest).submit(0, array)
        with pytest.raises(UnsupportedError, match=r"^the step computes 'w' on simulated:2, but .* on simulated:0; begin anew"):
            DeviceGradients(session, manifest, gpu).read(0, array)

    on_ranks(1, run)


def leaf_on(*places: tuple[str, int]) -> Any:
    class Place(SimpleNamespace):
        __hash__ = object.__hash__

        def __str__(self) -> str:
            return f"{self.platform}:{self.local_hardware_id}"

    devices = {Place(platform=platform, local_hardware_id=number) for platform, number in places}
    return SimpleNamespace(devices=lambda: devices, committed=True)


def test_the_place_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of([("a", np.zeros(2))]) == "cpu"
    monkeypatch.setattr(jax, "Array", SimpleNamespace)
    assert place_of([("a", leaf_on(("gpu", 1))), ("b", np.zeros(2))]) == "cuda:1"
    with pytest.raises(UnsupportedError, match=r"^'a' lies on cuda:1 and 'b' on cpu; put all parameters on one device$"):
        place_of([("a", leaf_on(("gpu", 1))), ("b", leaf_on(("cpu", 0)))])
    with pytest.raises(UnsupportedError, match=r"^'a' lies on tpu:0; the JAX plugin trains on one CPU or CUDA device"):
        place_of([("a", leaf_on(("tpu", 0)))])
    with pytest.raises(UnsupportedError, match=r"^'a' lies on gpu:0, gpu:1; the JAX plugin trains on one CPU or CUDA device"):
        place_of([("a", leaf_on(("gpu", 0), ("gpu", 1)))])


def test_alone_any_place_is_as_in_plain_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    [alone] = local.local_sessions(1)
    opened: list[dict[str, str]] = []
    monkeypatch.setattr(memory.commsched, "init", lambda **options: opened.append(options) or alone)
    params, key = jnp.ones(2), jax.random.key(0)
    place = memory._place
    monkeypatch.setattr(memory, "_place", lambda name, devices: place(name, leaf_on(("tpu", 0)).devices()))
    with alone:
        committed = jax.device_put(params, jax.devices()[0])
        assert cs.broadcast({"params": committed, "key": key})["params"] is committed
        assert jax.jit(lambda tree: cs.broadcast(tree))(committed).tolist() == [1, 1]
    assert opened == [{}, {}]


def test_a_gpu_without_cupy_is_refused_with_the_line_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)

    def run(session: Session) -> None:
        with pytest.raises(ConfigError, match=r"the device 'cuda:0' needs cupy.*pip install \"commsched\[cuda\]\""):
            memory.device_at("cuda:0", session)

    on_ranks(1, run)


def test_a_session_of_another_device_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^the parameters are on cpu, but the session was opened on cuda:1; "):
        memory.device_at("cpu", SimpleNamespace(device="cuda:1"))
