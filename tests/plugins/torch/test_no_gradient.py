"""Reading the gradient of a parameter that has none asks first; nothing stays once it is known."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from commsched.plugins.torch import no_gradient
from commsched.plugins.torch.no_gradient import NoGradients

from .test_rounds import NotedLock


class Asked:
    def __init__(self) -> None:
        self.times = 0

    def ask(self) -> None:
        self.times += 1


def test_only_parameters_without_a_gradient_ask_and_only_until_it_is_known() -> None:
    asked, known_before = Asked(), len(no_gradient._awaited)
    having, lacking = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    having.grad = torch.ones(2)
    without = NoGradients(asked.ask)
    without.note([having, lacking])
    assert having.grad is not None
    assert asked.times == 0
    assert lacking.grad is None
    assert asked.times == 1
    without.forget()
    assert lacking.grad is None
    assert asked.times == 1
    assert type(lacking) is nn.Parameter
    assert len(no_gradient._awaited) == known_before


def test_threads_that_read_at_once_give_a_class_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, parameter, came = Asked(), nn.Parameter(torch.ones(2)), threading.Event()
    without = NoGradients(asked.ask)
    without.note([parameter])

    def forget() -> None:
        without.forget()
        came.set()

    second = threading.Thread(target=forget, daemon=True)

    class Awaited(dict[int, Any]):
        def pop(self, *key: Any) -> Any:
            if not second.ident:
                second.start()
                assert came.wait(60)
            return super().pop(*key)

    monkeypatch.setattr(no_gradient, "_awaited", Awaited(no_gradient._awaited))
    without._lock = NotedLock(without._lock, came)  # type: ignore[assignment]
    without.forget()
    second.join(60)
    assert type(parameter) is nn.Parameter


@pytest.mark.parametrize("make", [nn.Parameter, torch.Tensor.requires_grad_])
def test_a_copy_is_of_the_own_class_and_asks_nothing(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    asked, parameter = Asked(), make(torch.ones(2))
    own = type(parameter)
    without = NoGradients(asked.ask)
    without.note([parameter])  # type: ignore[list-item]
    copied = copy.deepcopy(parameter)
    assert type(copied) is own
    assert copied.grad is None
    assert asked.times == 0
    assert parameter.grad is None
    assert asked.times == 1
    without.forget()
    assert type(parameter) is own
