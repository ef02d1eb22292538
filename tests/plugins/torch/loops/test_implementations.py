"""Which of its implementations torch takes for updates and for clipping: those that it takes in plain training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from .loop import Data, mlp, run, train

TOLD: list[str] = []


def told(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        TOLD.append(name)
        return original(*args, **kwargs)

    return call


@pytest.fixture(autouse=True)
def _spied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here torch takes lists of tensors by default, as it does on a GPU."""
    TOLD.clear()
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    adams = sys.modules["torch.optim.adam"]
    for name in ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam"):
        monkeypatch.setattr(adams, name, told(name, getattr(adams, name)))
    for name in ("_foreach_norm", "_foreach_mul_"):
        monkeypatch.setattr(torch, name, told(name, getattr(torch, name)))


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=0.1)


def fused(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=0.1, fused=True)


def with_a_hook(model: nn.Module) -> optim.Optimizer:
    optimizer = adam(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def of_elsewhere(model: nn.Module) -> optim.Optimizer:
    class Adam(optim.Adam):
        pass

    return Adam(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "takes"),
    [
        (adam, "_multi_tensor_adam"),
        (with_a_hook, "_multi_tensor_adam"),
        (of_elsewhere, "_multi_tensor_adam"),
        (fused, "_fused_adam"),
    ],
)
def test_updates(make: Callable[[Any], optim.Optimizer], takes: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, optimizer, 2)
        optimizer.synchronize()

    run(loop, model=mlp, optimizer=make)
    assert {name for name in TOLD if name.endswith("adam")} == {takes}


def test_clipping() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        data.loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    run(loop)
    assert {"_foreach_norm", "_foreach_mul_"} <= set(TOLD)
