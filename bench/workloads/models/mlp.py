"""A perceptron of equal layers: the REAL counterpart of ``uniform``."""

from __future__ import annotations

import torch
from torch import nn


class MLP(nn.Module):
    """Inputs [batch, inputs] to logits. It has ``depth`` hidden layers of ``width``, each with a residual connection so that
    deep models learn."""

    def __init__(self, inputs: int, classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.first(inputs))
        for layer in self.hidden:
            hidden = hidden + nn.functional.gelu(layer(hidden)) / len(self.hidden)
        logits: torch.Tensor = self.last(hidden)
        return logits
