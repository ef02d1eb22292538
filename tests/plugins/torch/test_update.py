import copy
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from commsched.plugins.torch.checks import Rows
from commsched.plugins.torch.marked import Twin
from commsched.plugins.torch.slot import Slot
from commsched.plugins.torch.update import _StateOfTwins, snapshot, step_some

from .loops.loop import LARGE as MERGED
from .loops.loop import Data, run


def test_the_state_of_a_twin_is_that_of_its_parameter() -> None:
    """An optimizer, or a hook of its step, may also replace the state of a parameter, or delete it."""
    parameter, twin, other = (torch.zeros(1) for _ in range(3))
    state: dict[Any, Any] = defaultdict(dict)
    seen = _StateOfTwins(state, {id(twin): parameter})
    seen[twin]["step"] = 1
    seen[other]["step"] = 5
    assert state == {parameter: {"step": 1}, other: {"step": 5}}
    seen[twin] = {"step": 2}
    assert state[parameter] == seen[twin] == {"step": 2}
    assert twin in seen
    assert len(seen) == 2
    del seen[twin]
    assert list(state) == [other]
    assert twin not in seen
    assert seen[twin] == {}  # made anew, as the optimizer's own state does
    seen[twin]["step"] = 3
    del seen[parameter]
    assert seen[twin] == {}


SMALL, LARGE = (32, 32), (32, 33)  # 4 KB and more

#: By case: the optimizer, its arguments, a shape of parameters, and whether they are updated by lists.
UPDATES: dict[str, tuple[Any, dict[str, Any], tuple[int, ...], bool]] = {
    "SGD": (optim.SGD, {"lr": 0.1}, SMALL, True),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}, (8, 8), True),
    "maximize": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}, (3,), True),
    "Adam": (optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}, (7, 3), True),
    "AdamW": (optim.AdamW, {"lr": 0.1, "maximize": True}, (), True),
    "large": (optim.AdamW, {"lr": 0.1}, LARGE, False),
    "nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, SMALL, False),  # would write to gradients
    "lr tensor": (optim.Adam, {"lr": torch.tensor(0.1)}, SMALL, False),
    "beta tensors": (optim.Adam, {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": None}, SMALL, False),
    "chosen": (optim.SGD, {"lr": 0.1, "foreach": False}, SMALL, False),
    "fused": (optim.Adam, {"lr": 0.1, "fused": True}, SMALL, False),
    "another": (optim.NAdam, {"lr": 0.1}, SMALL, False),  # rounds differently
}


@pytest.mark.parametrize("case", UPDATES)
def test_small_parameters_are_updated_by_lists_with_the_same_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, arguments, shape, by_lists = UPDATES[case]
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for _ in range(3)]
    theirs = copy.deepcopy(ours)
    optimizer, plain = make(ours, **arguments), make(theirs, **arguments)
    slots = [Slot(str(place), parameter, 0, False) for place, parameter in enumerate(ours)]
    lists = []
    for module in ("sgd", "adam", "nadam"):
        name, file = f"_multi_tensor_{module}", sys.modules[f"torch.optim.{module}"]
        update = getattr(file, name)
        monkeypatch.setattr(
            file, name, lambda *args, update=update, **more: (lists.append(len(args[0])), update(*args, **more))
        )
    for _ in range(3):
        gradients = [torch.randn(shape) for _ in ours]
        for slot, parameter, gradient in zip(slots, theirs, gradients, strict=True):
            slot.twin = Twin(slot.parameter, nn.Parameter)
            slot.twin.tensor.grad, parameter.grad = gradient.clone(), gradient
        step_some(optimizer, snapshot(optimizer), slots, hooks=False, plain=True)
        assert [torch.equal(slot.twin.tensor.grad, gradient) for slot, gradient in zip(slots, gradients)] == [True] * 3
        assert lists == ([3] if by_lists else [])
        lists.clear()
        plain.step()
        lists.clear()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        assert optimizer.state[mine].keys() == plain.state[other].keys()
        assert all(
            torch.equal(value, plain.state[other][key]) for key, value in optimizer.state[mine].items() if value is not None
        )


