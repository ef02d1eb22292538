"""A language model, data-parallel: a transformer that learns to write this repository's LICENSE, character by character.

    commsched run -n 2 -- python examples/language_model.py
    commsched run -n 2 -- python examples/language_model.py --compile

The two lines of commsched are marked; without them it is plain PyTorch. Gradients are clipped by their global norm. After
``word_language_model`` of pytorch/examples: the text lies in columns that are read from top to bottom, and the learning rate
falls when the validation loss does not.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
from torch import nn

import commsched.plugins.torch as cs  # line 1

TEXT = Path(__file__).parents[1] / "LICENSE"
WIDTH, ROWS = 64, 32  # of the model; of one step


class TransformerModel(nn.Module):
    """Characters [rows, columns] to the logarithms of the next ones' probabilities [rows, columns, characters]."""

    position: torch.Tensor

    def __init__(self, characters: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        angle = torch.arange(ROWS).unsqueeze(1) * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        self.register_buffer("position", torch.stack([angle.sin(), angle.cos()], 2).reshape(ROWS, 1, WIDTH))
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(WIDTH, characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        rows = len(characters)
        mask = nn.Transformer.generate_square_subsequent_mask(rows)
        embedded = self.dropout(self.embedding(characters) * math.sqrt(WIDTH) + self.position[:rows])
        return nn.functional.log_softmax(self.decoder(self.encoder(embedded, mask, is_causal=True)), 2)


def columns_of(text: torch.Tensor, columns: int) -> torch.Tensor:
    """[rows, columns]: column by column, the text from its beginning to its end."""
    rows = len(text) // columns
    return text[: rows * columns].view(columns, rows).t().contiguous()


def loss_of(model: nn.Module, data: torch.Tensor, first: int) -> torch.Tensor:
    """Of the characters that follow those of the rows from ``first`` on."""
    rows = min(ROWS, len(data) - 1 - first)
    return nn.functional.nll_loss(model(data[first : first + rows]).flatten(0, 1), data[first + 1 : first + 1 + rows].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--columns", type=int, default=8, help="per rank")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="by torch.compile; default: not")
    parser.add_argument("--steps", type=int, help="end after so many; default: all")
    args = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
    torch.manual_seed(0)
    alphabet = sorted(set(TEXT.read_text()))
    text = torch.tensor([alphabet.index(character) for character in TEXT.read_text()])
    split = len(text) * 9 // 10
    train = columns_of(text[:split], args.columns * world_size)[:, rank * args.columns : (rank + 1) * args.columns]
    validation = columns_of(text[split:], 4)
    model = TransformerModel(len(alphabet))
    if args.compile is not None:
        model.compile(backend=args.compile)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = cs.ScheduledOptimizer(optimizer, model)  # line 2
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=1)
    step = 0
    for epoch in range(args.epochs):
        for first in range(0, len(train) - 1, ROWS):
            if step == args.steps:
                return
            model.zero_grad()
            loss = loss_of(model, train, first)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            print(f"rank {rank} step {step} loss {loss.item():.9g}", flush=True)
            step += 1
        model.eval()
        with torch.no_grad():
            losses = [loss_of(model, validation, first).item() for first in range(0, len(validation) - 1, ROWS)]
        model.train()
        mean = sum(losses) / len(losses)
        scheduler.step(mean)
        print(f"rank {rank} epoch {epoch}: perplexity per character {math.exp(mean):.2f}", flush=True)


if __name__ == "__main__":
    main()
