"""A convolutional network on the digits, data-parallel.

    commsched run -n 2 -- python examples/digits_convolutional.py

The two lines of commsched are marked; without them it is plain PyTorch.
"""

from __future__ import annotations

import argparse
import os

import torch
from digits import accuracy, batches, load
from torch import nn

import commsched.plugins.torch as cs  # line 1


def make_model() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 64, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 16, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--steps", type=int, help="end after so many; default: all")
    args = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load()
    steps = batches(len(labels), args.epochs, args.batch, rank, world_size)[: args.steps]
    model = make_model()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = cs.ScheduledOptimizer(optimizer, model)  # line 2
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=len(steps))
    for step, mine in enumerate(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(f"rank {rank} step {step} loss {loss.item():.9g}", flush=True)
    right = accuracy(model, test_images, test_labels)  # each rank has batch statistics of its own: so it may differ a little
    print(f"rank {rank} of {world_size}: {len(steps)} steps, test accuracy {right:.1%}", flush=True)


if __name__ == "__main__":
    main()
