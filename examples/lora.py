"""Low-rank adapters (LoRA) that teach a trained transformer a new task, data-parallel.

    commsched run -n 2 -- python examples/lora.py

The base reads the digits upright; the adapters teach it to read them turned by a quarter. Its own weights are frozen: they have
no gradients, so nothing of them travels, and only the adapters and the head are averaged. The two lines of commsched are
marked; without them it is plain PyTorch.
"""

from __future__ import annotations

import argparse
import os

import torch
from digits import accuracy, batches, load
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import commsched.plugins.torch as cs  # line 1

WIDTH, HEADS, BLOCKS = 64, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(rows)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        rows = rows + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return rows + self.narrow(gelu(self.widen(self.norm2(rows))))


class RowTransformer(nn.Module):
    """Images [images, 1, 8, 8], each row of pixels a token, to the logits of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.position = nn.Parameter(torch.randn(8, WIDTH) / 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(images.squeeze(1)) + self.position).mean(1))


class Adapted(nn.Module):
    """A linear layer whose weights stay, plus a product of two narrow ones that is 0 at first."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.base(values) + self.up(self.down(values))


def train_base(images: torch.Tensor, labels: torch.Tensor, steps: int) -> RowTransformer:
    """The same on every rank; a real script loads its base from a file."""
    model = RowTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for mine in batches(len(labels), 1 + steps // 22, 64, 0, 1)[:steps]:
        optimizer.zero_grad()
        cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
    return model


def add_adapters(model: RowTransformer, rank: int) -> None:
    """Freeze ``model`` but for its head, and put an adapter beside each linear layer of its blocks."""
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    for block in model.blocks:
        for name in ("qkv", "out", "widen", "narrow"):
            setattr(block, name, Adapted(getattr(block, name), rank))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--adapter-rank", type=int, default=8, help="rank of the adapters' matrices")
    parser.add_argument("--steps", type=int, help="end after so many, and train the base for as many; default: all")
    args = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load()
    model = train_base(images, labels, args.steps or 176)
    images, test_images = (torch.rot90(each, dims=(2, 3)) for each in (images, test_images))
    before = accuracy(model, test_images, test_labels)
    add_adapters(model, args.adapter_rank)
    steps = batches(len(labels), args.epochs, args.batch, rank, world_size)[: args.steps]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=4e-3)
    optimizer = cs.ScheduledOptimizer(optimizer, model)  # line 2
    for step, mine in enumerate(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item():.9g}", flush=True)
    after = accuracy(model, test_images, test_labels)
    accuracies = f"accuracy on turned digits {before:.1%} without adapters, {after:.1%} with them"
    print(f"rank {rank} of {world_size}: {len(steps)} steps, {accuracies}", flush=True)


if __name__ == "__main__":
    main()
