"""The models at full size with random inputs, for profiles, which need shapes and times but no learning."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from commsched.simulator.profile import Profile

from ..workloads.models import classification, next_token, pre_training
from ..workloads.models.bert import Bert
from ..workloads.models.gpt2 import GPT2
from ..workloads.models.resnet import ResNet50
from ..workloads.models.vgg import VGG16

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class FullSize:
    """A model at full size. ``inputs`` takes a batch size and a device and makes the inputs. The first ``forward_inputs``
    inputs are arguments of the model. All of them are arguments of ``loss``, after the model."""

    make_model: Callable[[], nn.Module]
    inputs: Callable[[int, torch.device], Inputs]
    forward_inputs: int
    loss: Callable[..., torch.Tensor]
    batch: int
    shape: str


def _images(batch: int, device: torch.device) -> Inputs:
    return torch.rand(batch, 3, 224, 224, device=device), torch.randint(1000, (batch,), device=device)


def _tokens(length: int, vocabulary: int) -> Callable[[int, torch.device], Inputs]:
    return lambda batch, device: (torch.randint(vocabulary, (batch, length), device=device),)


def _pairs(length: int, vocabulary: int) -> Callable[[int, torch.device], Inputs]:
    def inputs(batch: int, device: torch.device) -> Inputs:
        tokens = torch.randint(vocabulary, (batch, length), device=device)
        segments = (torch.arange(length, device=device) >= length // 2).long().expand(batch, length)
        return tokens, segments, tokens, torch.randint(2, (batch,), device=device)

    return inputs


FULL_SIZE = {
    "vgg16": FullSize(VGG16, _images, 1, classification, 32, "images of 224x224, 1000 classes"),
    "resnet50": FullSize(ResNet50, _images, 1, classification, 32, "images of 224x224, 1000 classes"),
    "bert-base": FullSize(Bert, _pairs(128, 30522), 2, pre_training, 32, "sequences of 128 tokens"),
    "gpt2-small": FullSize(GPT2, _tokens(1024, 50257), 1, next_token, 8, "sequences of 1024 tokens"),
}


def to_json(profile: Profile) -> str:
    """The profile as JSON, with one line for each layer."""
    record = profile.to_record()
    layers = ",\n    ".join(json.dumps(layer) for layer in record.pop("layers"))
    head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in record.items())
    return f'{{\n{head}  "layers": [\n    {layers}\n  ]\n}}\n'
