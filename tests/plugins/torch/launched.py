"""A training script that any launcher may start; each rank prints what its weights come to."""

from __future__ import annotations

import hashlib

import torch

import commsched
import commsched.plugins.torch as cs
from tests.jobs.rank import say


def main() -> None:
    session = commsched.init()
    torch.manual_seed(session.rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    optimizer = cs.ScheduledOptimizer(optimizer, model)
    data = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(session.rank))
    for inputs in data:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    say(1, f"rank {session.rank} of {session.world_size} {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
