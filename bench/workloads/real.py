"""REAL workloads: reduced models with real arithmetic, on small data. A step takes 0.1 to 0.3 s on one core.

The caller sets the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import nn

from commsched import ConfigError

from .models import classification, next_token, pre_training
from .models.bert import Bert
from .models.gpt2 import GPT2
from .models.mlp import MLP
from .models.resnet import ResNet50
from .models.vgg import VGG16

_DIGITS = 10  # classes
_VOCABULARY = 4000


Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class RealWorkload:
    """A REAL workload. ``make_batch`` makes a batch from a generator. ``batch_loss`` runs the forward of a batch."""

    model_factory: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    batch_loss: Callable[..., torch.Tensor]
    device: str = "cpu"
    _kept: dict[tuple[int, int], Batch] = field(default_factory=dict, compare=False, repr=False)
    emulated = False

    def make_model(self) -> nn.Module:
        model = self.model_factory()
        initialise(model)
        return model.to(self.device)

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return self.batch_loss(model, *self._batch(step, rank))

    def _batch(self, step: int, rank: int) -> Batch:
        if self.device == "cpu":
            return self.make_batch(generator_of(step, rank))
        if (step, rank) not in self._kept:  # a device would wait for the processor, which makes batches
            self._kept[step, rank] = tuple(each.to(self.device) for each in self.make_batch(generator_of(step, rank)))
        return self._kept[step, rank]

    def untimed(self) -> RealWorkload:
        return self


def make_real(name: str, device: str = "cpu") -> RealWorkload:
    """The reduced form of a model, on ``device``.

    Raises:
        ConfigError: there is no reduced model of this name.
    """
    if name not in _WORKLOADS:
        raise ConfigError(f"model={name}: REAL workloads are {', '.join(_WORKLOADS)}")
    return replace(_WORKLOADS[name], device=device, _kept={})


def _images(count: int, image_size: int, flat: bool = False) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        inputs, labels = digits(generator, count, image_size)
        return inputs.flatten(1) if flat else inputs, labels

    return batch


def _to_continue(count: int, length: int) -> Callable[[torch.Generator], Batch]:
    return lambda generator: (sentences(generator, count, length, _VOCABULARY),)


def _pairs(count: int, length: int) -> Callable[[torch.Generator], Batch]:
    segments = (torch.arange(length) >= length // 2).long().expand(count, length)

    def batch(generator: torch.Generator) -> Batch:
        tokens = sentences(generator, count, length, _VOCABULARY)
        others = torch.rand(count, generator=generator) < 0.5  # sequences whose second half is another sentence
        swapped = torch.where(segments.bool() & others[:, None], tokens.flip(0), tokens)
        hidden, labels = masked(generator, swapped)
        return hidden, segments, labels, (~others).long()

    return batch


_WORKLOADS = {
    "uniform": RealWorkload(lambda: MLP(64, _DIGITS, width=512, depth=12), _images(768, 8, flat=True), classification),
    "vgg16": RealWorkload(
        lambda: VGG16(_DIGITS, width=16, hidden=1024, image_size=32, image_channels=1, smooth=True),
        _images(96, 32),
        classification,
    ),
    "resnet50": RealWorkload(
        lambda: ResNet50(_DIGITS, width=24, image_channels=1, smooth=True), _images(16, 64), classification
    ),
    "bert-base": RealWorkload(
        lambda: Bert(_VOCABULARY, positions=64, width=192, depth=6, heads=4), _pairs(12, 48), pre_training
    ),
    "gpt2-small": RealWorkload(
        lambda: GPT2(_VOCABULARY, positions=64, width=192, depth=6, heads=4), _to_continue(12, 48), next_token
    ),
}


_EMBEDDING_STD = 0.02


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Initialise every matrix and convolution by its fan-in (K. He et al., ICCV 2015), and embeddings as BERT does. Biases are
    0.

    Norms keep their initial ones and zeros. A tied weight is initialised as the embedding.
    """
    generator = torch.Generator().manual_seed(0)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    norms = {id(p) for module in model.modules() if "Norm" in type(module).__name__ for p in module.parameters(recurse=False)}
    for parameter in model.parameters():
        if id(parameter) in norms:
            continue
        if id(parameter) in tables:
            parameter.normal_(0, _EMBEDDING_STD, generator=generator)
        elif parameter.dim() > 1:
            parameter.normal_(0, math.sqrt(2 / parameter[0].numel()), generator=generator)
        else:
            parameter.zero_()


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
