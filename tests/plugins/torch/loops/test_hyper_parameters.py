"""Hyper-parameters count as of step(), whoever changes them and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from commsched.plugins.torch import ScheduledOptimizer

from .loop import Data, require_plain, run, train


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, second = model[0].parameters(), model[2].parameters()  # type: ignore[index]
    return torch.optim.SGD([{"params": first, "lr": 0.2}, {"params": second, "weight_decay": 0.1}], lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def sequential(optimizer: Any) -> lr_scheduler.LRScheduler:
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, 3)], milestones=[2])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.5**epoch, lambda epoch: 1 / (1 + epoch)]),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.7),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.3),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.3),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.3, total_iters=2),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.3, total_iters=3),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.6),
    "SequentialLR": sequential,
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 3),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.6)]
    ),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.2, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=6),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 4, 2.0),
    "SWALR": lambda optimizer: swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=3),
}
PUBLIC = [*(name for name in lr_scheduler.__all__ if name != "LRScheduler"), "SWALR"]


def scheduler_step(scheduler: Any, step: int) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step([1.0, 2.0, 0.5, 3.0, 4.0][step])
    else:
        scheduler.step()


@pytest.mark.filterwarnings("ignore:To get the last learning rate computed")  # ChainedScheduler, SequentialLR of themselves
@pytest.mark.parametrize("name", PUBLIC)
def test_schedulers(name: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        scheduler = SCHEDULERS[name](optimizer)
        rates = []
        for step in range(5):
            train(data, model, optimizer, steps=1, first=step)
            scheduler_step(scheduler, step)
            rates.append([[group["lr"], group["momentum"]] for group in optimizer.param_groups])
        return rates

    require_plain(loop, optimizer=two_groups)


def test_a_scheduler_that_cycles_the_betas_of_adam() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=6)
        for step in range(5):
            train(data, model, optimizer, steps=1, first=step)
            scheduler.step()
        return [group["betas"] for group in optimizer.param_groups]

    require_plain(loop, optimizer=adam)


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "SequentialLR", "ReduceLROnPlateau"])
def test_a_scheduler_made_before_the_optimizer_was_wrapped(name: str) -> None:
    """It holds the user's own optimizer, and must not take its late updates for a forgotten step()."""
    made: dict[int, Any] = {}

    def optimizer_and_scheduler(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = two_groups(model)
        made[id(model)] = SCHEDULERS[name](optimizer)
        return optimizer

    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        for step in range(5):
            train(data, model, optimizer, steps=1, first=step)
            scheduler_step(made[id(model)], step)
        return made[id(model)].get_last_lr()

    require_plain(loop, optimizer=optimizer_and_scheduler)


def test_a_scheduler_that_steps_first() -> None:
    """As code from before PyTorch 1.1 does."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            scheduler.step()
            train(data, model, optimizer, steps=1, first=step)

    with pytest.warns(UserWarning, match="before `optimizer.step"):
        require_plain(loop, optimizer=two_groups)


def replace_in_groups(key: str, value: Any) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group[key] = value

    return change


CHANGES: dict[str, Callable[[Any], None]] = {
    "lr": replace_in_groups("lr", 0.02),
    "weight decay": replace_in_groups("weight_decay", 0.3),
    "momentum": replace_in_groups("momentum", 0.5),
    "maximize": replace_in_groups("maximize", True),
    "one group": lambda optimizer: optimizer.param_groups[1].update(lr=0.4),
}


@pytest.mark.parametrize(
    ("name", "when"), [("lr", "before backward"), ("lr", "before step"), *((name, "after step") for name in CHANGES)]
)
def test_hyper_parameters_changed_by_hand(name: str, when: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            if step == 1 and when == "before backward":
                CHANGES[name](optimizer)
            data.loss(model, step).backward()
            if step == 1 and when == "before step":
                CHANGES[name](optimizer)
            optimizer.step()
            if step == 1 and when == "after step":
                CHANGES[name](optimizer)

    require_plain(loop, optimizer=two_groups)


def test_a_learning_rate_that_is_a_tensor_changed_in_place() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            train(data, model, optimizer, steps=1, first=step)
            optimizer.param_groups[0]["lr"].mul_(0.1)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)

    require_plain(loop, optimizer=make)


def test_betas_that_are_tensors_changed_in_place() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(4):
            train(data, model, optimizer, steps=1, first=step)
            optimizer.param_groups[0]["betas"][0].fill_(0.5 if step % 2 else 0.9)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        betas = (torch.tensor(0.9), torch.tensor(0.99))
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), betas=betas, foreach=False)

    require_plain(loop, optimizer=make)


def test_hyper_parameters_within_others_are_those_of_step() -> None:
    """Of an optimizer from elsewhere, which treats each parameter alone."""

    class Scaled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad * group["scales"]["all"][0])

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        if isinstance(optimizer, ScheduledOptimizer):
            optimizer.detach()
            optimizer = ScheduledOptimizer(optimizer.optimizer, model, session=data.session, per_parameter=True)
        for step in range(3):
            train(data, model, optimizer, steps=1, first=step)
            optimizer.param_groups[0]["scales"]["all"][0].mul_(0.5)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Scaled([{"params": model.parameters(), "scales": {"all": [torch.tensor(0.1)]}}], lr=0.1)

    require_plain(loop, optimizer=make)


def test_hyper_parameters_that_are_tensors_begin_as_rank_0_s() -> None:
    made: list[float] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        made.append(0.9 - 0.1 * len(made))
        betas = (torch.tensor(made[-1]), torch.tensor(0.99))
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), betas=betas, foreach=False)

    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        betas = optimizer.param_groups[0]["betas"]
        assert isinstance(betas, tuple)
        train(data, model, optimizer)
        return [[beta.item() for beta in betas], [parameter.detach().clone() for parameter in model.parameters()]]

    (betas, weights), (other_betas, other_weights) = run(loop, optimizer=make)
    assert betas == other_betas
    assert all(map(torch.equal, weights, other_weights))


def test_a_learning_rate_that_is_huge_right_after_step_spoils_nothing() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        train(data, model, optimizer, steps=1)
        optimizer.param_groups[0]["lr"] = 1e9
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.param_groups[0]["lr"] = 0.1
        return weights

    require_plain(loop)
