"""Copies of what an update changes. Fake tensors stand for those of a GPU: they say on which device they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from commsched.plugins.torch.saved import Saved, copied, put_back, saved_for_update


def trained() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(3, 4).t())  # its strides are not those of a new tensor
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    step(parameter, optimizer)
    return parameter, optimizer


def step(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def everything(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> list[Any]:
    values = [parameter.detach(), *optimizer.state[parameter].values()]
    return [(value.clone(), value.stride(), value.dtype) for value in values]


@pytest.mark.parametrize("in_host", [False, True])
def test_what_was_copied_is_put_back_bit_for_bit(in_host: bool) -> None:
    parameter, optimizer = trained()
    before = everything(parameter, optimizer)
    saved = saved_for_update(parameter, optimizer.state[parameter], None, in_host)
    for _ in range(2):
        step(parameter, optimizer)
        state = put_back(parameter, saved)
        assert state is not None
        optimizer.state[parameter] = state
        for (now, *layout), (then, *was) in zip(everything(parameter, optimizer), before, strict=True):
            assert torch.equal(now, then)
            assert layout == was


def on_a_gpu() -> tuple[torch.nn.Parameter, dict[str, Any]]:
    parameter = torch.nn.Parameter(torch.empty(3, 4, device="cuda"))
    return parameter, {"step": torch.zeros(()), "exp_avg": torch.empty_like(parameter), "betas": (0.9, 0.99)}


def places(saved: Saved) -> list[str]:
    assert saved.state is not None
    return [each.device.type for each in (saved.values, saved.state["step"], saved.state["exp_avg"])]


def test_copies_are_beside_the_values() -> None:
    with FakeTensorMode():
        parameter, state = on_a_gpu()
        assert places(saved_for_update(parameter, state, None)) == ["cuda", "cpu", "cuda"]
        assert copied(parameter.detach()).device.type == "cuda"


def test_copies_are_in_the_memory_of_the_host_and_come_back_to_where_they_were() -> None:
    with FakeTensorMode():
        parameter, state = on_a_gpu()
        saved = saved_for_update(parameter, state, None, in_host=True)
        assert places(saved) == ["cpu", "cpu", "cpu"]
        again = saved_for_update(parameter, state, saved, in_host=True)
        assert saved.state is not None
        assert again.state is not None
        assert again.values is saved.values  # the memory is used again
        assert again.state["exp_avg"] is saved.state["exp_avg"]
        put = put_back(torch.empty(3, 4), saved)  # without CUDA, nothing can be written into a tensor on a GPU, fake or not
        assert put is not None
        assert [put["step"].device.type, put["exp_avg"].device.type, put["betas"]] == ["cpu", "cuda", (0.9, 0.99)]
        assert copied(parameter.detach(), in_host=True).device.type == "cpu"
