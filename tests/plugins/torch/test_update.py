import copy
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn, optim

from commsched.plugins.torch.marked import Twin
from commsched.plugins.torch.slot import Slot
from commsched.plugins.torch.update import _StateOfTwins, snapshot, step_some


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
