"""One rank of trainings in a real job: rank.py SYSTEM[,SYSTEM] TASK OUT. Saves its weights as OUT.<system>.<rank>.

SYSTEM is ``commsched``, ``plain`` (no wrapping at all), or ``ddp`` (torch's DistributedDataParallel over gloo, which meets in
the file OUT.store). Or by ``bench.job``, which saves them as OUT.<rank>.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commsched
from commsched import Session
from commsched.core.world import detect_world
from commsched.plugins.torch import ScheduledOptimizer
from tests.plugins.torch.test_equality import MODELS, OPTIMIZERS
from tests.plugins.torch.training import MLP, ROWS, STEPS, Task, Weights, loss_of, numbers, scheduler_of


def batch_norm() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    return body.double()


TASKS = {**MODELS, "MLP": MLP, "BatchNorm": Task(batch_norm, numbers(1, 6, 6))}


def main() -> None:
    systems, name, out = sys.argv[1:]
    torch.set_num_threads(1)
    world = detect_world(os.environ)
    for system in systems.split(","):
        weights = train(system, name, world.rank, world.world_size, store=f"{out}.store")
        torch.save(weights, f"{out}.{system}.{world.rank}")
    commsched.shutdown()
    if dist.is_initialized():
        dist.barrier()
        os._exit(0)  # gloo's threads now and then keep the interpreter from ending


def rank_main(session: Session, arguments: dict[str, Any]) -> None:
    """What ``bench.job`` calls; ``arguments`` are the task and where to save."""
    torch.set_num_threads(1)
    weights = train("commsched", arguments["task"], session.rank, session.world_size)
    torch.save(weights, f"{arguments['out']}.{session.rank}")


def train(system: str, name: str, rank: int, world_size: int, *, store: str = "") -> Weights:
    """The weights in the end; ``store`` is the file in which ``ddp`` meets."""
    task = TASKS[name]
    model = task.model(seed=0 if system == "plain" else rank)
    optimizer = OPTIMIZERS["SGD nesterov"](model)
    forward = model
    if system == "ddp":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else it looks the host name up
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
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
    return copy.deepcopy(model.state_dict())


if __name__ == "__main__":
    main()
