"""One rank of a training in a real job: rank.py SYSTEM TASK OUT, or by ``bench.job``. Saves its weights as OUT.<rank>.

SYSTEM is ``commsched``, ``plain`` (no wrapping at all), or ``ddp`` (torch's DistributedDataParallel over gloo, which meets in
the file OUT.store).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commsched import Session
from commsched.core.world import detect_world
from commsched.plugins.torch import ScheduledOptimizer
from tests.plugins.torch.test_equality import MODELS, OPTIMIZERS
from tests.plugins.torch.training import MLP, ROWS, STEPS, Task, loss_of, numbers, scheduler_of


def batch_norm() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    return body.double()


TASKS = {**MODELS, "MLP": MLP, "BatchNorm": Task(batch_norm, numbers(1, 6, 6))}


def main() -> None:
    system, name, out = sys.argv[1:]
    world = detect_world(os.environ)
    train(system, name, out, world.rank, world.world_size)
    if system == "ddp":
        dist.barrier()
        os._exit(0)  # gloo's threads now and then keep the interpreter from ending


def rank_main(session: Session, arguments: dict[str, Any]) -> None:
    """What ``bench.job`` calls; ``arguments`` are the task and where to save."""
    train("commsched", arguments["task"], arguments["out"], session.rank, session.world_size)


def train(system: str, name: str, out: str, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    task = TASKS[name]
    model = task.model(seed=0 if system == "plain" else rank)
    optimizer = OPTIMIZERS["SGD nesterov"](model)
    forward = model
    if system == "ddp":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else it looks the host name up
        dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=world_size)
        forward = nn.parallel.DistributedDataParallel(model)
    elif system == "commsched":
        optimizer = ScheduledOptimizer(optimizer, model)
    scheduler = scheduler_of(optimizer)
    inputs, labels = task.batches(world_size)
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(forward, inputs[step, mine], labels[step, mine]).backward()
        optimizer.step()
        scheduler.step()
    torch.save(model.state_dict(), f"{out}.{rank}")


if __name__ == "__main__":
    main()
