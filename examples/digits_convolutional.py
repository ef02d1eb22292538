"""A convolutional network on the digits, data-parallel.

    commsched run -n 2 -- python examples/digits_convolutional.py

The two lines of commsched are marked. Without ``commsched run`` it trains in one process, as plain PyTorch.
"""

from __future__ import annotations

import torch
from digits import accuracy, batches, load
from torch import nn

import commsched
import commsched.plugins.torch as cs  # line 1

EPOCHS, BATCH = 6, 32


def make_model() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 64, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 16, 10))


def main() -> None:
    images, labels, test_images, test_labels = load()
    model = make_model()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = cs.ScheduledOptimizer(optimizer, model)  # line 2
    session = commsched.init()
    steps = batches(len(labels), EPOCHS, BATCH, session.rank, session.world_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=len(steps))
    for mine in steps:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        scheduler.step()
    right = accuracy(model, test_images, test_labels)  # each rank has batch statistics of its own: so it may differ a little
    print(f"rank {session.rank} of {session.world_size}: {len(steps)} steps, test accuracy {right:.1%}", flush=True)


if __name__ == "__main__":
    main()
