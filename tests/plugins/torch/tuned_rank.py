"""One rank of trainings whose configuration changes, one after the other: tuned_rank.py STEPS OUT CASE ....

Saves its weights as OUT.<case>.<rank>.

A CASE is JSON: [HOW, settings of its session]. HOW is ``steady``, or ``policies``: rank 0 asks for another configuration every
seventh step, of the policy and the collective too, which only collectives can follow. Cases are counted from 0.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import commsched
from commsched import Session
from commsched.plugins.torch import ScheduledOptimizer


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 150), nn.Tanh(), nn.Linear(150, 150), nn.Tanh(), nn.Linear(150, 4)).double()


def main() -> None:
    steps, out, *cases = sys.argv[1:]
    for number, (how, settings) in enumerate(map(json.loads, cases)):
        session = commsched.init(rendezvous=f"{out}.{number}.json", **settings)
        torch.save(train(session, make_model(session.rank), how, int(steps)), f"{out}.{number}.{session.rank}")
        commsched.shutdown()


def train(session: Session, model: nn.Module, how: str, steps: int) -> dict[str, Any]:
    """The weights, and how many configurations there were."""
    optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, session=session)
    choose = random.Random(5)
    configs = set()
    for step in range(steps):
        if session.rank == 0 and step % 7 == 0 and how == "policies":
            partition_bytes = choose.choice([12_000, 20_000, 64_000, 10**6])
            kind = choose.choice([{}, {"policy": "fifo"}, {"collective": "rsag"}])
            sizes = {"partition_bytes": partition_bytes, "credit_bytes": partition_bytes * choose.choice([1, 3])}
            usual = {"policy": "priority", "collective": "all_reduce"}
            session.reconfigure(replace(session.core.next_config, **{**usual, **sizes, **kind}))
        generator = torch.Generator().manual_seed(1000 * session.rank + step)
        inputs = torch.randn(3, 10, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), torch.randint(0, 4, (3,), generator=generator)).backward()
        optimizer.step()
        configs.add(session.core.config)
    return {"weights": copy.deepcopy(model.state_dict()), "configs": len(configs)}


if __name__ == "__main__":
    main()
