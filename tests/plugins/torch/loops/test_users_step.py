"""What the user's optimizer does in its step(), or has around it: once per step, with all averages in place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import commsched
from commsched.plugins.torch import ScheduledOptimizer

from .loop import Data, mlp, require_plain, run, sgd, train


def without_zeroing(data: Data, model: nn.Module, optimizer: Any) -> None:
    for step in range(4):
        data.loss(model, step).backward()
        optimizer.step()


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@torch.no_grad()
def decay(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


class ZeroesItself(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad()
        return loss


class Replaces(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad.sign() * 0.01 + parameter.grad * 0.9
        return super().step(closure)


def zeroed_by_hook(model: nn.Module) -> optim.Optimizer:
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda its, *_: its.zero_grad())
    return optimizer


def zeroes_itself(model: nn.Module) -> optim.Optimizer:
    return ZeroesItself(model.parameters(), lr=0.1)


def replaces(model: nn.Module) -> optim.Optimizer:
    return Replaces(model.parameters(), lr=0.1)


@pytest.mark.parametrize("make", [zeroed_by_hook, zeroes_itself, replaces])
def test_what_it_leaves_in_grad_stays(make: Callable[[Any], optim.Optimizer]) -> None:
    require_plain(without_zeroing, optimizer=make)


def test_zero_grad_after_step_wins_over_what_an_outstanding_update_leaves() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        if isinstance(optimizer, ScheduledOptimizer):
            optimizer.detach()
            optimizer = ScheduledOptimizer(optimizer.optimizer, model, session=data.session, per_parameter=True)
        for step in range(4):
            data.loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]

    require_plain(loop, optimizer=replaces)


class Moves(optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.data = parameter.grad * 0.5
        return super().step(closure)


@pytest.mark.parametrize("zeroing", [True, False])
def test_other_memory_that_it_gives_to_a_gradient_is_not_that_of_the_next(zeroing: bool) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        if isinstance(optimizer, ScheduledOptimizer):
            optimizer.detach()
            optimizer = ScheduledOptimizer(optimizer.optimizer, model, session=data.session, per_parameter=True)
        (train if zeroing else without_zeroing)(data, model, optimizer)

    require_plain(loop, optimizer=lambda model: Moves(model.parameters(), lr=0.1))


class Counts(optim.SGD):
    """Its counter is one of all parameters; another value is new, and stays the same."""

    def count(self, group: dict[str, Any]) -> float:
        group["k"] = group.get("k", 0) + 1
        return float(group["k"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            count, scale = self.count(group), group.setdefault("scale", 2.0)
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] * scale / count)


class CountsInPlace(Counts):
    def count(self, group: dict[str, Any]) -> float:
        group.setdefault("k", [torch.zeros(1)])[0].add_(1)
        return float(group["k"][0])


class Constant(Counts):
    def count(self, group: dict[str, Any]) -> float:
        return 1.0


def test_a_value_that_step_adds_to_a_group_and_leaves_is_kept() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> float:
        optimizer = _wrapped_per_parameter(data, model, optimizer)
        train(data, model, optimizer)
        optimizer.state_dict()  # waits for the updates
        return float(optimizer.param_groups[0]["scale"])

    require_plain(loop, optimizer=lambda model: Constant(model.parameters(), lr=0.1))


def test_hooks_may_set_what_they_like_per_parameter() -> None:
    def slower(optimizer: Any, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.05

    def hooked(model: nn.Module) -> optim.Optimizer:
        made = Constant(model.parameters(), lr=0.1)
        made.register_step_pre_hook(slower)
        return made

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, _wrapped_per_parameter(data, model, optimizer))
        optimizer.param_groups[0]["lr"] = 0.05  # a copy of the optimizer has it, where there are several ranks

    require_plain(loop, optimizer=hooked)


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("kind", [Counts, CountsInPlace])
def test_a_counter_of_all_parameters_is_refused_per_parameter(kind: type[Counts], hooks: bool) -> None:
    def counts(model: nn.Module) -> optim.Optimizer:
        made = kind(model.parameters(), lr=0.1)
        if hooks:
            made.register_step_post_hook(lambda *_: None)
        return made

    require_plain(train, optimizer=counts)
    with pytest.raises(
        commsched.CommschedError, match=r"step\(\) has changed 'k' in param_groups.*per_parameter=True cannot be used"
    ):
        run(_train_per_parameter, optimizer=counts)


class Rebinds(optim.SGD):
    def new_data(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.data - 0.1 * parameter.grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.new_data(parameter)


class RebindsTransposed(Rebinds):
    def new_data(self, parameter: torch.Tensor) -> torch.Tensor:
        return super().new_data(parameter).t() if parameter.ndim == 2 else super().new_data(parameter)


class RebindsInAnotherType(Rebinds):
    def new_data(self, parameter: torch.Tensor) -> torch.Tensor:
        return super().new_data(parameter).float()


def _wrapped_per_parameter(data: Data, model: nn.Module, optimizer: Any) -> Any:
    if not isinstance(optimizer, ScheduledOptimizer):
        return optimizer
    optimizer.detach()
    return ScheduledOptimizer(optimizer.optimizer, model, session=data.session, per_parameter=True)


def _train_per_parameter(data: Data, model: nn.Module, optimizer: Any) -> None:
    train(data, model, _wrapped_per_parameter(data, model, optimizer))


def square() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()


@pytest.mark.parametrize("rebinds", [Rebinds, RebindsTransposed])
def test_parameters_that_it_gives_other_memory_keep_their_updates(rebinds: type[Rebinds]) -> None:
    require_plain(_train_per_parameter, model=square, optimizer=lambda model: rebinds(model.parameters(), lr=0.1))


def test_parameters_to_which_it_gives_another_type_are_refused_by_name() -> None:
    with pytest.raises(commsched.CommschedError, match=r"has given parameter '\d\.\w+' another shape or type"):
        run(_train_per_parameter, optimizer=lambda model: RebindsInAnotherType(model.parameters(), lr=0.1))


def hooks_before(model: nn.Module, optimizer: Any) -> None:
    optimizer.register_step_pre_hook(lambda *_: clip(model))
    optimizer.register_step_post_hook(lambda *_: decay(model))


def patched(model: nn.Module, optimizer: Any) -> None:
    original = optimizer.step

    def step(_: Any, closure: Any = None) -> Any:
        clip(model)
        loss = original(closure)
        decay(model)
        return loss

    optimizer.step = MethodType(step, optimizer)


def patched_and_scheduled(model: nn.Module, optimizer: Any) -> None:
    patched(model, optimizer)
    optim.lr_scheduler.StepLR(optimizer, 1)  # whose wrapper is around the other one


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("when", ["before wrapping", "before the first step", "later"])
@pytest.mark.parametrize("put_around", [hooks_before, patched, patched_and_scheduled])
def test_what_is_around_it_runs_once_per_step(put_around: Callable[[Any, Any], None], when: str, closure: bool) -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        optimizer = sgd(model)
        if when == "before wrapping":
            put_around(model, optimizer)
        return optimizer

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for number in range(4):
            if (when, number) in [("before the first step", 0), ("later", 2)]:
                put_around(model, getattr(optimizer, "optimizer", optimizer))
            if closure:
                step_with_closure(data, model, optimizer, number)
            else:
                train(data, model, optimizer, 1, number)

    require_plain(loop, optimizer=make)


def step_with_closure(data: Data, model: nn.Module, optimizer: Any, number: int) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = data.loss(model, number)
        loss.backward()
        return loss

    return optimizer.step(closure)


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
@pytest.mark.parametrize("make", [sgd, zeroes_itself])
def test_hooks_of_all_optimizers_run_around_the_users(register: Callable[..., Any], make: Callable[[Any], Any]) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> int:
        calls: list[optim.Optimizer] = []
        users = getattr(optimizer, "optimizer", optimizer)
        handle = register(lambda its, *_: calls.append(its))
        try:
            train(data, model, optimizer)
        finally:
            handle.remove()
        assert not any(isinstance(its, ScheduledOptimizer) for its in calls)
        return sum(its is users for its in calls)

    # torch's own step() within that of a subclass may have hooks too
    require_plain(loop if make is sgd else lambda *given: loop(*given) >= 3, optimizer=make)


def test_learning_rate_schedulers_are_nothing_around_it() -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        optimizer = sgd(model)
        optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        train(data, model, optimizer)
        return getattr(optimizer, "_why_step_waits", None)

    assert run(loop, optimizer=make) == [None, None]


def test_a_step_that_waits_for_hooks_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "commsched"):
        run(train, optimizer=zeroed_by_hook)
    said = [record.getMessage() for record in caplog.records if "step() waits" in record.getMessage()]
    assert said == ["SGD has hooks, or a wrapper around its step(): step() waits for all averages from now on"]


# --- closures ---


class Sam(optim.Optimizer):
    """Sharpness-aware minimization: its closure is called where the last gradient points to."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        before = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.add_(parameter.grad * 0.05 / norm)
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        for parameter, weights in zip(parameters, before):
            parameter.copy_(weights - 0.1 * parameter.grad)
        return loss


