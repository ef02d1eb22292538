"""An output projection that shares the weight of the token embedding."""

from __future__ import annotations

import torch
from torch import nn


class TiedLinear(nn.Module):
    """``hidden -> logits`` with the embedding's weight, and optionally a bias of its own (O. Press, L. Wolf, EACL 2017)."""

    def __init__(self, embedding: nn.Embedding, bias: bool) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings)) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight, self.bias)
