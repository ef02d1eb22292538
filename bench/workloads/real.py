"""REAL workloads: reduced models with real arithmetic on this machine, on small data. A step takes 0.1 to 0.3 s on one core.

The caller sets the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from commsched.core.errors import ConfigError

from . import batches, losses
from .initial import initialise
from .models.bert import Bert
from .models.gpt2 import GPT2
from .models.mlp import MLP
from .models.resnet import ResNet50
from .models.vgg import VGG16

_DIGITS = 10  # classes
_VOCABULARY = 4000


@dataclass(frozen=True)
class RealWorkload:
    """A REAL workload. ``batch_loss`` makes a batch from a generator and runs the forward."""

    model_factory: Callable[[], nn.Module]
    batch_loss: Callable[[nn.Module, torch.Generator], torch.Tensor]
    emulated = False

    def make_model(self) -> nn.Module:
        model = self.model_factory()
        initialise(model)
        return model

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return self.batch_loss(model, batches.generator_of(step, rank))

    def untimed(self) -> RealWorkload:
        return self


def make_real(name: str) -> RealWorkload:
    """The reduced form of a model.

    Raises:
        ConfigError: there is no reduced model of this name.
    """
    if name not in _WORKLOADS:
        raise ConfigError(f"model={name}: REAL workloads are {', '.join(_WORKLOADS)}")
    return _WORKLOADS[name]


def _classify(images: int, image_size: int, flat: bool = False) -> Callable[[nn.Module, torch.Generator], torch.Tensor]:
    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        inputs, labels = batches.digits(generator, images, image_size)
        return losses.classification(model, inputs.flatten(1) if flat else inputs, labels)

    return loss


def _predict_next(count: int, length: int) -> Callable[[nn.Module, torch.Generator], torch.Tensor]:
    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        return losses.next_token(model, batches.sentences(generator, count, length, _VOCABULARY))

    return loss


def _pre_train(count: int, length: int) -> Callable[[nn.Module, torch.Generator], torch.Tensor]:
    segments = (torch.arange(length) >= length // 2).long().expand(count, length)

    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        tokens = batches.sentences(generator, count, length, _VOCABULARY)
        others = torch.rand(count, generator=generator) < 0.5  # sequences whose second half is another sentence
        swapped = torch.where(segments.bool() & others[:, None], tokens.flip(0), tokens)
        hidden, labels = batches.masked(generator, swapped)
        return losses.pre_training(model, hidden, segments, labels, (~others).long())

    return loss


_WORKLOADS = {
    "uniform": RealWorkload(lambda: MLP(64, _DIGITS, width=512, depth=12), _classify(768, 8, flat=True)),
    "vgg16": RealWorkload(
        lambda: VGG16(_DIGITS, width=16, hidden=1024, image_size=32, image_channels=1, smooth=True), _classify(96, 32)
    ),
    "resnet50": RealWorkload(lambda: ResNet50(_DIGITS, width=24, image_channels=1, smooth=True), _classify(16, 64)),
    "bert-base": RealWorkload(lambda: Bert(_VOCABULARY, positions=64, width=192, depth=6, heads=4), _pre_train(12, 48)),
    "gpt2-small": RealWorkload(lambda: GPT2(_VOCABULARY, positions=64, width=192, depth=6, heads=4), _predict_next(12, 48)),
}
