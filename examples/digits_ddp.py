"""A network on the digits with PyTorch's DistributedDataParallel, which keeps its buckets and lets commsched average them.

    commsched run -n 2 -- python examples/digits_ddp.py
    torchrun --standalone --nproc-per-node=2 examples/digits_ddp.py

The two lines of commsched are marked. Without them, or with ``COMMSCHED_DISABLE=1``, DistributedDataParallel averages by
itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from digits import accuracy, batches, load
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commsched.plugins.torch as cs  # line 1

EPOCHS, BATCH = 6, 32


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    ddp.register_comm_hook(cs.CommHookState(ddp), cs.comm_hook)  # line 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = batches(len(labels), EPOCHS, BATCH, rank, world_size)
    for mine in steps:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
    right = accuracy(model, test_images, test_labels)
    print(f"rank {rank} of {world_size}: {len(steps)} steps, test accuracy {right:.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
