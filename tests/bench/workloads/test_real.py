"""REAL workloads: the same numbers wherever they are made, and something to learn."""

from __future__ import annotations

import pytest
import torch

from bench.workloads import make_workload, real_model_names
from bench.workloads import real as batches
from bench.workloads.real import make_real
from commsched.core.errors import ConfigError

MODELS = real_model_names()


@pytest.mark.parametrize("name", MODELS)
def test_size_and_repeatability(name: str) -> None:
    workload = make_real(name)
    torch.manual_seed(1)
    model = workload.make_model()
    torch.manual_seed(2)
    again = make_real(name).make_model()
    assert 5e6 < sum(p.numel() * p.element_size() for p in model.parameters()) < 30e6
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    loss = workload.loss(model, 3, 1)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        assert workload.untimed().loss(again, 3, 1).item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_rounding_changes_gradients_by_no_more_than_rounding(name: str) -> None:
    """Else two correct trainings part, and none can be compared with plain averaging."""
    workload = make_real(name)
    gradients = []
    for factor in (1, 1 + 1e-6):
        model = workload.make_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        workload.loss(model, 0, 0).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    largest = max(gradient.abs().max().item() for gradient in gradients[0])
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max().item() < 1e-3 * largest


@pytest.mark.parametrize("name", ["uniform", "gpt2-small"])
def test_it_learns(name: str) -> None:
    workload = make_real(name)
    model = workload.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        losses.append(workload.loss(model, step, 0))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0]


def test_there_is_no_dropout() -> None:
    for name in MODELS:
        assert not any("Dropout" in type(module).__name__ for module in make_real(name).make_model().modules())


def test_batches_differ_by_step_and_rank() -> None:
    def batch(step: int, rank: int) -> torch.Tensor:
        return batches.sentences(batches.generator_of(step, rank), 4, 16, 4000)

    assert torch.equal(batch(1, 2), batch(1, 2))
    assert not torch.equal(batch(1, 2), batch(2, 1))
    assert not torch.equal(batch(0, 0), batch(0, 1))


def test_digits_are_shown_with_their_labels() -> None:
    images, labels = batches.digits(batches.generator_of(0, 0), 5, 16)
    assert images.shape == (5, 1, 16, 16)
    assert labels.shape == (5,)
    assert -2 < images.min() < images.max() < 2
    assert 0 <= labels.min() <= labels.max() <= 9


def test_three_in_four_tokens_follow_a_rule() -> None:
    tokens = batches.sentences(batches.generator_of(0, 0), 50, 40, 4000)
    follow = (tokens[:, 1:] == (5 * tokens[:, :-1] + 7) % 4000).double().mean()
    assert follow == pytest.approx(0.75, abs=0.03)


def test_masked_tokens_are_the_labels() -> None:
    generator = batches.generator_of(0, 0)
    tokens = batches.sentences(generator, 8, 20, 4000) + 1
    hidden, labels = batches.masked(generator, tokens)
    masked = hidden == 0
    assert torch.equal(labels[masked], tokens[masked])
    assert (labels[~masked] == batches.IGNORED).all()
    assert masked[:, 0].all()


def test_specs() -> None:
    assert not make_workload({"kind": "real", "model": "vgg16"}, 2).emulated
    with pytest.raises(ConfigError, match="model=lenet: REAL workloads are uniform, vgg16, resnet50, bert-base, gpt2-small"):
        make_workload({"kind": "real", "model": "lenet"}, 2)
    with pytest.raises(ValueError, match="a workload is emulated or real, not 'other'"):
        make_workload({"kind": "other"}, 2)
    with pytest.raises(ValueError, match="a job has at least 1 worker, not 0"):
        make_workload({"kind": "real", "model": "vgg16"}, 0)
