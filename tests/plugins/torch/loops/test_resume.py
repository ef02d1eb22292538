"""Checkpoints: what is saved is what plain training saves, and training goes on from them as if nothing had been."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commsched

from .loop import Data, alone, batch, mlp, require_close, require_plain, run, sgd, train

AT, STEPS = 3, 6


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


def saved(*values: Any) -> bytes:
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


def loaded(checkpoint: bytes) -> Any:
    return torch.load(io.BytesIO(checkpoint), weights_only=True)


def uninterrupted(data: Data, model: nn.Module, optimizer: Any) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        train(data, model, optimizer, steps=1, first=step)
        scheduler.step()
    return model.state_dict(), optimizer.state_dict()


def first_part(data: Data, model: nn.Module, optimizer: Any) -> bytes:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(AT):
        train(data, model, optimizer, steps=1, first=step)
        scheduler.step()
    return saved(model.state_dict(), optimizer.state_dict(), scheduler.state_dict())


@pytest.mark.parametrize("when", ["before wrapping", "after wrapping", "before wrapping, on rank 0 only"])
def test_a_job_that_goes_on_from_a_checkpoint(when: str) -> None:
    """New sessions, models and optimizers, as a new job has."""
    checkpoints = run(first_part, optimizer=adamw)
    require_close(loaded(checkpoints[0]), loaded(alone(first_part, optimizer=adamw)))
    require_close(loaded(checkpoints[0]), loaded(checkpoints[1]), 0.0)
    made: list[nn.Module] = []

    def other_weights() -> nn.Module:
        model = mlp()
        made.append(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(len(made))
        return model

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        if when == "before wrapping" or (when == "before wrapping, on rank 0 only" and model is made[0]):
            weights, state, _ = loaded(checkpoints[0])
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        return optimizer

    def second_part(data: Data, model: nn.Module, optimizer: Any) -> Any:
        # Before the checkpoint is loaded, as everywhere: making a scheduler sets the learning rate.
        weights, state, schedule = loaded(checkpoints[data.ranks[0]])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if when == "after wrapping":
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        scheduler.load_state_dict(schedule)
        for step in range(AT, STEPS):
            train(data, model, optimizer, steps=1, first=step)
            scheduler.step()
        return model.state_dict(), optimizer.state_dict()

    expected = alone(uninterrupted, optimizer=adamw)
    for weights_and_state in run(second_part, model=other_weights, optimizer=make):
        require_close(weights_and_state, expected)


def test_all_ranks_begin_as_rank_0() -> None:
    """Parameters, frozen ones too, and buffers."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
        model[2].bias.requires_grad_(False)
        if next(made) == 2:  # after plain training and rank 0
            for value in model.state_dict().values():
                value.add_(1)
        return model

    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        buffers = [buffer.clone() for buffer in model.buffers()]
        train(data, model, optimizer)
        return buffers

    made = itertools.count()
    require_plain(loop, model=make)


def test_a_checkpoint_loaded_in_the_middle_of_a_run() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, optimizer, steps=2)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(data, model, optimizer, steps=2, first=2)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        train(data, model, optimizer, steps=2, first=4)

    require_plain(loop, optimizer=adamw)


def test_a_state_loaded_right_after_step_is_not_updated_by_it() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, optimizer, steps=2)
        kept = copy.deepcopy(optimizer.state_dict())
        train(data, model, optimizer, steps=1, first=2)
        optimizer.load_state_dict(kept)
        train(data, model, optimizer, steps=2, first=3)

    require_plain(loop, optimizer=adamw)


def test_loading_between_backward_and_step() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, optimizer, steps=2)
        kept = saved(model.state_dict(), optimizer.state_dict())
        train(data, model, optimizer, steps=1, first=2)
        optimizer.zero_grad()
        data.loss(model, 3).backward()
        weights, state = loaded(kept)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        optimizer.step()

    require_plain(loop, optimizer=adamw)


