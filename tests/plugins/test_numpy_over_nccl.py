"""The numpy engine with arrays of a device over NCCL, by a stand-in for cupy. Each rank has a GPU of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commsched.core.device_events import NOW, EventWatcher
from commsched.core.errors import RanksDiverged
from commsched.devices import open_device
from commsched.plugins.numpy import SGD, ScheduledOptimizer, softmax_cross_entropy
from commsched.session import local
from commsched.session.session import Session
from commsched.testing import SimulatedDevice, check_plugin
from commsched.testing.checked_world import Meeting
from commsched.transports.backends.nccl import open_transport
from tests.devices.backends.fake_cupy import in_place_of_cupy

from .simulated_array import SimulatedArray
from .test_numpy import Adapter, Weights, make_batch, make_network
from .test_numpy_on_device import move, put


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """The memory of four GPUs. The sessions of ``check_plugin`` average there, and its arrays are viewed as those of cupy."""
    gpu = SimulatedDevice(5)

    def sessions(world_size: int, config: Any, *, wrap_transport: Any, check_weights: int) -> list[Session]:
        meeting = Meeting(world_size)

        def open_rank(rank: int, control: Any) -> Any:
            return open_transport(replace(meeting.context(rank, control.report), device=f"cuda:{rank}"))

        return local.local_sessions(world_size, config, open_transport=open_rank, check_weights=check_weights)

    monkeypatch.setattr(sys.modules["commsched.testing.check_plugin"], "local_sessions", sessions)
    with in_place_of_cupy(gpu, 4) as cupy:
        described = {"typestr": "|u1", "data": (0, False), "version": 3}
        interface = property(lambda array: {**described, "shape": (array.nbytes,)})
        monkeypatch.setattr(SimulatedArray, "__cuda_array_interface__", interface, raising=False)
        monkeypatch.setattr(SimulatedArray, "device_id", property(lambda array: cupy.cuda.runtime.getDevice()), raising=False)
        yield gpu


class OverNccl(Adapter):
    def __init__(self, gpu: SimulatedDevice) -> None:
        super().__init__("float64", 1e-9, 0.9)
        self._gpu = gpu

    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        assert session.device in (f"cuda:{rank}", "cpu")
        with sys.modules["cupy"].cuda.Device(rank), self._gpu.using(self._gpu.stream()):
            network = make_network(np.random.default_rng([seed, rank]))
            move(network, self._gpu)
            optimizer = ScheduledOptimizer(SGD(network, 0.1, self.momentum), session, open_device(f"cuda:{rank}"))
            for step in range(steps):
                inputs, labels = make_batch(rank, step, seed)
                logits = network.forward(put(inputs, self._gpu)).get()
                network.backward(put(softmax_cross_entropy(logits, labels)[1], self._gpu))
                optimizer.step()
            optimizer.synchronize()
            return {
                f"{index}.{name}": parameter.get()
                for index, layer in enumerate(network.layers)
                for name, parameter in layer.parameters.items()
            }


def test_training_over_nccl_equals_training_alone(gpu: SimulatedDevice) -> None:
    check_plugin(OverNccl(gpu), world_sizes=(1, 3))


def without_waiting(of: str) -> Callable[..., None]:
    """``EventWatcher.call_after`` of one thread that takes its events for happened."""
    call_after = EventWatcher.call_after

    def call(watcher: EventWatcher, event: Any, then: Any, failed: Any) -> None:
        call_after(watcher, NOW if watcher._thread.name == of else event, then, failed)

    return call


@pytest.mark.parametrize("thread", ["commsched-gradients", "commsched-nccl"])
def test_an_event_that_nobody_waits_for_is_found(thread: str, gpu: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one behind a gradient, or the one behind an average."""
    monkeypatch.setattr(EventWatcher, "call_after", without_waiting(thread))
    with pytest.raises((AssertionError, RanksDiverged), match=r"not finite|weights differ|not bitwise equal"):
        check_plugin(OverNccl(gpu), world_sizes=(2,))
