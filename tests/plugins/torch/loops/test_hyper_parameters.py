"""Hyper-parameters count as of step(), whoever changes them and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from commsched.core.errors import RanksDiverged
from commsched.plugins.torch import ScheduledOptimizer
from commsched.plugins.torch.guard import unguarded
from commsched.plugins.torch.marked import unnoticed

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


def test_two_steps_with_the_same_gradients_have_each_its_own() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        data.loss(model).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()

    require_plain(loop, optimizer=two_groups)


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


# --- they must be the same on all ranks ---


def tensor_rates(model: nn.Module) -> torch.optim.Optimizer:
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), betas=betas, foreach=False)


def two_groups_with_objects(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = two_groups(model)
    optimizer.param_groups[0]["schedule"] = lambda step: step  # is another object on each rank
    optimizer.param_groups[0]["scale"] = np.float32(0.5)
    return optimizer


class Own(torch.optim.SGD):
    """Its update may depend on any entry of its groups."""


def own_with_options(model: nn.Module) -> torch.optim.Optimizer:
    """It has options without a default that are no numbers when it is wrapped."""
    return Own([{"params": model.parameters(), "factor": None, "mode": "plain"}], lr=0.1)


def in_place(optimizer: Any) -> None:
    optimizer.param_groups[0]["betas"][1].mul_(0.5)


DIFFERENCES: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], Callable[[Any], Any], str]] = {
    "rate": (
        two_groups_with_objects,
        lambda o: o.param_groups[1].update(lr=0.4),
        r"\[1\]\['lr'\]' is 0.05 on rank 0 but 0.4 on",
    ),
    "flag": (two_groups, replace_in_groups("maximize", True), r"\[0\]\['maximize'\]' is 0.0 on rank 0 but 1.0 on"),
    "tensor": (tensor_rates, in_place, r"\[0\]\['betas'\]' is \[0.89\d+, 0.99\d*\] on rank 0 but \[0.89\d+, 0.49\d+\] on"),
    "infinite": (two_groups, replace_in_groups("lr", float("inf")), r"\[0\]\['lr'\]' is 0.2 on rank 0 but \"inf\" on"),
    "own": (
        two_groups_with_objects,
        lambda o: o.param_groups[0].update(scale=2),
        r"\[0\]\['scale'\]' is 0.5 on rank 0 but 2.0 on rank 1",
    ),
    "None": (own_with_options, replace_in_groups("factor", 2.0), r"\[0\]\['factor'\]' is null on rank 0 but 2.0 on rank 1"),
    "string": (
        own_with_options,
        replace_in_groups("mode", "sign"),
        r"\['mode'\]' is \"plain\" on rank 0 but \"sign\" on rank 1",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_hyper_parameter_of_one_rank_ends_the_job_before_the_update(name: str) -> None:
    make, change, message = DIFFERENCES[name]
    weights: dict[int, list[torch.Tensor]] = {}

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, optimizer, steps=2)
        if 1 in data.ranks:
            change(optimizer)

        def update() -> None:
            train(data, model, optimizer, steps=1)
            optimizer.synchronize()

        with pytest.raises(RanksDiverged, match=rf"hyper-parameters.* after step 2.*{message}"):
            update()
        with unguarded(), unnoticed():
            weights[data.ranks[0]] = [parameter.detach().clone() for parameter in model.parameters()]
        raise Stop

    class Stop(Exception):
        pass

    with pytest.raises(Stop):
        run(loop, optimizer=make)
    assert all(map(torch.equal, weights[0], weights[1]))


@pytest.mark.parametrize("make", [two_groups_with_objects, own_with_options])
def test_what_the_update_cannot_depend_on_may_be_each_ranks_own(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            train(data, model, optimizer, steps=1, first=step)
            optimizer.param_groups[0].update(name=f"front of {data.ranks}", last_loss=float(step + data.ranks[-1]))
        optimizer.synchronize()

    run(loop, optimizer=make)


def test_a_scheduler_that_goes_by_each_ranks_own_loss_is_named() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        for step in range(4):
            train(data, model, optimizer, steps=1, first=step)
            scheduler.step(2.0 if 1 in data.ranks and step == 1 else 1.0 / (step + 1))
        optimizer.synchronize()

    with pytest.raises(RanksDiverged, match=r"after step 2: 'param_groups\[0\]\['lr'\]' is 0.2 on rank 0 but 0.1 on rank 1 "):
        run(loop, optimizer=two_groups)


def test_a_batch_skipped_on_one_rank_while_the_rate_goes_by_batch_is_named() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        scheduler = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        for step in range(4):
            if not (step == 1 and 1 in data.ranks):
                train(data, model, optimizer, steps=1, first=step)
            scheduler.step()

    with pytest.raises(RanksDiverged, match=r"differ between ranks after step 1: 'param_groups\[0\]\['lr'\]' is "):
        run(loop)


def test_those_of_the_second_of_two_optimizers_are_named_as_such() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        optimizer.detach()
        for number, layer in enumerate((model[0], model[2])):
            rate = 0.1 * (1 + number * data.ranks[0])
            scheduled = ScheduledOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), model, session=data.session)
            scheduled.param_groups[0]["lr"] = rate
            data.loss(model).backward()
            scheduled.step()
            scheduled.synchronize()

    with pytest.raises(RanksDiverged, match=r"^hyper-parameters of optimizer 3 differ .* is 0.1 on rank 0 but 0.2 on rank 1\n"):
        run(loop)


def test_what_is_replaced_by_those_of_rank_0_is_named(caplog: pytest.LogCaptureFixture) -> None:
    made: list[float] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = two_groups(model)
        if made:
            optimizer.param_groups[1].update(lr=0.7, momentum=0.1)
        made.append(0.0)
        return optimizer

    run(train, optimizer=make)
    said = [record.getMessage() for record in caplog.records if "replaced" in record.getMessage()]
    assert len(said) == 1
    assert said[0].split(": ", 2)[0] in ("rank 0", "rank 1")
    assert "those of rank 0: param_groups[1]['lr'] " in said[0]
    assert "param_groups[1]['momentum'] " in said[0]
