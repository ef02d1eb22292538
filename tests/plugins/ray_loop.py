"""The training loop of a worker of Ray Train, in the tests of that plugin."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch

import commsched
import commsched.plugins.torch as cs

STEPS = 6


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def inputs_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(config: dict[str, Any]) -> None:
    """Leaves what became of it in ``config["directory"]``. ``kill_rank`` dies in the midst of it, once only."""
    directory = Path(config["directory"])
    session = commsched.init()
    model = model_of(0)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = cs.ScheduledOptimizer(optimizer, model)
    for step in range(STEPS):
        if step == 3 and session.rank == config.get("kill_rank"):
            try:
                (directory / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass  # it has been killed before
        if step == 3 and config.get("kill_server") and session.rank == 0:
            os.kill(int((directory / "server").read_text()), signal.SIGKILL)
        if step == 3 and session.rank == config.get("fail_rank"):
            raise ValueError("boom")
        optimizer.zero_grad()
        model(inputs_of(session.rank, step)).square().mean().backward()
        optimizer.step()
    weights = weights_of(model)
    torch.save(weights, directory / f"{session.rank}.pt")
    secret = hashlib.sha256(os.environ["COMMSCHED_TOKEN"].encode()).hexdigest()
    (directory / f"{session.rank}.txt").write_text(
        f"{session.world_size} {os.environ['COMMSCHED_CONTROL']} {os.environ.get('COMMSCHED_SERVERS', '-')} {secret}"
    )
