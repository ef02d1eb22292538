"""Layer times without communication: all ranks train at once, as usual, but average nothing."""

from __future__ import annotations

from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from .layer_times import LayerTimer
from .layers import LayerTimes
from .reference import LEARNING_RATE

if TYPE_CHECKING:
    from commsched.session.session import Session

    from ..workloads.workload import Workload
    from .config_barrier import ConfigBarrier

_WARM_UP_STEPS = 1


class ComputeOnly:
    """A training without averaging. Collective, so that all ranks compute at the same time."""

    def __init__(self, session: Session, line: ConfigBarrier, workload: Workload) -> None:
        self._session = session
        self._line = line
        self._workload = workload
        self._model = workload.make_model()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        self._timer = LayerTimer(self._model)
        self._train(_WARM_UP_STEPS)

    def measure(self, steps: int) -> list[LayerTimes]:
        """The layer times of each rank: medians over these steps and all steps measured before."""
        self._train(steps)
        return [LayerTimes(**each) for each in self._session.gather(asdict(self._timer.result(_WARM_UP_STEPS)))]

    def _train(self, steps: int) -> None:
        self._line.meet()
        for step in range(steps):
            self._optimizer.zero_grad()
            loss = self._workload.loss(self._model, step, self._session.rank)
            forward_ended = perf_counter()
            loss.backward()
            backward_ended = perf_counter()
            self._optimizer.step()
            self._timer.step(forward_ended, backward_ended, perf_counter())
