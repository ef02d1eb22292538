"""Parameters that are not contiguous: fused updates go by the order of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from ..where import here
from .loop import Data, batch, require_plain, run, train


def channels_last() -> nn.Module:
    layers = [nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 2, padding=1), nn.Flatten()]
    return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


FUSED: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adam": lambda model: optim.Adam(model.parameters(), lr=0.01, fused=True),
    "SGD": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda model: optim.Adagrad(model.parameters(), lr=0.05, fused=True),
}


@pytest.mark.parametrize("model", [channels_last, Transposed])
@pytest.mark.parametrize("name", FUSED)
def test_fused_updates(name: str, model: Callable[[], nn.Module]) -> None:
    require_plain(train, model=model, optimizer=FUSED[name])


@pytest.mark.parametrize("name", FUSED)
def test_state_that_is_there_when_it_is_wrapped(name: str) -> None:
    def resumed(model: nn.Module) -> optim.Optimizer:
        optimizer = FUSED[name](model)
        model(batch(9)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    require_plain(train, model=channels_last, optimizer=resumed)


def test_state_has_the_strides_of_rank_0() -> None:
    """Those of its parameter, or else its own: a checkpoint may have changed them."""

    def make(model: Any) -> optim.Optimizer:
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.state[model[1].weight]["momentum_buffer"] = torch.ones_like(model[1].weight)
        optimizer.state[model[3].weight]["momentum_buffer"] = here(torch.ones(model[3].weight.shape, dtype=torch.float64))
        return optimizer

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        return [optimizer.state[model[index].weight]["momentum_buffer"].stride() for index in (1, 3)]

    expected = [(36, 1, 12, 4), (24, 4, 2, 1)]
    assert run(loop, model=channels_last, optimizer=make) == [expected, expected]


def test_what_a_hook_clips_is_what_is_in_grad_afterwards() -> None:
    """The update's gradient is a copy, strided like the parameter."""

    def make(model: nn.Module) -> optim.Optimizer:
        optimizer = FUSED["SGD"](model)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None)
        return optimizer

    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        train(data, model, optimizer)
        return [parameter.grad.clone() for parameter in model.parameters()]

    require_plain(loop, model=channels_last, optimizer=make)
