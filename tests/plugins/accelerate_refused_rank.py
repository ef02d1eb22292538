"""A rank of an elastic job that tries what Accelerate, Lightning and Trainer cannot do there: prints each refusal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import commsched
from commsched.plugins.accelerate import Accelerator
from commsched.plugins.lightning import ScheduledStrategy
from commsched.plugins.transformers import Trainer
from tests.jobs.rank import say


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([torch.zeros(2)])


def refused(what: str, call: Callable[[], Any]) -> None:
    """Ranks must meet again after each: none tells the others anything."""
    try:
        call()
    except commsched.UnsupportedError as error:
        say(1, f"{what}: {error}")
    else:
        say(1, f"{what}: it was not refused")


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for model in models for parameter in model.parameters()])


def main() -> None:
    refused("Lightning", ScheduledStrategy)
    trainer = Trainer.__new__(Trainer)  # its arguments would set torch.distributed up
    refused("Trainer", trainer.create_accelerator_and_postprocess)
    refused("another accelerator", lambda: Accelerator.adopt(accelerate.Accelerator.__new__(accelerate.Accelerator)))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    refused("an own process group", lambda: Accelerator(cpu=True))
    torch.distributed.destroy_process_group()

    os.environ["LOCAL_RANK"] = str(1 - int(os.environ["LOCAL_RANK"]))  # as of a new process, after others were counted anew
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.local_process_index == accelerator.process_index  # all are on one machine
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    refused("before the loop", accelerator.wait_for_everyone)
    refused("an optimizer without its model", lambda: commsched.Elastic(accelerator.prepare(adam(models[0]))))
    accelerator.free_memory()
    optimizers = accelerator.prepare(*models, adam(models[0]), adam(models[1]))[2:]
    refused("two optimizers", lambda: commsched.Elastic(optimizers[0]))
    accelerator.free_memory()
    refused("a model without an optimizer", lambda: commsched.Elastic(accelerator.prepare(*models, adam(models[0]))[2]))
    accelerator.free_memory()

    model, optimizer = accelerator.prepare(models[0], adam(models[0]))
    accelerator.scaler = torch.amp.GradScaler("cpu")  # as with fp16, which Accelerate has for GPUs only
    refused("a scale of the loss", lambda: commsched.Elastic(optimizer))
    accelerator.scaler = None
    elastic = commsched.Elastic(optimizer)
    steps = elastic.steps(2)
    with next(steps):
        refused("a stream", lambda: accelerator.prepare(DataLoader(Stream())))
        accelerator.dataloader_config.dispatch_batches = True
        refused("dispatched batches", lambda: accelerator.prepare(DataLoader(TensorDataset(torch.zeros(4)))))
        accelerator.dataloader_config.dispatch_batches = None
        last = iter(accelerator.prepare(DataLoader(TensorDataset(torch.zeros(8)), batch_size=2)))
        next(last)
        session, accelerator._session = accelerator._session, None  # as if the generation were another
        refused("the last batch", lambda: next(last))  # of two, which was taken one ahead
        accelerator._session = session
        refused("a group", torch.distributed.new_group)
        refused("a message", lambda: torch.distributed.send(torch.zeros(1), 1 - torch.distributed.get_rank()))
        refused("bits", lambda: torch.distributed.all_reduce(torch.zeros(1, dtype=torch.int), torch.distributed.ReduceOp.BOR))
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.zeros(2)).sum())
            optimizer.step()
    refused("half an update", lambda: next(steps))
    sys.exit(0)


if __name__ == "__main__":
    main()
