"""BERT-base as it is pre-trained (J. Devlin et al., NAACL 2019): encoder, pooler, masked-token head, next-sentence head."""

from __future__ import annotations

import torch
from torch import nn

from . import TiedLinear

_LAYER_NORM_EPS = 1e-12


class Embeddings(nn.Module):
    def __init__(self, vocabulary: int, positions: int, width: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.segment = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=_LAYER_NORM_EPS)

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: torch.Tensor = self.norm(self.word(tokens) + self.position(positions) + self.segment(segments))
        return hidden


class Block(nn.Module):
    """A post-norm block, as published."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm = nn.LayerNorm(width, eps=_LAYER_NORM_EPS)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width, eps=_LAYER_NORM_EPS)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        hidden = self.attention_norm(hidden + self.output(attended))
        result: torch.Tensor = self.norm(hidden + self.contract(nn.functional.gelu(self.expand(hidden))))
        return result


class Bert(nn.Module):
    """Tokens and segments (0 or 1), both [batch, length], to logits of tokens [batch, length, vocabulary] and pairs [batch, 2].

    The defaults are the full size: 110,106,428 parameters. The token head's weight is the word embedding's and is counted once.
    """

    def __init__(
        self, vocabulary: int = 30522, positions: int = 512, width: int = 768, depth: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width, eps=_LAYER_NORM_EPS)
        self.decoder = TiedLinear(self.embeddings.word, bias=True)
        self.pooler = nn.Linear(width, width)
        self.pair = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.blocks(self.embeddings(tokens, segments))
        token_logits = self.decoder(self.transform_norm(nn.functional.gelu(self.transform(hidden))))
        return token_logits, self.pair(torch.tanh(self.pooler(hidden[:, 0])))
