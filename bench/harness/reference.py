"""Training without a system under test: the reference weights, and layer times without communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from commsched import Session

from ..workloads import Workload
from .averaging import ConfigBarrier
from .layer_times import LayerTimer, clock_of
from .loop import Loop
from .measure import LayerTimes

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


def plain_averaging(workload: Workload, steps: int, ranks: int, loop: Loop | None = None) -> list[torch.Tensor]:
    """The weights after ``steps`` steps of SGD with the average of the gradients of ``ranks`` ranks."""
    workload = workload.untimed()
    loop = loop or Loop(device=workload.device)
    model = workload.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        _average(workload, model, step, ranks, loop)
        loop.step(model, optimizer)
    return weights_of(model)


def clipping_norm(workload: Workload, ranks: int) -> float:
    """A norm to clip by: half of the norm of the first step's averages, so that many steps are clipped, and some are not."""
    workload = workload.untimed()
    model = workload.make_model()
    _average(workload, model, 0, ranks, Loop())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return 0.5 * torch.nn.utils.get_total_norm(gradients).item()


def _average(workload: Workload, model: torch.nn.Module, step: int, ranks: int, loop: Loop) -> None:
    """Leave the average of the ranks' gradients in ``.grad``."""
    model.zero_grad()
    for rank in range(ranks):
        loop.backward(workload.loss(model, step, rank))
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= ranks


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


_WARM_UP_STEPS = 1


class ComputeOnly:
    """A training without averaging. Collective, so that all ranks compute at the same time."""

    def __init__(self, session: Session, barrier: ConfigBarrier, workload: Workload) -> None:
        self._session = session
        self._barrier = barrier
        self._workload = workload
        self._model = workload.make_model()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        self._clock = clock_of(workload.device)
        self._timer = LayerTimer(self._model, self._clock)
        self._train(_WARM_UP_STEPS)

    def measure(self, steps: int) -> list[LayerTimes]:
        """The layer times of each rank: medians over these steps and all steps measured before."""
        self._train(steps)
        return [LayerTimes(**each) for each in self._session.gather(asdict(self._timer.result(_WARM_UP_STEPS)))]

    def least_step_seconds(self, steps: int) -> list[float]:
        """The shortest of ``steps`` steps of each rank, which do not count as measured: noise only adds time."""
        return [float(seconds) for seconds in self._session.gather(min(self._train(steps, timed=False)))]

    def _train(self, steps: int, timed: bool = True) -> list[float]:
        """The seconds of each step."""
        self._barrier.wait()
        clock, seconds = self._clock, []
        for step in range(steps):
            began = clock.now()
            self._optimizer.zero_grad()
            loss = self._workload.loss(self._model, step, self._session.rank)
            forward_ended = clock.now()
            loss.backward()
            backward_ended = clock.now()
            self._optimizer.step()
            ended = clock.now()
            if timed:
                self._timer.step(forward_ended, backward_ended, ended)
            before, after = clock.seconds([began, ended])
            seconds.append(after - before)
        return seconds
