"""A workload whose forward ``torch.compile`` has compiled."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from . import Workload


class CompiledWorkload:
    """``plain``, with each model that a loss is asked of compiled by ``backend``."""

    def __init__(self, plain: Workload) -> None:
        self._plain = plain
        self._compiled: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
        self.emulated = plain.emulated
        self.device = plain.device

    def make_model(self) -> torch.nn.Module:
        return self._plain.make_model()

    def loss(self, model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        if model not in self._compiled:
            # There is nothing to fuse in emulated layers.
            self._compiled[model] = torch.compile(model, backend="aot_eager" if self.emulated else "inductor")
        return self._plain.loss(self._compiled[model], step, rank)

    def untimed(self) -> Workload:
        return self._plain.untimed()
