"""The numpy engine with arrays of a simulated device. With cupy's: see ``test_numpy_on_cuda.py``."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from commsched.core.errors import RanksDiverged, UnsupportedError
from commsched.core.interfaces import ForwardingTransport, Transport
from commsched.core.staging import StagedProxy
from commsched.plugins.numpy import SGD, Network, ScheduledOptimizer, softmax_cross_entropy
from commsched.session.local import local_sessions
from commsched.session.session import Session
from commsched.testing import SimulatedDevice, check_plugin
from commsched.transports.hierarchy import messages
from tests.transports.hierarchy.worlds import LocalNetwork, opening

from .simulated_array import SimulatedArray, to_device
from .test_numpy import Adapter, Weights, make_batch, make_network


def move(network: Network, device: Any) -> None:
    """Move the parameters and the gradients of ``network`` to a simulated device, or to cupy's current one (None)."""
    for layer in network.layers:
        for arrays in (layer.parameters, layer.gradients):
            for name, array in arrays.items():
                arrays[name] = put(array, device)


def put(array: Any, device: Any) -> Any:
    if device is None:
        import cupy

        return cupy.asarray(array)
    return to_device(device, array)


class OnDevice(Adapter):
    """Trains on a device of its own on every rank. Alone it trains in numpy."""

    def __init__(self, tolerance: float, cuda: bool = False) -> None:
        super().__init__("float64", tolerance, 0.9)
        self._cuda = cuda

    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        device = None if self._cuda else SimulatedDevice(seed=rank, number=rank)
        network = make_network(np.random.default_rng([seed, rank]))
        move(network, device)
        optimizer = ScheduledOptimizer(SGD(network, 0.1, self.momentum), session, device)
        for step in range(steps):
            inputs, labels = make_batch(rank, step, seed)
            logits = network.forward(put(inputs, device)).get()
            network.backward(put(softmax_cross_entropy(logits, labels)[1], device))
            optimizer.step()
        optimizer.synchronize()
        return {
            f"{index}.{name}": parameter.get()
            for index, layer in enumerate(network.layers)
            for name, parameter in layer.parameters.items()
        }


def test_devices_of_two_hosts_under_the_public_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on each host sum in shared memory; hosts average over a network with delays."""

    def on_hosts(size: int, config: Any, *, wrap_transport: Any, **options: Any) -> list[Session]:
        transports = opening(lambda rank: rank // 2, size, LocalNetwork(), wrap_transport)
        return local_sessions(size, config, open_transport=transports, **options)

    monkeypatch.setattr(messages, "PINNED_FROM_BYTES", 0)
    monkeypatch.setattr(sys.modules["commsched.testing.check_plugin"], "local_sessions", on_hosts)
    check_plugin(OnDevice(1e-9), world_sizes=(2, 4))


@pytest.mark.parametrize("seed", range(3))
def test_training_on_a_simulated_device_equals_training_alone(seed: int) -> None:
    check_plugin(OnDevice(1e-9), seed=seed)


def test_a_reader_that_waits_in_the_host_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds that the average has come, but not yet that it is on the device."""
    monkeypatch.setattr(StagedProxy, "wait", lambda proxy, stream=None: super(StagedProxy, proxy).wait())
    with pytest.raises((AssertionError, RanksDiverged), match=r"not finite|weights differ|not bitwise equal"):
        check_plugin(OnDevice(1e-9), world_sizes=(2,))


def test_an_array_of_another_library_needs_its_device() -> None:
    [session] = local_sessions(1)
    network = make_network(np.random.default_rng(0))
    device = SimulatedDevice()
    move(network, device)
    with (
        session,
        pytest.raises(UnsupportedError, match="a SimulatedArray is an array of numpy or cupy on no known device; give device="),
    ):
        ScheduledOptimizer(SGD(network, 0.1), session)


def test_averages_of_another_device_are_refused() -> None:
    class OnCuda(ForwardingTransport):
        def __init__(self, inner: Transport) -> None:
            super().__init__(inner)
            self.device = "cuda:0"

    [session] = local_sessions(1, wrap_transport=OnCuda)
    network = make_network(np.random.default_rng(0))
    device = SimulatedDevice()
    move(network, device)
    assert isinstance(network.layers[0].parameters["weight"], SimulatedArray)
    with session, pytest.raises(UnsupportedError, match="averages are made on cuda:0, but the memory given is on simulated:0"):
        ScheduledOptimizer(SGD(network, 0.1), session, device)
