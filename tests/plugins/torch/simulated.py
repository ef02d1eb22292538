"""Flat buffers on a simulated device, for models on the CPU: PyTorch computes at once, and everything else is as late as on a
device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from commsched.core.group import DependencyProxy
from commsched.plugins.torch import layout
from commsched.plugins.torch.device import Device
from commsched.testing import SimulatedDevice


class OnSimulatedDevice(Device):
    """PyTorch writes into the device's memory at once, and reads it at once, so the host waits for averages."""

    def __init__(self, seed: int) -> None:
        self.layer: SimulatedDevice = SimulatedDevice(seed)
        self._stream = self.layer.stream()
        self.arrived = self._arrived

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, Any]:
        buffer = self.layer.allocate(nbytes)
        return torch.from_numpy(buffer._memory), buffer

    def when_written(self, notify: Callable[..., None]) -> None:
        notify(self._stream.record())

    def _arrived(self, proxies: Iterable[DependencyProxy]) -> None:
        for proxy in proxies:
            proxy.wait()


@contextmanager
def on_simulated_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OnSimulatedDevice]]:
    """Optimizers and hooks that are made in the block have their gradients on simulated devices."""
    opened: list[OnSimulatedDevice] = []

    def open_simulated(session: Any, parameters: Any) -> OnSimulatedDevice:
        opened.append(OnSimulatedDevice(seed=len(opened)))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(layout, "open_device", open_simulated)
        patch.setattr(sys.modules["commsched.plugins.torch.comm_hook"], "open_device", open_simulated)
        yield opened
