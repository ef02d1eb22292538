"""A rank of elastic jobs whose loop is a block of ``docs/elastic.md``: elastic_page_rank.py MARK STEPS DIRECTORY [STRIKE ...].

MARK is text of the block, and the others are as in ``tests/jobs/elastic_rank.py``. Says which samples each step uses.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import commsched
import commsched.plugins.torch as cs
from commsched.session.elastic import ElasticStep
from tests.code_blocks import python_of
from tests.jobs.elastic_rank import Strikes
from tests.jobs.rank import say

ROWS = 150  # 2 ranks make 4 steps of 16 samples each with them, 3 ranks 3


class Network(nn.Module):
    """Its inputs begin with their number in the dataset."""

    def __init__(self, strikes: Strikes) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.strikes = strikes
        self.step: ElasticStep | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert self.step is not None
        rows = " ".join(map(str, inputs[:, 0].int().tolist()))
        say(1, f"step {self.step.number} of {self.step.world_size} ranks, rank {self.step.rank} pid {os.getpid()} uses {rows}")
        outputs: torch.Tensor = self.inner(inputs[:, 1:])
        self.strikes.at("forward", self.step)
        return outputs


def main() -> None:
    mark, steps, directory, *given = sys.argv[1:]
    torch.manual_seed(1)
    rows = torch.cat([torch.arange(float(ROWS))[:, None], torch.randn(ROWS, 16)], 1)
    dataset = TensorDataset(rows, torch.randint(0, 4, (ROWS,)))
    model = Network(Strikes(directory, given))
    base = torch.optim.AdamW(model.parameters(), lr=0.01)
    names: dict[str, Any] = {"torch": torch, "commsched": commsched, "dataset": dataset, "model": model, "base": base}
    names["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(base, 100)
    text = python_of("elastic.md", mark)
    if "Elastic(" not in text:
        names["optimizer"] = cs.ScheduledOptimizer(base, model)
        names["elastic"] = commsched.Elastic(names["optimizer"], also=[names["scheduler"]])
    all_steps = commsched.Elastic.steps

    def first_steps(elastic: commsched.Elastic, count: int) -> Iterator[ElasticStep]:
        for model.step in all_steps(elastic, int(steps)):
            assert model.step is not None
            yield model.step

    commsched.Elastic.steps = first_steps  # type: ignore[assignment, method-assign]
    exec(text, names)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    say(1, f"rank {names['elastic'].session.rank} weights {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
