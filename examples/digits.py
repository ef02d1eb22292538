"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels, which come with the package."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images [1437, 1, 8, 8] in [0, 1] and labels, then 360 of each for testing; the same on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return images[train], labels[train], images[test], labels[test]


def batches(count: int, epochs: int, batch: int, rank: int, world_size: int) -> list[torch.Tensor]:
    """This rank's indices for each step: every epoch shuffled anew, in the same way on every rank, and shared out."""
    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator)
        for first in range(0, count - batch * world_size + 1, batch * world_size):
            steps.append(order[first + rank * batch : first + (rank + 1) * batch])
    return steps


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of ``images`` that ``model`` classifies rightly."""
    model.eval()
    with torch.inference_mode():
        right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right
