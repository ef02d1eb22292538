"""The equality of every loop with plain training, again, with the gradients on a simulated device that the core stages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from commsched.core.staging import StagedProxy
from commsched.plugins.torch.packs import Packs

from .simulated import OnSimulatedDevice, on_simulated_devices
from .test_accumulation import *  # noqa: F403
from .test_equality import *  # noqa: F403
from .test_equality import OPTIMIZERS
from .training import MLP, require_equal, train_alone, train_scheduled

# How an optimizer reads averages has nothing to do with where gradients are: the four kinds of it with delays are enough here.
del test_optimizers_equal_plain_training  # noqa: F821


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OnSimulatedDevice]]:
    with on_simulated_devices(monkeypatch) as opened:
        yield opened


def test_the_gradients_are_there(opened: list[OnSimulatedDevice]) -> None:
    require_equal(train_scheduled(MLP, OPTIMIZERS["SGD"], 2), train_alone(MLP, OPTIMIZERS["SGD"], 2), MLP.tolerance)
    assert len(opened) == 2


def test_gradients_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack has no event behind its kernels."""
    allowed: list[bool] = []
    begin = Packs.begin
    monkeypatch.setattr(
        Packs, "begin", lambda packs, groups, slots, may: [allowed.append(may), begin(packs, groups, slots, may)]
    )
    train_scheduled(MLP, OPTIMIZERS["SGD"], 2)
    assert allowed
    assert not any(allowed)


def test_an_average_that_is_read_when_it_has_come_to_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedProxy, "wait", lambda proxy, stream=None: super(StagedProxy, proxy).wait())
    with pytest.raises(Exception):  # noqa: B017, PT011
        require_equal(train_scheduled(MLP, OPTIMIZERS["SGD"], 2), train_alone(MLP, OPTIMIZERS["SGD"], 2), MLP.tolerance)
