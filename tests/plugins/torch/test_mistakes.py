"""Arguments that do not belong together are named, whether there are other ranks or not."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commsched
from commsched.plugins.torch import ScheduledOptimizer
from commsched.plugins.torch.checks import require_plain as require_plain_model

from .loops.loop import Data, mlp, require_plain, sgd, train


def _of_a_copy(model: nn.Module) -> Any:
    return sgd(model), copy.deepcopy(model)


MISTAKES: dict[str, tuple[Callable[[nn.Module], tuple[Any, Any]], type[Exception], str]] = {
    "swapped": (
        lambda model: (model, sgd(model)),
        TypeError,
        r"the arguments are swapped: it is ScheduledOptimizer\(optimizer, model\)",
    ),
    "two models": (lambda model: (model, model), TypeError, "a Sequential is not an optimizer: it is"),
    "a scheduler": (
        lambda model: (torch.optim.lr_scheduler.StepLR(sgd(model), 1), model),
        TypeError,
        "a StepLR is not an optimizer: it has no param_groups",
    ),
    "parameters": (lambda model: (sgd(model), model.parameters()), TypeError, "a generator is not a torch.nn.Module: give"),
    "a list of models": (
        lambda model: (sgd(model), [model]),
        TypeError,
        "a list is not a torch.nn.Module: .*torch.nn.ModuleList",
    ),
    "of another model": (
        _of_a_copy,
        commsched.ConfigError,
        r"none of the optimizer's parameters \(param_groups\[0\]\['params'\]\[0\] \[8, 4\], .* and 1 more\) belongs to the Seq",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_belong_together_is_refused_before_the_session_is_opened(name: str) -> None:
    arguments, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        ScheduledOptimizer(*arguments(mlp()))


def test_some_parameters_that_the_model_does_not_have_are_averaged_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """A loss that has parameters, say."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
        scales[id(model)] = scale
        return torch.optim.SGD([*model.parameters(), scale], lr=0.1)

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        scale = scales[id(model)]
        train(data, lambda x: model(x) * scale, optimizer)
        return scale

    scales: dict[int, nn.Parameter] = {}
    with caplog.at_level(logging.WARNING, "commsched"):
        require_plain(loop, optimizer=make)
    (warning,) = [record.getMessage() for record in caplog.records if "do not belong" in record.getMessage()]
    assert warning.startswith(
        "1 of the optimizer's 5 parameters do not belong to the Sequential given with it: param_groups[0]['params'][4] [2]"
    )


def test_who_keeps_ddp_is_told_of_the_hook() -> None:
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    with pytest.raises(commsched.UnsupportedError, match=r"model is wrapped in DistributedDataParallel: .*torch\.comm_hook"):
        require_plain_model(wrapped, [])
