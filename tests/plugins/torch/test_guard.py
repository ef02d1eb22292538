"""Whoever reads a guarded tensor from Python waits first."""

from __future__ import annotations

import copy
import ctypes
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from commsched.plugins.torch import guard as guard_module
from commsched.plugins.torch.guard import guard, own_class, release, unguarded
from commsched.plugins.torch.marked import Twin, unnoticed


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _saved(p: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    return torch.load(file)


X = torch.ones(1, 3)
READS: dict[str, Callable[[Any], torch.Tensor]] = {
    "arithmetic": lambda p: p + 0,
    "reflected arithmetic": lambda p: 1 * p,
    "comparison": lambda p: (p == 2).float() * 2,
    "linear": lambda p: nn.functional.linear(torch.eye(3), p).T,
    "list argument": lambda p: torch.cat([p, p])[:3],
    "keyword argument": lambda p: torch.add(torch.zeros(3, 3), other=p),
    "out argument": lambda p: torch.mul(torch.ones(3, 3), 2, out=p.data),
    "foreach": lambda p: torch._foreach_add([p], 0)[0],
    "index": lambda p: p[:],
    "iteration": lambda p: torch.stack(list(p)),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "array": lambda p: torch.tensor(p.tolist()),
    "item": lambda p: torch.full((3, 3), p[0, 0].item()),
    "to": lambda p: p.to(torch.float64).float(),
    "view": lambda p: p.view(9).view(3, 3),
    "autograd function": lambda p: Cube.apply(p) / 4,
    "deepcopy": copy.deepcopy,
    "save": _saved,
    "state_dict": lambda p: nn.ParameterList([p]).state_dict()["0"],
    "functional_call": lambda p: torch.func.functional_call(nn.Linear(3, 3, bias=False), {"weight": p}, (torch.eye(3),)).T,
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]).view(3, 3),
    "in place": lambda p: p.data.mul_(1),
    "address": lambda p: torch.tensor(list((ctypes.c_float * 9).from_address(p.data_ptr()))).reshape(3, 3),
    "repr": lambda p: torch.full((3, 3), 2.0) if "2." in repr(p) else torch.zeros(3, 3),
}


def _guarded(original: type) -> tuple[Any, list[str]]:
    """Ones that become twos when resolved."""
    tensor = nn.Parameter(torch.ones(3, 3)) if original is nn.Parameter else torch.ones(3, 3)
    log: list[str] = []

    def resolve() -> None:
        log.append("resolved")
        release(tensor)
        with torch.no_grad():
            tensor.mul_(2)

    guard(tensor, resolve)
    return tensor, log


@pytest.mark.parametrize("original", [nn.Parameter, torch.Tensor])
@pytest.mark.parametrize("name", READS)
def test_reading_waits_once(name: str, original: type) -> None:
    tensor, log = _guarded(original)
    assert torch.equal(READS[name](tensor).detach(), torch.full((3, 3), 2.0))
    assert log == ["resolved"]
    assert type(tensor) is original


@pytest.mark.parametrize(
    "look",
    [
        lambda p: p.shape == (3, 3) and p.size(0) == 3 and p.numel() == 9 and p.dim() == 2 and len(p) == 3,
        lambda p: p.dtype == torch.float32 and p.device.type == "cpu" and p.is_leaf and p.stride() == (3, 1),
        lambda p: isinstance(p, torch.Tensor) and p is not None and hash(p) == id(p),
        lambda p: p.grad is None and p.requires_grad in (True, False) and p.grad_fn is None,
    ],
)
def test_what_says_nothing_about_values_does_not_wait(look: Callable[[Any], bool]) -> None:
    for original in (nn.Parameter, torch.Tensor):
        tensor, log = _guarded(original)
        assert look(tensor)
        assert log == []
        assert isinstance(tensor, original)
        release(tensor)


def test_a_guarded_parameter_is_a_parameter_and_its_copies_are_plain() -> None:
    parameter, _ = _guarded(nn.Parameter)
    assert isinstance(parameter, nn.Parameter)
    module = nn.Linear(3, 3)
    module.weight = parameter
    assert dict(module.named_parameters())["weight"] is parameter
    assert type(copy.deepcopy(module).weight) is nn.Parameter


