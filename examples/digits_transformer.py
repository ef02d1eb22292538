"""A small transformer on the digits, each row of pixels a token, data-parallel.

    commsched run -n 2 --servers 1 -- python examples/digits_transformer.py

The two lines of commsched are marked; without them it is plain PyTorch. Gradients are clipped by their global norm: reading
them waits for their averages.
"""

from __future__ import annotations

import argparse
import os

import torch
from digits import accuracy, batches, load
from torch import nn

import commsched.plugins.torch as cs  # line 1

WIDTH = 64


class RowTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.position = nn.Parameter(torch.randn(8, WIDTH) / 8)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, dim_feedforward=128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(images.squeeze(1)) + self.position).mean(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--steps", type=int, help="end after so many; default: all")
    args = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load()
    steps = batches(len(labels), args.epochs, args.batch, rank, world_size)[: args.steps]
    model = RowTransformer()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = cs.ScheduledOptimizer(optimizer, model)  # line 2
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=len(steps))
    for step, mine in enumerate(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        print(f"rank {rank} step {step} loss {loss.item():.9g}", flush=True)
    right = accuracy(model, test_images, test_labels)
    print(f"rank {rank} of {world_size}: {len(steps)} steps, test accuracy {right:.1%}", flush=True)


if __name__ == "__main__":
    main()
