"""Training through commsched is plain synchronous training: every optimizer, model and delay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from commsched import SchedulerConfig
from commsched.plugins.torch import ScheduledOptimizer

from .training import MLP, MakeOptimizer, Task, mlp, numbers, require_equal, train_alone, train_scheduled
from .where import here

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda model: optim.SGD(model.parameters(), lr=0.1),
    "SGD nesterov": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "SGD foreach": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "Adam": lambda model: optim.Adam(model.parameters(), lr=0.01),
    "Adam amsgrad": lambda model: optim.Adam(model.parameters(), lr=0.01, amsgrad=True, weight_decay=1e-2),
    "Adam foreach": lambda model: optim.Adam(model.parameters(), lr=0.01, foreach=True),
    "Adam fused": lambda model: optim.Adam(model.parameters(), lr=0.01, fused=True),
    "AdamW": lambda model: optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    "RMSprop": lambda model: optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda model: optim.Adagrad(model.parameters(), lr=0.05),
    "groups": lambda model: optim.AdamW(
        [
            {"params": list(model.parameters())[::2], "lr": 0.02, "weight_decay": 0.0},
            {"params": list(model.parameters())[1::2]},
        ],
        lr=0.005,
    ),
    "lr tensor": lambda model: optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False),
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_plain_training(name: str, world_size: int) -> None:
    alone = train_alone(MLP, OPTIMIZERS[name], world_size)
    require_equal(train_scheduled(MLP, OPTIMIZERS[name], world_size), alone, MLP.tolerance)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["SGD nesterov", "Adam foreach", "AdamW", "groups"])
def test_delays_at_every_gate_change_nothing(name: str, world_size: int) -> None:
    alone = train_alone(MLP, OPTIMIZERS[name], world_size)
    by_rank = train_scheduled(MLP, OPTIMIZERS[name], world_size, delay_seconds=0.002)
    require_equal(by_rank, alone, MLP.tolerance)


class Tied(nn.Module):
    """Weights shared by two modules, one of them used twice, and a parameter of the container itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(10))
        self.first = nn.Linear(10, 10)
        self.twice = nn.Linear(10, 10)
        self.tied = nn.Linear(10, 10)
        self.tied.weight = self.first.weight
        self.head = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x + self.shift))
        return self.head(self.tied(torch.tanh(self.twice(torch.tanh(self.twice(x))))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(5, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x + self.position).mean(1))


class Functional(nn.Module):
    """No submodules: parameters used by functional calls only."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(10, 10) / 3 for _ in range(3))
        self.out = nn.Parameter(torch.randn(4, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(torch.einsum("bi,oi->bo", x, weight))
        return nn.functional.linear(x, self.out)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.GroupNorm(2, 4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(1))


MODELS = {
    "tied": Task(lambda: Tied().double(), numbers(10)),
    "LSTM": Task(lambda: Recurrent().double(), numbers(5, 6)),
    "TransformerEncoderLayer": Task(lambda: Transformer().double(), numbers(5, 8)),
    "functional": Task(lambda: Functional().double(), numbers(10)),
    "convolutional": Task(lambda: Convolutional().double(), numbers(1, 6, 6)),
    "channels_last": Task(lambda: Convolutional().double().to(memory_format=torch.channels_last), numbers(1, 6, 6)),
}


@pytest.mark.parametrize("delay_seconds", [0.0, 0.002])
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_plain_training(name: str, delay_seconds: float) -> None:
    # SGD: Adam divides rounding noise by itself where the true gradient is zero, as in attention's key bias.
    task, make_optimizer = MODELS[name], OPTIMIZERS["SGD nesterov"]
    by_rank = train_scheduled(task, make_optimizer, 2, delay_seconds=delay_seconds)
    require_equal(by_rank, train_alone(task, make_optimizer, 2), task.tolerance)


@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW"])
def test_float32(name: str) -> None:
    task = Task(lambda: mlp(torch.float32), numbers(10, dtype=torch.float32), tolerance=1e-5)
    by_rank = train_scheduled(task, OPTIMIZERS[name], 4, delay_seconds=0.001)
    require_equal(by_rank, train_alone(task, OPTIMIZERS[name], 4), task.tolerance)


def test_bfloat16_is_the_same_on_all_ranks() -> None:
    task = Task(lambda: mlp(torch.bfloat16), numbers(10, dtype=torch.bfloat16), tolerance=0.1)
    by_rank = train_scheduled(task, OPTIMIZERS["SGD"], 2, delay_seconds=0.001)
    require_equal(by_rank, train_alone(task, OPTIMIZERS["SGD"], 2), task.tolerance)


def test_two_dtypes_in_one_model() -> None:
    def make() -> nn.Module:
        class Mixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(10, 8).float(), nn.Linear(8, 4).double()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.b(self.a(x.float()).double())

        return Mixed()

    task = Task(make, numbers(10), tolerance=1e-5)
    by_rank = train_scheduled(task, OPTIMIZERS["SGD nesterov"], 2, delay_seconds=0.001)
    require_equal(by_rank, train_alone(task, OPTIMIZERS["SGD nesterov"], 2), task.tolerance)


class OwnOptimizer(optim.SGD):
    """Keeps a counter in its groups, as some third-party optimizers do: it must not be called twice per step."""

    def step(self, closure: Callable[..., Any] | None = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        super().step(closure)


def test_an_unknown_optimizer_is_called_once_per_step() -> None:
    by_rank = train_scheduled(MLP, lambda model: OwnOptimizer(model.parameters(), lr=0.1), 2, delay_seconds=0.001)
    alone = train_alone(MLP, lambda model: OwnOptimizer(model.parameters(), lr=0.1), 2)
    require_equal(by_rank, alone, MLP.tolerance)


def test_policy_and_partition_change_nothing_bitwise() -> None:
    results = [
        train_scheduled(MLP, OPTIMIZERS["AdamW"], 2, config=config)[0]
        for config in (SchedulerConfig(10_000, 10_000, "fifo"), SchedulerConfig(64, 64, "priority"))
    ]
    for name, weights in results[0].items():
        assert torch.equal(weights, results[1][name])


def test_changes_of_configuration_while_training_change_nothing_bitwise() -> None:
    def wrap(plain: optim.Optimizer, model: nn.Module, *, session: Any, **options: Any) -> ScheduledOptimizer:
        optimizer = ScheduledOptimizer(plain, model, session=session, **options)
        if session.rank == 0:
            sizes = iter([64, 5000, 200, 100, 1000] * 10)
            optimizer.register_step_post_hook(
                lambda *_: session.reconfigure(SchedulerConfig(size := next(sizes), 2 * size, "priority"))
            )
        return optimizer

    changed = train_scheduled(MLP, OPTIMIZERS["AdamW"], 2, delay_seconds=0.001, wrap=wrap)
    fixed = train_scheduled(MLP, OPTIMIZERS["AdamW"], 2)
    for name, weights in fixed[0].items():
        assert torch.equal(weights, changed[0][name]), name
        assert torch.equal(weights, changed[1][name]), name


def test_initial_state_is_that_of_rank_0_down_to_the_optimizer() -> None:
    """A checkpoint that only rank 0 has loaded reaches all ranks."""

    def wrap(plain: optim.Optimizer, model: nn.Module, *, session: Any) -> Any:
        if session.rank == 0:
            for _ in range(3):
                model(here(torch.ones(2, 10, dtype=torch.float64))).sum().backward()
                plain.step()
                plain.zero_grad()
            plain.param_groups[0]["lr"] = 0.003
        optimizer = ScheduledOptimizer(plain, model, session=session)
        started.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        return optimizer

    started: list[Any] = []
    train_scheduled(MLP, OPTIMIZERS["Adam amsgrad"], 2, wrap=wrap)
    (model_0, optimizer_0), (model_1, optimizer_1) = started
    assert all(torch.equal(model_0[name], model_1[name]) for name in model_0)
    assert optimizer_0["param_groups"] == optimizer_1["param_groups"]
    assert optimizer_0["param_groups"][0]["lr"] == 0.003
    for index, state in optimizer_0["state"].items():
        assert state.keys() == optimizer_1["state"][index].keys()
        assert float(state["step"]) == 3
        for key, value in state.items():
            assert torch.equal(value, optimizer_1["state"][index][key]), key
