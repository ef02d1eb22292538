"""Digests of hyper-parameters: equal where the update is."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch

from commsched.plugins.torch import compared
from commsched.plugins.torch.compared import HyperParameters, by_name, compared_keys


class Mode(Enum):
    PLAIN = 0
    SIGN = 1


def digest(**group: Any) -> float:
    return HyperParameters(group.keys()).digest([group])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.1, 0.1 + 2**-56),
        (0.1, torch.tensor(0.1)),  # of 32 bits
        ((0.9, 0.99), (0.9, 0.98)),
        (True, False),
        (None, 0.0),
        (float("inf"), 1e308),
        (None, 1.0),
        ("plain", "sign"),
        (["plain", None], ["sign", None]),
        (Mode.PLAIN, Mode.SIGN),
        ({Mode.PLAIN: 1.0}, {Mode.SIGN: 1.0}),
        ({"all": [1.0]}, {"all": [2.0]}),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
    ],
)
def test_what_differs_has_another_digest(one: Any, other: Any) -> None:
    assert digest(lr=one) != digest(lr=other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.0, -0.0),
        ((0.9, 0.99), [0.9, 0.99]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (0.5, torch.tensor(0.5)),
        (float("nan"), torch.tensor(float("nan"))),
        (lambda step: step, lambda step: 2 * step),
        ({object(): 1.0}, {object(): 1.0}),
        ({torch.zeros(1): 1.0}, {torch.ones(1): 1.0}),
        (10**400, 10**400),
    ],
)
def test_what_makes_the_same_update_has_the_same_digest(one: Any, other: Any) -> None:
    assert digest(lr=one) == digest(lr=other)


def test_only_groups_that_changed_are_digested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[Any] = []
    comparable = compared._comparable
    monkeypatch.setattr(compared, "_comparable", lambda value: digested.append(value) or comparable(value))
    digests = HyperParameters({"lr"})
    first = digests.digest([{"lr": 0.1}, {"lr": 0.2}])
    assert digested == [0.1, 0.2]
    assert digests.digest([{"lr": 0.1}, {"lr": 0.2}]) == first
    assert digested == [0.1, 0.2]
    second = digests.digest([{"lr": 0.1}, {"lr": 0.3}])
    assert digested == [0.1, 0.2, 0.3]
    assert second != first
    assert digests.digest([{"lr": 0.1}, {"lr": 0.2}]) == first
    assert digests.digest([{"lr": 0.1}]) != first
    assert digests.digest([{"lr": 0.1}, {"lr": 0.2}]) == first


def test_groups_that_did_not_change_are_digested_again_when_the_keys_grow() -> None:
    """Otherwise the digest would depend on when a group last changed, which may differ between ranks."""
    keys, groups = {"lr"}, [{"lr": 0.1, "factor": 2}]
    digests = HyperParameters(keys)
    digests.digest(groups)
    keys.add("factor")
    assert digests.digest(groups) == HyperParameters(keys).digest(groups)


def test_a_tensor_that_changes_in_place_is_digested_again() -> None:
    digests, rate = HyperParameters({"lr"}), torch.tensor(0.1)
    first = digests.digest([{"lr": rate.clone()}])
    rate.mul_(0.5)
    assert digests.digest([{"lr": rate.clone()}]) != first
    rate.fill_(0.1)
    assert digests.digest([{"lr": rate.clone()}]) == first


def test_names_are_those_of_the_groups() -> None:
    groups = [{"lr": 1, "name": "a"}, {"lr": torch.tensor(2.0), "betas": (0.9, 0.5)}]
    assert by_name(groups, {"lr", "betas"}) == {
        "param_groups[0]['lr']": 1.0,
        "param_groups[1]['lr']": 2.0,
        "param_groups[1]['betas']": [0.9, 0.5],
    }


def test_what_the_update_cannot_depend_on_is_each_ranks_own() -> None:
    group = {"params": [], "lr": 0.1, "name": "front", "note": None, "scales": {"all": [torch.tensor(0.1)]}, "empty": []}
    optimizer = torch.optim.SGD([torch.zeros(1)])
    keys = compared_keys(optimizer, [group, {"factor": 2}])
    assert keys == {*optimizer.defaults, "scales", "factor"}
    digests = HyperParameters(keys)
    assert digests.digest([group]) == digests.digest([{**group, "name": "rear", "loss": 0.5}])


def test_an_optimizer_from_elsewhere_may_depend_on_every_entry() -> None:
    class Own(torch.optim.SGD):
        pass

    optimizer = Own([torch.zeros(1)])
    keys = compared_keys(optimizer, [{"params": [], "factor": None}, {"mode": "plain", "scales": {"all": "unit"}}])
    assert keys == {*optimizer.defaults, "factor", "mode", "scales"}
