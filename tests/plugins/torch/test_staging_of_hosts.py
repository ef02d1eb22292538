"""Training with gradients on devices, some of one host: their ranks sum in memory that they share and devices copy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from commsched.testing import SimulatedDevice
from commsched.testing.check_plugin import Delayed
from commsched.transports.hierarchy import messages
from tests.transports.hierarchy.worlds import LocalNetwork, OrderedNetwork, opening

from .simulated import OnSimulatedDevice, on_simulated_devices
from .test_equality import MODELS, OPTIMIZERS
from .training import MLP, Task, require_equal, train_alone, train_scheduled


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OnSimulatedDevice]]:
    monkeypatch.setattr(messages, "PINNED_FROM_BYTES", 0)
    with on_simulated_devices(monkeypatch) as opened:
        yield opened


@pytest.mark.parametrize("network", [LocalNetwork, OrderedNetwork])
@pytest.mark.parametrize("name", ["MLP", "LSTM"])
def test_two_hosts_with_two_devices_equal_plain_training(network: type[LocalNetwork], name: str) -> None:
    task: Task = {"MLP": MLP, **MODELS}[name]
    delayed = opening(lambda rank: rank // 2, 4, network(), lambda transport: Delayed(transport, transport.rank, 0.002))
    by_rank = train_scheduled(task, OPTIMIZERS["SGD nesterov"], 4, open_transport=delayed)
    require_equal(by_rank, train_alone(task, OPTIMIZERS["SGD nesterov"], 4), task.tolerance)


def test_three_devices_of_a_host_alone_equal_plain_training() -> None:
    by_rank = train_scheduled(MLP, OPTIMIZERS["AdamW"], 3, open_transport=opening(lambda rank: 0, 3, LocalNetwork()))
    require_equal(by_rank, train_alone(MLP, OPTIMIZERS["AdamW"], 3), MLP.tolerance)


def test_every_rank_pins_what_it_shares(monkeypatch: pytest.MonkeyPatch, opened: list[OnSimulatedDevice]) -> None:
    """Its contributions, if it is not the leader, and the averages."""
    pinned: list[str] = []
    pin = SimulatedDevice.pin
    monkeypatch.setattr(SimulatedDevice, "pin", lambda device, memory: [pinned.append(device.name), pin(device, memory)][1])
    train_scheduled(MLP, OPTIMIZERS["SGD"], 2, open_transport=opening(lambda rank: 0, 2, LocalNetwork()))
    groups = len(pinned) // 3
    assert groups > 0
    assert len(pinned) == 3 * groups
