"""A rank like ``tests/jobs/elastic_rank.py``, with Accelerate: accelerate_elastic_rank.py STEPS DIRECTORY [STRIKE ...].

Two batches of one update make a step, their losses are gathered, and the data loader is prepared anew in each new world.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commsched
from commsched.plugins.accelerate import Accelerator
from tests.jobs.elastic_rank import Strikes
from tests.jobs.rank import say

BATCH, ROWS, PASSES = 4, 144, 2  # 3 ranks have 12 batches in an epoch, and 2 have 18


def batches_from(accelerator: Accelerator, epoch: int, first: int) -> Iterator[Any]:
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(ROWS, 16, generator=numbers), torch.randint(0, 4, (ROWS,), generator=numbers))
    order = torch.Generator().manual_seed(epoch)
    loader = accelerator.prepare(DataLoader(data, batch_size=BATCH, shuffle=True, generator=order))
    return iter(accelerator.skip_first_batches(loader, first))


def main() -> None:
    steps, directory, *given = sys.argv[1:]
    strikes = Strikes(directory, given)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PASSES)
    torch.manual_seed(accelerator.process_index + 1)  # each its own: all must begin with the root's
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    base = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(base, 100)
    model, optimizer, scheduler = accelerator.prepare(model, base, scheduler)
    elastic = commsched.Elastic(optimizer, also=[scheduler])
    batches: Iterator[Any] = iter(())
    stale: list[Iterator[Any]] = []
    for step in elastic.steps(int(steps)):
        with step:
            if step.is_new_world:
                worlds = {
                    (accelerator.process_index, accelerator.num_processes),
                    (accelerator.local_process_index, accelerator.num_processes),  # all are on one machine
                    (torch.distributed.get_rank(), torch.distributed.get_world_size()),
                    (step.rank, step.world_size),
                }
                say(1, f"pid {os.getpid()} step {step.number} in {worlds} main {accelerator.is_main_process}")
                stale += [batches]
                a_pass = ROWS // BATCH // PASSES // step.world_size
                epoch, first = divmod(step.number, a_pass)
                batches = batches_from(accelerator, epoch, PASSES * first)
            strikes.at("start", step)
            losses = []
            for _ in range(PASSES):
                try:
                    inputs, labels = next(batches)
                except StopIteration:
                    epoch += 1
                    batches = batches_from(accelerator, epoch, 0)
                    inputs, labels = next(batches)
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                    strikes.at("forward", step)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
            strikes.at("stepped", step)
            gathered = accelerator.gather(torch.stack(losses)[None])
            assert gathered.shape == (step.world_size, PASSES)
            elastic.state["losses"] = [*elastic.state.get("losses", []), float(gathered.mean())]
            accelerator.wait_for_everyone()
    for each in stale[1:]:  # of an earlier generation
        try:
            next(each)
        except commsched.UnsupportedError as error:
            say(1, f"stale {error}")
    accelerator.wait_for_everyone()
    ranks = accelerator.num_processes
    assert gather_object([accelerator.process_index]) == list(range(ranks))
    assert broadcast_object_list([accelerator.process_index, "text"]) == [0, "text"]
    assert accelerator.reduce(torch.ones(2), "sum").tolist() == [ranks, ranks]
    assert accelerator.gather_for_metrics([accelerator.process_index], use_gather_object=True) == list(range(ranks))
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()
    others = accelerator.gather(torch.tensor(int(digest[:12], 16)))
    assert len(set(others.tolist())) == 1
    say(1, f"rank {accelerator.process_index} weights {digest} {elastic.state['losses'][-1]} {scheduler.get_last_lr()}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
