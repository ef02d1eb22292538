"""Parts that the models share: losses, and an output projection. ``model`` of a loss may be wrapped in another module."""

from __future__ import annotations

import torch
from torch import nn


def classification(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs), labels)


def next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Loss of predicting every token except the first; tokens are [batch, length]."""
    logits = model(tokens)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def pre_training(
    model: nn.Module, tokens: torch.Tensor, segments: torch.Tensor, token_labels: torch.Tensor, pair_labels: torch.Tensor
) -> torch.Tensor:
    """BERT's pre-training loss: masked tokens, and whether the second half of a sequence belongs to the first."""
    token_logits, pair_logits = model(tokens, segments)
    of_tokens = nn.functional.cross_entropy(token_logits.flatten(0, 1), token_labels.flatten())
    return of_tokens + nn.functional.cross_entropy(pair_logits, pair_labels)


class TiedLinear(nn.Module):
    """An output projection that shares the weight of the token embedding: ``hidden -> logits`` with that weight, and optionally
    a bias of its own (O. Press, L. Wolf, EACL 2017)."""

    def __init__(self, embedding: nn.Embedding, bias: bool) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings)) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight, self.bias)