def test_a_failing_resolution_raises_and_stays() -> None:
    tensor = torch.ones(2)

    def fail() -> None:
        raise RuntimeError("the network is gone")

    guard(tensor, fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the network is gone"):
            tensor + 1
    release(tensor)
    assert type(tensor + 1) is torch.Tensor


def test_a_subclass_keeps_its_class() -> None:
    class Mine(nn.Parameter):
        pass

    tensor = Mine(torch.ones(2))
    guard(tensor, lambda: release(tensor))
    assert isinstance(tensor, Mine)
    assert (tensor + 1).detach().sum().item() == 4
    assert type(tensor) is Mine


class Labelled(torch.Tensor):
    """As MONAI's and fastai's: what is made of one is one."""


@pytest.mark.parametrize("original", [nn.Parameter, torch.Tensor])
def test_other_classes_of_tensors_stay(original: type) -> None:
    tensor, log = _guarded(original)
    made = nn.functional.linear(torch.ones(1, 3).as_subclass(Labelled), tensor)
    assert type(made) is Labelled
    assert log == ["resolved"]


@pytest.mark.parametrize("trains", [True, False])
def test_a_parameter_of_a_guarded_one(trains: bool) -> None:
    tensor, log = _guarded(nn.Parameter)
    made = nn.Parameter(tensor, requires_grad=trains)
    assert log == ["resolved"]
    assert type(made) is nn.Parameter
    assert made is not tensor
    assert made.requires_grad == trains
    assert made.data_ptr() == tensor.data_ptr()
    assert type(tensor.detach()) is torch.Tensor


@pytest.mark.parametrize("original", [nn.Parameter, torch.Tensor])
def test_what_is_made_by_the_class_of_a_guarded_one_is_plain(original: type) -> None:
    tensor, log = _guarded(original)
    made = type(tensor)(torch.ones(3))
    assert log == []
    release(tensor)
    assert type(made) is original
    assert torch.equal(copy.deepcopy(made), made)
    assert torch.equal(_saved(made), made)


def test_copies_within_one_memo_are_one_object() -> None:
    tensor, _ = _guarded(nn.Parameter)
    first, second = copy.deepcopy([tensor, tensor])
    assert first is second
    assert type(first) is nn.Parameter


def test_a_copy_has_the_attributes() -> None:
    tensor, _ = _guarded(nn.Parameter)
    tensor.is_shared = True
    assert _saved(tensor).is_shared


@pytest.mark.parametrize(
    "use",
    [
        lambda w, x: x + w,
        lambda w, x: torch.cat([x, w]),
        lambda w, x: torch.addcmul(x, x, x, out=w),
    ],
    ids=["operand", "list", "out"],
)
def test_a_marked_tensor_is_resolved_wherever_it_stands(use: Callable[[Any, Any], Any]) -> None:
    parameter, log = nn.Parameter(torch.ones(3, 3)), []

    def resolve() -> None:
        log.append("resolved")
        release(parameter)

    with unnoticed():
        guard(parameter, resolve, Twin(parameter, nn.Parameter))
    with torch.no_grad(), unguarded():
        use(parameter, torch.ones(3, 3))
    assert log == ["resolved"]


def test_what_resolves_a_marked_tensor_is_within_nothing() -> None:
    """Not even within the operation that reads it: of an extension in C++, say, below which nothing is differentiated."""
    parameter, seen = nn.Parameter(torch.ones(3)), []

    def resolve() -> None:
        seen.append((torch.ones(3, requires_grad=True) * 2).requires_grad)
        release(parameter)

    with unnoticed():
        guard(parameter, resolve, Twin(parameter, nn.Parameter))
    with unguarded(), torch._C._AutoDispatchBelowAutograd():
        made = parameter + 1
    assert seen == [True]
    assert not made.requires_grad


def test_a_tensor_that_was_guarded_leaves_nothing_behind() -> None:
    """Another one may have its id, and is not to be taken for it."""
    tensor = torch.ones(3)
    key = id(tensor)
    guard(tensor, lambda: None)
    release(tensor)
    assert key in guard_module._guarded
    del tensor
    assert key not in guard_module._guarded


def test_a_class_that_changes_between_two_guards_comes_back() -> None:
    class Own(nn.Parameter):
        pass

    parameter = nn.Parameter(torch.ones(3))
    guard(parameter, lambda: None)
    release(parameter)
    parameter.__class__ = Own
    assert own_class(parameter) is Own
    guard(parameter, lambda: None)
    assert own_class(parameter) is Own
    assert isinstance(parameter, Own)
    release(parameter)
    assert type(parameter) is Own
