"""The same small training with and without commsched, to be compared."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from commsched import SchedulerConfig, Session
from commsched.control.end import ControlEnd
from commsched.core.interfaces import Transport
from commsched.plugins.torch import ScheduledOptimizer
from commsched.plugins.torch.update import is_of_torch
from commsched.session.local import local_sessions
from commsched.testing.check_plugin import Delayed
from commsched.testing.world import run_world

from .where import here

STEPS = 12
ROWS = 3  # per rank and step
SMALL = SchedulerConfig(partition_bytes=600, credit_bytes=1200)  # so that tensors are split, merged and queued

Weights = dict[str, torch.Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Task:
    """A model, its data and its loss. ``inputs`` is a tensor of [steps, world_size * ROWS, ...]."""

    def __init__(
        self, make_model: Callable[[], nn.Module], inputs: Callable[..., torch.Tensor], tolerance: float = 1e-9
    ) -> None:
        self.make_model = make_model
        self.inputs = inputs
        self.tolerance = tolerance

    def model(self, seed: int = 0) -> nn.Module:
        torch.default_generator.manual_seed(seed)  # not those of all devices too, which notes each time who asked for it
        model: nn.Module = here(self.make_model())
        return model

    def batches(self, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        rows = world_size * ROWS
        inputs, labels = self.inputs(STEPS, rows, generator), torch.randint(0, 4, (STEPS, rows), generator=generator)
        return here(inputs), here(labels)


def loss_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    outputs = model(inputs)
    return nn.functional.cross_entropy(outputs, labels)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)


def train_alone(task: Task, make_optimizer: MakeOptimizer, world_size: int) -> Weights:
    """Plain torch, one process, the joint batch."""
    model = task.model()
    optimizer = make_optimizer(model)
    scheduler = scheduler_of(optimizer)
    for inputs, labels in zip(*task.batches(world_size)):
        optimizer.zero_grad()
        loss_of(model, inputs, labels).backward()
        optimizer.step()
        scheduler.step()
    return copy.deepcopy(model.state_dict())


def train_scheduled(
    task: Task,
    make_optimizer: MakeOptimizer,
    world_size: int,
    *,
    delay_seconds: float = 0.0,
    config: SchedulerConfig = SMALL,
    wrap: Callable[..., Any] = ScheduledOptimizer,
    open_transport: Callable[[int, ControlEnd], Transport] | None = None,
) -> list[Weights]:
    """Each rank's weights. Ranks are threads and begin with different ones; sends, replies and updates are delayed."""

    def train(rank: int) -> Weights:
        with sessions[rank] as session:
            return _train_rank(task, models[rank], make_optimizer, session, delay_seconds, wrap)

    def delayed(transport: Transport) -> Transport:
        return Delayed(transport, transport.rank, delay_seconds)

    models = [task.model(seed=rank) for rank in range(world_size)]  # here: the random state of torch is that of the process
    sessions = local_sessions(
        world_size, config, open_transport=open_transport, wrap_transport=delayed if delay_seconds else None
    )
    return run_world(world_size, train, timeout_seconds=300)


def _train_rank(
    task: Task,
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    session: Session,
    delay_seconds: float,
    wrap: Callable[..., Any],
) -> Weights:
    plain = make_optimizer(model)
    if delay_seconds:
        rng = random.Random(session.rank)
        plain.register_step_pre_hook(lambda *_: time.sleep(rng.uniform(0, delay_seconds)))
        wrap = partial(wrap, per_parameter=is_of_torch(plain))  # in spite of the hook
    optimizer = wrap(plain, model, session=session)
    scheduler = scheduler_of(optimizer)
    mine = slice(session.rank * ROWS, (session.rank + 1) * ROWS)
    for inputs, labels in zip(*task.batches(session.world_size)):
        optimizer.zero_grad()
        loss_of(model, inputs[mine], labels[mine]).backward()
        optimizer.step()
        scheduler.step()
    return copy.deepcopy(model.state_dict())


def require_equal(by_rank: list[Weights], alone: Weights, tolerance: float) -> None:
    """Bitwise equal on all ranks, and within ``tolerance`` of ``alone``, relative to each tensor's largest weight."""
    for rank, weights in enumerate(by_rank):
        for name, expected in alone.items():
            assert torch.equal(weights[name], by_rank[0][name]), f"'{name}' differs between rank 0 and rank {rank}"
            difference = (weights[name] - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
            assert difference <= tolerance, f"'{name}' differs from plain training by {difference:.2e} of its largest"


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Callable[..., torch.Tensor]:
    """Inputs of ``shape`` per row."""
    return lambda steps, rows, generator: torch.randn(steps, rows, *shape, generator=generator, dtype=dtype)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


MLP = Task(mlp, numbers(10))
