from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from commsched.testing import SimulatedDevice
from tests.devices.backends.fake_cupy import in_place_of_cupy


@pytest.fixture
def gpu() -> SimulatedDevice:
    return SimulatedDevice(3)


@pytest.fixture
def cupy(gpu: SimulatedDevice) -> Iterator[Any]:
    """The stand-in, with three GPUs."""
    with in_place_of_cupy(gpu, 3) as fake:
        yield fake
