"""A rank as ``tests/jobs/elastic_rank.py`` is, in PyTorch: AdamW, a learning-rate scheduler, clipping.

MODEL in the environment: gpt2 is a GPT-2 of 3.4 million parameters, and all else a network so small that it takes no time.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import commsched
import commsched.plugins.torch as cs
from tests.jobs import openings
from tests.jobs.elastic_rank import Strikes
from tests.jobs.rank import say

Batch = tuple[torch.Tensor, torch.Tensor]


def small() -> tuple[nn.Module, Callable[[torch.Generator], Batch]]:
    """The model, and what makes a batch."""
    model = nn.Sequential(nn.Linear(64, 160), nn.ReLU(), nn.Linear(160, 160), nn.ReLU(), nn.Linear(160, 10))
    return model, lambda drawn: (torch.randn(8, 64, generator=drawn), torch.randint(0, 10, (8,), generator=drawn))


def gpt2() -> tuple[nn.Module, Callable[[torch.Generator], Batch]]:
    from bench.workloads.models.gpt2 import GPT2

    def batch(drawn: torch.Generator) -> Batch:
        tokens = torch.randint(4000, (4, 49), generator=drawn)
        return tokens[:, :-1], tokens[:, 1:]

    return GPT2(4000, positions=48, width=192, depth=6, heads=4), batch


def main() -> None:
    steps, directory, *given = sys.argv[1:]
    strikes = Strikes(directory, given)
    openings.watch(strikes.hit)
    torch.manual_seed(os.getpid())  # each its own: all must begin with the root's
    if os.environ["RANK"] == "0":
        torch.manual_seed(0)
    model, batch = gpt2() if os.environ.get("MODEL") == "gpt2" else small()
    base = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(base, int(steps))
    optimizer = cs.ScheduledOptimizer(base, model)
    elastic = commsched.Elastic(optimizer, also=[scheduler], keep=os.environ.get("KEEP", "device"))  # type: ignore[arg-type]
    for step in elastic.steps(int(steps)):
        with step:
            if step.is_new_world:
                say(1, f"rank {step.rank} of {step.world_size} pid {os.getpid()} step {step.number} at {time.monotonic():.3f}")
            strikes.at("start", step)
            generator = torch.Generator().manual_seed(1000 * step.number + step.rank)
            inputs, labels = batch(generator)
            outputs = model(inputs)
            strikes.at("forward", step)
            loss = nn.functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            strikes.at("backward", step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            strikes.at("stepped", step)
            scheduler.step()
            elastic.state["shares"] = [*elastic.state.get("shares", []), [step.number, step.world_size]]
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    shares = " ".join(f"{number}/{size}" for number, size in elastic.state["shares"])
    say(1, f"rank {elastic.session.rank} weights {hashlib.sha256(weights).hexdigest()} shares {shares}")


if __name__ == "__main__":
    main()
