"""One rank of a training whose configuration changes: tuned_rank.py HOW STEPS OUT. Saves its weights as OUT.<rank>.

HOW is ``steady``; ``changes``: rank 0 asks for another configuration every seventh step; or ``policies``: of the policy too,
also of those that only some transports can follow.
"""

from __future__ import annotations

import random
import sys

import torch
from torch import nn

import commsched
from commsched import SchedulerConfig
from commsched.plugins.torch import ScheduledOptimizer


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 150), nn.Tanh(), nn.Linear(150, 150), nn.Tanh(), nn.Linear(150, 4)).double()


def main() -> None:
    how, steps, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    session = commsched.init()
    trained = model(session.rank)
    optimizer = ScheduledOptimizer(torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9), trained)
    choose = random.Random(5)
    configs = set()
    for step in range(steps):
        if session.rank == 0 and step % 7 == 0 and how != "steady":
            partition_bytes = choose.choice([3000, 20_000, 64_000, 10**6])
            policy = choose.choice(["priority", "fifo", "rsag"]) if how == "policies" else "priority"
            session.reconfigure(SchedulerConfig(partition_bytes, partition_bytes * choose.choice([1, 3]), policy))
        generator = torch.Generator().manual_seed(1000 * session.rank + step)
        inputs = torch.randn(3, 10, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(inputs), torch.randint(0, 4, (3,), generator=generator)).backward()
        optimizer.step()
        configs.add(session.core.config)
    torch.save({"weights": trained.state_dict(), "configs": len(configs)}, f"{out}.{session.rank}")


if __name__ == "__main__":
    main()