class Twice(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            super().step()
        return loss


class Polyak(optim.Optimizer):
    """Its step is as long as the loss says: that of all ranks."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * float(loss) * 0.1)
        return loss


@pytest.mark.parametrize("kind", [Sam, Twice, Polyak])
def test_a_closure_is_called_as_often_as_an_optimizer_from_elsewhere_likes(kind: type) -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return Twice(model.parameters(), lr=0.1, momentum=0.9) if kind is Twice else kind(model.parameters())

    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        losses = []
        for number in range(3):
            if kind is Sam:
                data.loss(model, number).backward()
            losses.append(step_with_closure(data, model, optimizer, number).item())
        return losses

    require_plain(loop, optimizer=make)


@pytest.mark.parametrize("loss", [None, 2.0, "a word"])
def test_a_closure_may_return_anything(loss: Any) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            data.loss(model).backward()
            return loss

        return optimizer.step(closure)

    require_plain(loop, optimizer=lambda model: Twice(model.parameters(), lr=0.1))


def test_the_number_of_calls_may_not_depend_on_the_rank() -> None:
    class AsOftenAsItsRank(optim.SGD):
        times = 1

        def step(self, closure: Any = None) -> Any:
            for _ in range(self.times):
                with torch.enable_grad():
                    closure()
                super().step()

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        optimizer.optimizer.times += data.ranks[0]
        for number in range(2):
            step_with_closure(data, model, optimizer, number)

    with pytest.raises(commsched.CommschedError):
        run(loop, model=mlp, optimizer=lambda model: AsOftenAsItsRank(model.parameters(), lr=0.1))


def test_a_closure_that_raises_on_all_ranks_may_be_called_again() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        def too_large() -> Any:
            data.loss(model).backward()
            raise MemoryError("too large")

        for number in range(3):
            if number == 1:
                with pytest.raises(MemoryError):
                    optimizer.step(too_large)
            step_with_closure(data, model, optimizer, number)

    require_plain(loop, optimizer=lambda model: Twice(model.parameters(), lr=0.1))
