"""Batches for the models: small real data, from which each (step, rank) draws independently, or random numbers of a given
size."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import nn

#: Label of tokens that the loss ignores.
IGNORED = -100
_MASKED_SHARE = 0.15
_RANDOM_SHARE = 0.25
_NOISE = 0.1
_RANKS = 1 << 20  # greater than any number of ranks, so that every (step, rank) has a seed of its own


def generator_of(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(step * _RANKS + rank)


@cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(digits.target)


def digits(generator: torch.Generator, images: int, image_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's digits [images, 1, image_size, image_size], enlarged from 8x8 and with some noise, and their labels."""
    known, labels = _digits()
    rows = torch.randint(len(labels), (images,), generator=generator)
    enlarged = nn.functional.interpolate(known[rows], size=(image_size, image_size), mode="bilinear")
    # Rounding would decide which of equal neighbouring pixels max-pooling takes.
    return enlarged + _NOISE * torch.randn(enlarged.shape, generator=generator), labels[rows]


def sentences(generator: torch.Generator, count: int, length: int, vocabulary: int) -> torch.Tensor:
    """Tokens [count, length] that can be learnt: three in four follow from the previous token by a fixed rule."""
    tokens = torch.randint(vocabulary, (count, length), generator=generator)
    random = torch.rand((count, length), generator=generator) < _RANDOM_SHARE
    for place in range(1, length):
        tokens[:, place] = torch.where(random[:, place], tokens[:, place], (5 * tokens[:, place - 1] + 7) % vocabulary)
    return tokens


def masked(generator: torch.Generator, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens with some replaced by 0, and labels: the replaced tokens, and :data:`IGNORED` elsewhere."""
    hidden = torch.rand(tokens.shape, generator=generator) < _MASKED_SHARE
    hidden[:, 0] = True  # so that there is at least one label
    return tokens.masked_fill(hidden, 0), tokens.masked_fill(~hidden, IGNORED)
