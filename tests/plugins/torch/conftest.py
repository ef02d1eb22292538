"""What tests leave in torch itself is put right after each of them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from .simulated import on_simulated_devices
from .where import DEVICE, LOOPS_ON


@pytest.fixture(autouse=DEVICE.type == "cuda")
def a_gpu() -> None:
    if not torch.cuda.is_available() or find_spec("cupy") is None:
        pytest.skip("needs a CUDA device, a PyTorch for it, and cupy")


@pytest.fixture(autouse=LOOPS_ON == "simulated")
def gradients_on_simulated_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with on_simulated_devices(monkeypatch):
        yield


@pytest.fixture(autouse=True)
def nothing_is_being_compiled() -> Iterator[None]:
    """torch has one flag in a process that says whether code is being compiled. Ranks that are threads and compile at once may
    leave it set."""
    yield
    compiler: Any = torch.compiler
    compiler._is_compiling_flag = False
