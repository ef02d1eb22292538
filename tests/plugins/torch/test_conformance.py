"""The PyTorch plugin under the public conformance suite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from commsched import RanksDiverged, Session
from commsched.plugins.torch import ScheduledOptimizer
from commsched.plugins.torch.exchange import GradientExchange
from commsched.testing import check_plugin
from commsched.testing.check_plugin import Weights

ROWS = 3


class Adapter:
    tolerance = 1e-9

    def _model(self, seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
        return model

    def _train(self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> Weights:
        for batch in inputs:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return {name: np.array(parameter.detach().numpy()) for name, parameter in model.named_parameters()}

    def _inputs(self, world_size: int, steps: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + 100)
        return torch.randn(steps, world_size * ROWS, 6, generator=generator, dtype=torch.float64)

    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        model = self._model(seed + rank)
        plain = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = ScheduledOptimizer(plain, model, session=session)
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        return self._train(model, optimizer, self._inputs(world_size, steps, seed)[:, mine])

    def train_alone(self, world_size: int, steps: int, seed: int) -> Weights:
        model = self._model(seed)
        return self._train(model, torch.optim.AdamW(model.parameters(), lr=0.01), self._inputs(world_size, steps, seed))


def test_check_plugin() -> None:
    check_plugin(Adapter())


def test_check_plugin_sees_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that does not wait for its average: the suite must notice."""
    monkeypatch.setattr(GradientExchange, "wait_to_update", lambda self, slot: None)
    missed = "is not finite; memory was read between notify_ready and the opening|weights differ between ranks"
    with pytest.raises((AssertionError, RanksDiverged), match=missed):
        check_plugin(Adapter(), world_sizes=(2,))
