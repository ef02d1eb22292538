"""GPT-2 small (A. Radford et al., 2019): a decoder with pre-norm blocks and a tied head."""

from __future__ import annotations

import torch
from torch import nn

from . import TiedLinear


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        projected = self.query_key_value(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        expanded = nn.functional.gelu(self.expand(self.norm(hidden)), approximate="tanh")
        result: torch.Tensor = hidden + self.contract(expanded)
        return result


class GPT2(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocabulary].

    The defaults are the full size: 124,439,808 parameters. The head's weight is the token embedding's and is counted once.
    """

    def __init__(
        self, vocabulary: int = 50257, positions: int = 1024, width: int = 768, depth: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = TiedLinear(self.token, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.token(tokens) + self.position(positions))
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits
