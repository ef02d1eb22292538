"""Every optimizer of torch.optim, and several of them at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from commsched.plugins.torch import ScheduledOptimizer

from .loop import Data, batch, mlp, require_plain, run, train

ELSEWHERE = (optim.LBFGS, optim.SparseAdam)  # one is refused, one needs sparse gradients
PUBLIC = [
    name
    for name, value in vars(optim).items()
    if isinstance(value, type) and issubclass(value, optim.Optimizer) and value not in (optim.Optimizer, *ELSEWHERE)
]

MORE: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adam maximize": lambda parameters: optim.Adam(parameters, lr=0.01, maximize=True),
    "Adam decoupled": lambda parameters: optim.Adam(parameters, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "NAdam decoupled": lambda parameters: optim.NAdam(parameters, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam decoupled": lambda parameters: optim.RAdam(parameters, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam foreach": lambda parameters: optim.RAdam(parameters, lr=0.01, foreach=True),
    "ASGD averaging": lambda parameters: optim.ASGD(parameters, lr=0.1, t0=2, weight_decay=0.1),
    "Adagrad fused": lambda parameters: optim.Adagrad(parameters, lr=0.05, fused=True),
    "SGD fused": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "Adafactor decay": lambda parameters: optim.Adafactor(parameters, lr=0.1, weight_decay=0.1, d=1.5),
}


def matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False)).double()


@pytest.mark.parametrize("name", [*PUBLIC, *MORE])
def test_every_optimizer_of_torch(name: str) -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return MORE[name](model.parameters()) if name in MORE else getattr(optim, name)(model.parameters(), lr=0.01)

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, optimizer, steps=4)
        assert getattr(optimizer, "_why_step_waits", None) is None

    if name == "Muon":  # for matrices only, and orthogonalises them in 16 bits
        require_plain(loop, model=matrices, optimizer=make, tolerance=1e-3)
    else:
        require_plain(loop, optimizer=make)


class ClippedByItself(optim.SGD):
    """Uses all gradients at once, and counts its steps in its groups, as optimizers from elsewhere may."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
            nn.utils.clip_grad_norm_(group["params"], 0.05)
        super().step(closure)


def test_an_optimizer_from_elsewhere_is_called_once_per_step_with_all_averages() -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return ClippedByItself(model.parameters(), lr=0.1, momentum=0.9)

    require_plain(train, optimizer=make)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


def pair() -> nn.Module:
    return Pair().double()


def of_encoder(model: Any) -> optim.Optimizer:
    return optim.SGD(model.encoder.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("given", ["whole", "parts"])
@pytest.mark.parametrize("order", ["encoder first", "decoder first"])
def test_two_optimizers_of_one_loss(order: str, given: str) -> None:
    def loop(data: Data, model: Any, first: Any) -> Any:
        whole = model if given == "whole" else model.decoder
        second = data.scheduled(optim.Adam(model.decoder.parameters(), lr=0.01), whole)
        optimizers = [first, second] if order == "encoder first" else [second, first]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            data.loss(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
        return second.state_dict()

    require_plain(loop, model=pair, optimizer=of_encoder)


def test_two_optimizers_that_step_at_different_intervals() -> None:
    """The one that does not step drops what it has."""

    def loop(data: Data, model: Any, first: Any) -> Any:
        second = data.scheduled(optim.Adam(model.decoder.parameters(), lr=0.01), model.decoder)
        for step in range(4):
            first.zero_grad()
            second.zero_grad()
            data.loss(model, step).backward()
            first.step()
            if step % 2:
                second.step()
        return second.state_dict()

    require_plain(loop, model=pair, optimizer=of_encoder)


def test_two_models_of_one_optimizer() -> None:
    """The optimizer is wrapped with one of them, and has the other's parameters all the same."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 8).double()
            self.apart = [nn.Linear(8, 2).double()]  # in a list: not registered

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.apart[0](torch.tanh(self.body(x)))

    def make(encoder: Any) -> optim.Optimizer:
        return optim.SGD([*encoder.parameters(), *encoder.apart[0].parameters()], lr=0.1, momentum=0.9)

    def loop(data: Data, encoder: Any, optimizer: Any) -> Any:
        train(data, encoder, optimizer)
        return [parameter.detach().clone() for parameter in encoder.apart[0].parameters()]

    require_plain(loop, model=Encoder, optimizer=make)


def test_two_models_trained_in_turn() -> None:
    def loop(data: Data, model: Any, first: Any) -> Any:
        second = data.scheduled(optim.SGD(model[1].parameters(), lr=0.05, momentum=0.5), model[1])
        for step in range(4):
            index, optimizer = (0, first) if step % 2 == 0 else (1, second)
            train(data, model[index], optimizer, steps=1, first=step)
        return second.state_dict()

    def two() -> nn.Module:
        return nn.ModuleList([mlp(), mlp()])

    require_plain(loop, model=two, optimizer=lambda model: optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9))


def test_a_teacher_that_follows_its_student() -> None:
    """The teacher is no optimizer's: an average of the student, which its loss reads in each step."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        student, teacher = model
        for step in range(3):
            optimizer.zero_grad()

            def loss_of_rank(rank: int, step: int = step) -> torch.Tensor:
                with torch.no_grad():
                    target = teacher(batch(rank, step))
                return (student(batch(rank, step)) - target).square().mean()

            data.mean(loss_of_rank).backward()
            optimizer.step()
            with torch.no_grad():
                for mean, parameter in zip(teacher.parameters(), student.parameters()):
                    mean.lerp_(parameter, 0.2)

    def two() -> nn.Module:
        return nn.ModuleList([mlp(), mlp()])

    require_plain(loop, model=two, optimizer=lambda model: optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9))


def test_a_model_may_be_wrapped_again_after_detach() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        train(data, model, optimizer, steps=1)
        if isinstance(optimizer, ScheduledOptimizer):
            optimizer.detach()
        second = data.scheduled(optim.SGD(model.parameters(), lr=0.05), model)
        train(data, model, second, steps=2, first=1)
        return second.state_dict()

    require_plain(loop)


def test_after_detach_it_is_plain_torch_on_this_rank_alone() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        train(data, model, optimizer, steps=1)
        if isinstance(optimizer, ScheduledOptimizer):
            optimizer.detach()
        for step in range(1, 3):
            optimizer.zero_grad()
            model(batch(0, step)).square().mean().backward()  # every rank the same
            optimizer.step()

    require_plain(loop)
    assert all(type(p) is nn.Parameter for p in run(lambda data, model, optimizer: optimizer.detach() or model)[0].parameters())


def test_a_loop_that_goes_on_with_the_optimizer_that_was_wrapped() -> None:
    """Someone kept it in a list: its gradients are averages all the same, only its step() waits for all of them."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, getattr(optimizer, "optimizer", optimizer))

    require_plain(loop)


class Lookahead(optim.Optimizer):
    """As that of ``torch_optimizer``: it does not call ``Optimizer.__init__``, so it has none of its attributes."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for fast in group["params"]:
                    slow = self.state[fast].setdefault("slow", fast.detach().clone())
                    slow.lerp_(fast.detach(), 0.5)
                    fast.data.copy_(slow)
            group["counter"] = (group["counter"] + 1) % 2
        return loss

    def state_dict(self) -> Any:
        return {
            "fast": self.optimizer.state_dict(),
            "slow": [self.state[p].get("slow") for p in self.param_groups[0]["params"]],
        }


def test_an_optimizer_that_does_not_call_that_of_its_class() -> None:
    require_plain(
        lambda data, model, optimizer: train(data, model, optimizer),
        optimizer=lambda model: Lookahead(optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    )


class Floats(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float()


@pytest.mark.parametrize("eps", [(None, 1e-3), (1e-7, 1e-3)])
def test_step_waits_for_all_averages_if_adafactor_takes_its_epsilon_from_the_first_parameter_of_a_group(
    eps: tuple[float | None, float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "commsched")

    def mixed() -> nn.Module:
        model = mlp()
        return nn.Sequential(model[0], nn.Tanh(), Floats(), model[2].float())

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad()
            (1e-3 * data.loss(model, step)).backward()
            optimizer.step()

    require_plain(
        loop, model=mixed, optimizer=lambda model: optim.Adafactor(model.parameters(), lr=0.1, eps=eps), tolerance=1e-6
    )
    said = sum("takes eps from the type of a group's first parameter" in message for message in caplog.messages)
    assert said == (1 if eps[0] is None else 0)
