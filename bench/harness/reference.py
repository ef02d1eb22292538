"""The reference weights: plain averaging, in rank order, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..workloads.workload import Workload

#: Learning rate of plain SGD in every system.
LEARNING_RATE = 0.01


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of the parameters of ``model``."""
    return [parameter.detach().clone() for parameter in model.parameters()]


@torch.no_grad()
def put_weights(model: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
    """The inverse of :func:`weights_of`."""
    for parameter, values in zip(model.parameters(), weights, strict=True):
        parameter.copy_(values)


def plain_averaging(workload: Workload, steps: int, ranks: int) -> list[torch.Tensor]:
    """The weights after ``steps`` steps of SGD with the average of the gradients of ``ranks`` ranks."""
    workload = workload.untimed()
    model = workload.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            workload.loss(model, step, rank).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= ranks
        optimizer.step()
    return weights_of(model)


@torch.no_grad()
def largest_difference(model: torch.nn.Module, wanted: Sequence[torch.Tensor], initial: Sequence[torch.Tensor]) -> float:
    """Largest difference of the weights of ``model`` from ``wanted``, relative to the largest change that training made. NaN
    counts as inf."""
    found = list(model.parameters())
    change = max((after - before).abs().max().item() for after, before in zip(wanted, initial, strict=True))
    differences = [(each - good).abs().max().item() for each, good in zip(found, wanted, strict=True)]
    if not all(difference <= float("inf") for difference in differences) or not 0 < change < float("inf"):
        return float("inf")
    return max(differences) / change
