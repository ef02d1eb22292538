"""Training over NCCL, by a stand-in for cupy on a simulated device, equals plain training. On GPUs: ``test_cuda.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commsched import Session
from commsched.core.scheduler import SchedulerConfig
from commsched.devices import open_device
from commsched.plugins.torch import initial_state, layout
from commsched.plugins.torch.device import Device
from commsched.session.local import local_sessions
from commsched.testing import SimulatedDevice
from commsched.testing.checked_world import Meeting
from commsched.transports.backends.nccl import open_transport
from tests.devices.backends.fake_cupy import in_place_of_cupy

from . import training
from .test_equality import OPTIMIZERS
from .training import MLP, SMALL, require_equal, train_alone, train_scheduled


class OverNccl(Device):
    """PyTorch writes into the device's memory at once, and reads it at once."""

    def __init__(self, gpu: SimulatedDevice, rank: int) -> None:
        self._gpu, self._rank = gpu, rank
        self.layer = open_device(f"cuda:{rank}")

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, Any]:
        memory = self._gpu.allocate(nbytes)
        interface = {"typestr": "|u1", "shape": (nbytes,), "data": (0, False), "version": 3}
        array = SimpleNamespace(__cuda_array_interface__=interface, __simulated_memory__=memory, device_id=self._rank)
        return torch.from_numpy(memory._memory), self.layer.view(array)

    def when_written(self, notify: Callable[..., None]) -> None:
        notify(self.layer.current_stream().record())


def broadcast(session: Session, what: str, tensors: Sequence[torch.Tensor], root: int) -> None:
    """This stands for the plugin's, which would ask PyTorch for memory of CUDA."""
    for tensor in tensors:
        tensor.copy_(torch.tensor(session.gather(tensor.double().tolist())[root], dtype=torch.float64))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    gpu = SimulatedDevice(7)

    def sessions(world_size: int, config: SchedulerConfig, **_: Any) -> list[Session]:
        meeting = Meeting(world_size)

        def open_rank(rank: int, control: Any) -> Any:
            return open_transport(replace(meeting.context(rank, control.report), device=f"cuda:{rank}"))

        return local_sessions(world_size, config, open_transport=open_rank)

    monkeypatch.setattr(training, "local_sessions", sessions)
    monkeypatch.setattr(initial_state, "_broadcast", broadcast)
    monkeypatch.setattr(layout, "open_device", lambda session, parameters: OverNccl(gpu, session.rank))
    with in_place_of_cupy(gpu, 2) as cupy:
        yield cupy


@pytest.mark.parametrize("collective", ["all_reduce", "rsag"])
def test_it_equals_plain_training(collective: str, cupy: Any) -> None:
    by_rank = train_scheduled(MLP, OPTIMIZERS["AdamW"], 2, config=replace(SMALL, collective=collective))
    require_equal(by_rank, train_alone(MLP, OPTIMIZERS["AdamW"], 2), MLP.tolerance)
