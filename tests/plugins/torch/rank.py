"""One rank of trainings in a real job, one after the other: rank.py OUT CASE .... Saves its weights as OUT.<case>.<rank>.

A CASE is JSON: [SYSTEM, task, settings]. SYSTEM is ``commsched``, in a session of its own with these settings; ``plain`` (no
wrapping at all); or ``ddp`` (torch's DistributedDataParallel over gloo, which meets in the file OUT.store). Cases are counted
from 0.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import weakref

import torch
import torch.distributed as dist
from torch import nn

import commsched
from commsched.core.world import detect_world
from commsched.plugins.torch import ScheduledOptimizer
from tests.plugins.torch.test_equality import MODELS, OPTIMIZERS
from tests.plugins.torch.training import MLP, ROWS, STEPS, Task, Weights, loss_of, numbers, scheduler_of


def batch_norm() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    return body.double()


#: Those that are not freed.
models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

TASKS = {**MODELS, "MLP": MLP, "BatchNorm": Task(batch_norm, numbers(1, 6, 6))}


def main() -> None:
    out, *cases = sys.argv[1:]
    world = detect_world(os.environ)
    for number, (system, task, settings) in enumerate(map(json.loads, cases)):
        if system == "commsched":
            commsched.init(rendezvous=f"{out}.{number}.json", **settings)
        weights = train(system, task, world.rank, world.world_size, store=f"{out}.store")
        torch.save(weights, f"{out}.{number}.{world.rank}")
        gc.collect()
        assert system == "ddp" or not list(models), "while the session is open, a model that was dropped is kept"
        commsched.shutdown()
    if dist.is_initialized():
        dist.barrier()
        os._exit(0)  # gloo's threads now and then keep the interpreter from ending


def train(system: str, name: str, rank: int, world_size: int, *, store: str = "") -> Weights:
    """The weights in the end; ``store`` is the file in which ``ddp`` meets."""
    task = TASKS[name]
    model = task.model(seed=0 if system == "plain" else rank)
    models.add(model)
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
