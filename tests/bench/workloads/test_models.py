"""The models are those that are published: to the parameter, and in what they compute."""

from __future__ import annotations

import pytest
import torch

from bench.workloads.models.bert import Bert
from bench.workloads.models.gpt2 import GPT2
from bench.workloads.models.mlp import MLP
from bench.workloads.models.resnet import ResNet50
from bench.workloads.models.vgg import VGG16


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "count"),
    [(VGG16, 138_357_544), (ResNet50, 25_557_032), (Bert, 110_106_428), (GPT2, 124_439_808)],
)
def test_full_size_has_the_published_number_of_parameters(model: type[torch.nn.Module], count: int) -> None:
    with torch.device("meta"):
        assert parameters(model()) == count


def test_bert_without_its_heads_is_the_published_encoder() -> None:
    with torch.device("meta"):
        model = Bert()
    heads = [model.transform, model.transform_norm, model.pair]
    assert parameters(model) - sum(map(parameters, heads)) - 30522 == 109_482_240


@pytest.mark.parametrize(
    ("model", "inputs", "shape"),
    [
        (lambda: VGG16(10, width=4, hidden=16, image_size=32, image_channels=1), [torch.rand(2, 1, 32, 32)], (2, 10)),
        (lambda: ResNet50(10, width=4, image_channels=1), [torch.rand(2, 1, 64, 64)], (2, 10)),
        (lambda: ResNet50(10, width=4, image_channels=1, smooth=True), [torch.rand(2, 1, 64, 64)], (2, 10)),
        (lambda: GPT2(50, positions=8, width=16, depth=2, heads=2), [torch.arange(16).view(2, 8)], (2, 8, 50)),
        (lambda: MLP(6, 3, width=8, depth=2), [torch.rand(2, 6)], (2, 3)),
    ],
)
def test_reduced_models_compute(model, inputs, shape) -> None:
    assert model()(*inputs).shape == shape


def test_bert_returns_both_heads() -> None:
    model = Bert(50, positions=8, width=16, depth=2, heads=2)
    tokens, segments = torch.arange(16).view(2, 8), torch.zeros(2, 8, dtype=torch.long)
    token_logits, pair_logits = model(tokens, segments)
    assert token_logits.shape == (2, 8, 50)
    assert pair_logits.shape == (2, 2)


def test_the_heads_are_the_embeddings() -> None:
    gpt2 = GPT2(50, positions=8, width=16, depth=1, heads=2)
    assert gpt2.head.weight is gpt2.token.weight
    bert = Bert(50, positions=8, width=16, depth=1, heads=2)
    assert bert.decoder.weight is bert.embeddings.word.weight


def test_gpt2_does_not_see_what_comes_later() -> None:
    model = GPT2(50, positions=8, width=16, depth=2, heads=2)
    tokens = torch.arange(8).view(1, 8)
    changed = tokens.clone()
    changed[0, 5] = 40
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])