def test_loading_with_assign_is_not_lost() -> None:
    """``assign=True`` puts other parameters into the model, which the optimizer does not know: as in plain torch."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        train(data, model, optimizer, steps=2)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        train(data, model, optimizer, steps=1, first=2)
        model.load_state_dict(weights, assign=True)
        return model(batch(7))

    require_plain(loop)


def _by_parameter(optimizer: Any, model: nn.Module) -> Any:
    return [dict(optimizer.state[parameter]) for parameter in model.parameters()]


STATES: dict[str, Callable[[Any, nn.Module], Any]] = {
    "state": _by_parameter,
    "state_dict": lambda optimizer, model: optimizer.state_dict(),
    "pickled": lambda optimizer, model: pickle.loads(pickle.dumps(optimizer)).state_dict(),
    "state_dict of the one that was wrapped": lambda optimizer, model: getattr(optimizer, "optimizer", optimizer).state_dict(),
}


@pytest.mark.parametrize("name", STATES)
def test_the_optimizers_state_is_fresh(name: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        states = []
        for step in range(3):
            train(data, model, optimizer, steps=1, first=step)
            states.append(copy.deepcopy(STATES[name](optimizer, model)))
        return states

    require_plain(loop, optimizer=adamw)


def test_state_dict_hooks_are_those_of_the_users_optimizer() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        calls: list[str] = []
        optimizer.register_state_dict_pre_hook(lambda *_: calls.append("state_dict begins"))
        optimizer.register_state_dict_post_hook(lambda *_: calls.append("state_dict ends"))
        optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load begins"))
        optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("load ends"))
        train(data, model, optimizer, steps=1)
        optimizer.load_state_dict(optimizer.state_dict())
        return calls

    require_plain(loop)


def test_copies_of_the_optimizer_are_the_users_own() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, optimizer)
        assert type(copy.deepcopy(optimizer)) is torch.optim.SGD

    run(loop)


class Preconditioned(torch.optim.SGD):
    """With a state as that of SOAP or Shampoo."""

    def fill(self) -> None:
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            factors = [torch.randn(size, size, dtype=torch.float64) for size in parameter.shape]
            self.state[parameter] = {
                "step": 7 + number,
                "GG": factors,
                "Q": [],
                "shapes": (tuple(parameter.shape), [torch.tensor(True), None, "x"]),
                "blocks": {0: {"root": parameter.detach().clone().t()}, "lr": 0.1},
            }
        self.state["calls"] = {"total": 3}


def test_lists_and_dicts_in_the_state_of_rank_0_are_those_of_all() -> None:
    def state(optimizer: torch.optim.Optimizer) -> list[Any]:
        return [*(optimizer.state[parameter] for parameter in optimizer.param_groups[0]["params"]), optimizer.state["calls"]]

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        twin = mlp()
        its_optimizer = Preconditioned(twin.parameters(), lr=0.1)
        if 0 in data.ranks:
            its_optimizer.fill()
        data.scheduled(its_optimizer, twin)
        return state(its_optimizer)

    first, second = run(loop)
    require_close(second, first, 0.0)
    assert [type(value) for value in second[0]["shapes"]] == [tuple, list]
    assert list(second[0]["blocks"]) == [0, "lr"]


def test_optimizers_with_other_groups_are_refused() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        layers = [model] if 0 in data.ranks else [model[0], model[2]]
        data.scheduled(torch.optim.SGD([{"params": list(layer.parameters())} for layer in layers], lr=0.1), model)

    message = r"groups hold these numbers of parameters: \[4\] on rank 0 but \[2, 2\] on rank 1"
    with pytest.raises(commsched.ManifestMismatch, match=message):
        run(loop)


def test_optimizers_of_other_classes_are_refused_by_name() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        kind = torch.optim.Adam if 0 in data.ranks else torch.optim.SGD
        data.scheduled(kind(model.parameters(), lr=0.1), model)

    with pytest.raises(commsched.ManifestMismatch, match=r"^the optimizer is of class Adam on rank 0 but SGD on rank 1"):
        run(loop)


def test_an_optimizer_of_a_subclass_on_one_rank_is_refused() -> None:
    class Logged(torch.optim.SGD):
        """Its step might be another."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        kind = Logged if 0 in data.ranks else torch.optim.SGD
        data.scheduled(kind(model.parameters(), lr=0.1), model)

    with pytest.raises(commsched.ManifestMismatch, match=r"Logged on rank 0 but SGD on rank 1; even a subclass"):
        run(loop)


def test_a_state_that_cannot_be_broadcast_names_the_way_out() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        its_optimizer = sgd(model[0])
        its_optimizer.state[model[0].weight]["projector"] = [object()]
        data.scheduled(its_optimizer, model)

    with pytest.raises(
        commsched.CommschedError, match=r"state 'projector' holds a object; .* make the ScheduledOptimizer before"
    ):
        run(loop)
