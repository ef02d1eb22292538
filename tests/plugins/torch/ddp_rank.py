"""One rank of a job of two that keeps DistributedDataParallel: ddp_rank.py STORE, the file in which the process group meets.

Says on stdout what it saw; in the end rank 1 kills itself, and rank 0 says what backward raises.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commsched.plugins.torch as cs
from commsched import CommschedError
from commsched.core.world import detect_world
from tests.jobs.rank import say

TINY_BUCKETS = 100 / 2**20


def make(hooked: bool) -> DistributedDataParallel:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    ddp = DistributedDataParallel(model, bucket_cap_mb=TINY_BUCKETS)
    if hooked:
        ddp.register_comm_hook(cs.CommHookState(ddp), cs.comm_hook)
    return ddp


def train(ddp: DistributedDataParallel, rank: int, steps: int) -> dict[str, Any]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * rank + step)
        optimizer.zero_grad()
        ddp(torch.randn(5, 4, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return copy.deepcopy(ddp.module.state_dict())


def train_unevenly(hooked: bool, rank: int) -> dict[str, Any]:
    """Rank 1 runs out of data first: it shadows what DDP does on rank 0."""
    ddp = make(hooked)
    with ddp.join():
        train(ddp, rank, 6 - 3 * rank)
    return copy.deepcopy(ddp.module.state_dict())


def main() -> None:
    world = detect_world(os.environ)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else it looks the host name up
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=world.rank, world_size=world.world_size)
    plain, ours = train_unevenly(False, world.rank), train_unevenly(True, world.rank)
    equal = all(torch.allclose(ours[name], weights, rtol=1e-9, atol=1e-12) for name, weights in plain.items())
    say(1, f"rank {world.rank}: join {'equals DDP' if equal else 'differs'}")
    ddp = make(True)
    say_error(world.rank, lambda: train_within(ddp.join(divide_by_initial_world_size=False), ddp, world.rank))
    ddp = make(True)
    train(ddp, world.rank, 2)
    dist.barrier()  # rank 0 has all averages of these steps
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = monotonic()
    say_error(world.rank, lambda: train(ddp, world.rank, 1))
    say(1, f"rank 0: {'at once' if monotonic() - began < 60 else 'late'}")
    os._exit(0)  # what gloo has lost may keep the interpreter from ending


def train_within(context: AbstractContextManager[Any], ddp: DistributedDataParallel, rank: int) -> None:
    with context:
        train(ddp, rank, 1)


def say_error(rank: int, call: Callable[[], Any]) -> None:
    try:
        call()
    except CommschedError as error:
        say(1, f"rank {rank}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