KINDS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": lambda parameters, **more: optim.SGD(parameters, lr=0.1, momentum=0.9, **more),
    "Adam": lambda parameters, **more: optim.Adam(parameters, lr=0.01, eps=1e-3, weight_decay=0.01, **more),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen", [None, True])
def test_types_that_lists_round_differently_have_the_bits_of_plain_training(
    kind: str, dtype: torch.dtype, chosen: bool | None
) -> None:
    """One by one, unless the user has chosen lists."""
    generator = torch.Generator().manual_seed(0)

    def make() -> torch.Tensor:
        return torch.randn(500, generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)

    ours = [nn.Parameter(make()) for _ in range(3)]
    theirs = copy.deepcopy(ours)
    optimizer, plain = KINDS[kind](ours, foreach=chosen), KINDS[kind](theirs, foreach=chosen)
    slots = [Slot(str(place), parameter, 0, False) for place, parameter in enumerate(ours)]
    for _ in range(6):
        gradients = [make() for _ in ours]
        for slot, parameter, gradient in zip(slots, theirs, gradients, strict=True):
            slot.twin = Twin(slot.parameter, nn.Parameter)
            slot.twin.tensor.grad, parameter.grad = gradient.clone(), gradient
        for some in (slots[:1], slots[1:]):
            step_some(optimizer, snapshot(optimizer), some, hooks=False, plain=True)
        plain.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


class OwnSGD(optim.SGD):
    """A user's, with ``per_parameter=True``."""


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("chosen", [None, True])
@pytest.mark.parametrize(
    ("make", "dtype", "other"),
    [
        (optim.SGD, torch.bfloat16, "first gradient"),
        (optim.SGD, torch.float16, "first gradient"),
        (OwnSGD, torch.bfloat16, "first gradient"),
        (optim.Adagrad, torch.bfloat16, "sparse"),
        (optim.Adagrad, torch.float16, "sparse"),
    ],
)
def test_bits_do_not_depend_on_what_is_updated_together(make: Any, dtype: torch.dtype, other: str, chosen: bool | None) -> None:
    """Which updates share a call depends on who reads what on a rank, and on time."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2, 500, 2, generator=generator).to(dtype)
    weights = []
    for together in (True, False):
        generator.manual_seed(1)
        parameters = [nn.Parameter(each.clone()) for each in start]
        optimizer = make(parameters, lr=0.1, foreach=chosen, **({"momentum": 0.9} if issubclass(make, optim.SGD) else {}))
        slots = [Slot(str(place), parameter, 0, other == "sparse") for place, parameter in enumerate(parameters)]
        for step in range(6):
            for place, slot in enumerate(slots):
                slot.twin = Twin(slot.parameter, nn.Parameter)
                gradient = torch.randn(500, 2, generator=generator).to(dtype)
                if other == "sparse" and place == 1:
                    slot.rows = Rows(torch.ones(500))
                    gradient = torch.sparse_coo_tensor(torch.arange(500)[None], gradient)
                slot.twin.tensor.grad = gradient
            there = slots if other == "sparse" or step >= 2 else slots[:1]
            for some in [there] if together else [[slot] for slot in there]:
                step_some(optimizer, snapshot(optimizer), some, hooks=False, plain=True)
        weights.append(parameters)
    assert all(torch.equal(mine, other) for mine, other in zip(*weights, strict=True))


def test_ranks_agree_although_one_of_them_reads_and_a_parameter_gets_its_first_gradient_late() -> None:
    def make() -> nn.Module:
        return nn.ParameterList(torch.randn(1500).bfloat16() for _ in range(2))

    def loop(data: Data, model: Any, optimizer: Any) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        for step in range(8):
            optimizer.zero_grad()
            factors = torch.randn(2, 1500, generator=generator)
            sum((weight.float() * factor).sum() for weight, factor in zip(list(model)[: 1 + step // 4], factors)).backward()
            optimizer.step()
            if 1 in data.ranks:
                model[0].detach().float().sum().item()  # it logs a weight
        optimizer.synchronize()
        return [parameter.detach().clone() for parameter in model]

    first, second = run(loop, model=make, config=MERGED)
    assert all(map(torch.equal, first, second))
