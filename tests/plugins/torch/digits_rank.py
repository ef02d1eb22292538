"""One rank of a training on the digits, started by ``bench.job``. Saves its weights as OUT.<rank>."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from commsched import Session
from commsched.plugins.torch import ScheduledOptimizer


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10))


def rank_main(session: Session, arguments: dict[str, Any]) -> None:
    """``arguments``: the file of what ``examples/digits.py`` loads and deals out, which takes too long to do in every rank."""
    torch.set_num_threads(1)
    images, labels, batches = torch.load(arguments["data"])
    model = make_model()
    optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    for mine in batches[session.rank]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
    torch.save(model.state_dict(), f"{arguments['out']}.{session.rank}")
