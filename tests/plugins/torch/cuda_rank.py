"""One rank of a training on a CUDA device, its own if there are enough: cuda_rank.py OUT. Saves its weights as OUT.<rank>."""

from __future__ import annotations

import os
import sys

import torch

from commsched.plugins.torch import ScheduledOptimizer
from tests.plugins.torch.test_equality import OPTIMIZERS
from tests.plugins.torch.training import MLP, ROWS, STEPS, loss_of, scheduler_of


def main() -> None:
    rank, world_size = int(os.environ["COMMSCHED_RANK"]), int(os.environ["COMMSCHED_WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    model = MLP.model(seed=rank).to(device)
    optimizer = ScheduledOptimizer(OPTIMIZERS["AdamW"](model), model)
    scheduler = scheduler_of(optimizer)
    inputs, labels = (batches.to(device) for batches in MLP.batches(world_size))
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, inputs[step, mine], labels[step, mine]).backward()
        optimizer.step()
        scheduler.step()
    torch.save({name: weights.cpu() for name, weights in model.state_dict().items()}, f"{sys.argv[1]}.{rank}")


if __name__ == "__main__":
    main()
