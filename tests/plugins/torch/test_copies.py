"""Copies of a model in training, made while updates are outstanding: fresh, plain, and on their own."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .loops.loop import Data, batch, require_close, require_plain, train


def _saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _of_saved_weights(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    other.load_state_dict(torch.load(file), assign=True)
    return other


def _with_its_optimizer(model: nn.Module, optimizer: Any) -> tuple[Any, torch.optim.Optimizer]:
    return copy.deepcopy((model, optimizer))


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved_and_loaded,
    "saved weights": _of_saved_weights,
    "deepcopy of a submodule": lambda model: nn.Sequential(*(copy.deepcopy(module) for module in model)),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_plain_and_trains_alone(name: str) -> None:
    """The copy is trained by plain torch between the steps of the original, and neither notices the other."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            train(data, model, optimizer, 1, step)
            twin = COPIES[name](model)
            if len(data.ranks) == 1:
                assert [type(p) for p in twin.parameters()] == [nn.Parameter] * 4
                assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in twin.parameters())
            its_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
            before = [p.detach().clone() for p in twin.parameters()]
            twin(batch(5)).square().mean().backward()
            its_optimizer.step()
            require_close(before, [p.detach() for p in model.parameters()], 0.0)
            assert not any(torch.equal(a, b) for a, b in zip(before, twin.parameters()))

    require_plain(loop)


def test_a_copy_of_model_and_optimizer_goes_on_alone() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> list[torch.Tensor]:
        train(data, model, optimizer, 2)
        twin, its_optimizer = _with_its_optimizer(model, optimizer)
        assert type(its_optimizer) is torch.optim.SGD
        for step in range(2):
            its_optimizer.zero_grad()
            twin(batch(5, step)).square().mean().backward()
            its_optimizer.step()
        train(data, model, optimizer, 1, 2)
        return [p.detach() for p in twin.parameters()]

    require_plain(loop)


@pytest.mark.parametrize("made", ["before training", "after a step"])
def test_a_moving_average_of_the_weights(made: str) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> list[torch.Tensor]:
        if made == "after a step":
            train(data, model, optimizer, 1, 9)
        average = copy.deepcopy(model).requires_grad_(False)
        for step in range(3):
            train(data, model, optimizer, 1, step)
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters()):
                    mean.lerp_(parameter, 0.3)
        return list(average.parameters())

    require_plain(loop)


@pytest.mark.parametrize("foreach", [False, True])
def test_an_averaged_model(foreach: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> list[torch.Tensor]:
        update = torch.optim.swa_utils.get_ema_multi_avg_fn(0.7) if foreach else None
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=update)
        for step in range(3):
            train(data, model, optimizer, 1, step)
            average.update_parameters(model)
        return list(average.parameters())

    require_plain(loop)


def test_the_optimizers_state_is_saved_fresh() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        train(data, model, optimizer, 2)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        train(data, model, optimizer, 1, 2)
        file.seek(0)
        return torch.load(file)

    require_plain(loop, optimizer=lambda model: torch.optim.Adam(model.parameters()))


def test_copies_of_gradients_have_the_averages() -> None:
    """They lie in one buffer, where the average of one is there before that of another."""

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        copies = []
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            copies.append(copy.deepcopy([parameter.grad for parameter in model.parameters()]))
            optimizer.step()
        return copies

    require_plain(loop)
