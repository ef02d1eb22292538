"""Training of workloads: by plain averaging in one process, and by one rank of several."""

from __future__ import annotations

import torch

from bench.workloads import Workload

STEPS = 5


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def average_plainly(workload: Workload, world_size: int) -> list[torch.Tensor]:
    """Weights after :data:`STEPS` steps, each with the average of the ranks' gradients."""
    model = workload.make_model()
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            (workload.loss(model, step, rank) / world_size).backward()
        optimizer.step()
    return weights(model)


def train_rank(workload: Workload, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        workload.loss(model, step, rank).backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def largest_difference(ours: list[torch.Tensor], reference: list[torch.Tensor], workload: Workload) -> float:
    """Relative to the largest change of any weight in training."""
    change = max((a - b).abs().max().item() for a, b in zip(reference, weights(workload.make_model()), strict=True))
    return max((a - b).abs().max().item() for a, b in zip(ours, reference, strict=True)) / change
