"""What lies in a parameter's memory, was made before step(), and is written to after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import commsched
from commsched.plugins.torch.checks import is_public

from .loop import Data, batch, mlp, require_plain, run, train

WRITTEN = r"'\d\.\w+' was written to after step\(\), while its update was outstanding.*call optimizer.synchronize\(\) before"


def _fill(state: dict[str, torch.Tensor]) -> None:
    for value in state.values():
        value.copy_(torch.ones_like(value))


def _halve(state: dict[str, torch.Tensor]) -> None:
    for value in state.values():
        value.mul_(0.5)


def _assign(state: dict[str, torch.Tensor]) -> None:
    saved = {name: torch.ones_like(value) for name, value in state.items()}
    with torch.no_grad():
        for name, value in saved.items():
            state[name][...] = value


WRITERS = [_fill, _halve, _assign]


@pytest.mark.parametrize("wrapped", [True, False])
def test_memory_that_other_processes_read_is_up_to_date_after_step(wrapped: bool) -> None:
    """Such a reader waits for nothing."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        as_others_see_it = [np.asarray(parameter.detach()) for parameter in model.parameters()]
        if not wrapped:
            optimizer.zero_grad()
            model.share_memory()
            as_others_see_it = [np.asarray(parameter.detach()) for parameter in model.parameters()]
        seen = []
        for step in range(4):
            train(data, model, optimizer, 1, step)
            seen += [torch.from_numpy(each.copy()) for each in as_others_see_it]
        return seen

    require_plain(loop, model=(lambda: mlp().share_memory()) if wrapped else mlp)


def test_memory_that_processes_cannot_share_is_not_looked_at() -> None:
    strided = torch.ones(2, 2)
    assert [is_public(each) for each in (strided, strided.to_sparse(), strided.to("meta"))] == [False] * 3
    assert is_public(strided.share_memory_())


class Parts(nn.Module):
    """Its parameters are parts of one tensor, as when a fused weight is split."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.whole = [torch.randn(12, 4, dtype=torch.float64)]  # in a list: it is no part of the model
        for linear, part in zip((self.q, self.k, self.v), self.whole[0].chunk(3)):
            linear.weight = nn.Parameter(part)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.q(inputs) @ self.k(inputs).T).softmax(-1) @ self.v(inputs)
        return out


@pytest.mark.parametrize("moved", [False, True], ids=["as made", "in memory of their own"])
def test_parameters_that_are_parts_of_one_tensor(moved: bool) -> None:
    """An update of one changes the version of all, which is no writing by the user."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(6):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            optimizer.step()
            for name in ("v", "q", "k")[step % 3 :]:  # each by itself, while the others are outstanding
                getattr(model, name).weight.sum().item()

    def make() -> nn.Module:  # float() and double() give other memory, and leave the common version
        return Parts().float().double() if moved else Parts()

    require_plain(loop, model=make)


def test_parts_of_one_tensor_that_only_some_ranks_use() -> None:
    def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
        inputs = model.q(batch(rank, step))
        loss: torch.Tensor = (model.k(inputs) if rank == 1 else inputs).square().mean()
        return loss

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad()
            data.mean(partial(loss_of, model, step)).backward()
            optimizer.step()
            for name in ("k", "q")[step % 2 :]:
                getattr(model, name).weight.sum().item()

    require_plain(loop, model=Parts)


def test_writing_to_the_tensor_of_which_they_are_parts_is_refused_by_name() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, 2)
        model.whole[0].mul_(0.5)
        train(data, model, optimizer, 1, 2)

    with pytest.raises(
        commsched.CommschedError, match=r"'q.weight' was written to after step\(\).* or one of which it is a part"
    ):
        run(loop, model=Parts)


@pytest.mark.parametrize("write", WRITERS)
def test_an_earlier_state_dict_as_a_target_is_refused_by_name(write: Callable[[Any], None]) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        state = model.state_dict()
        train(data, model, optimizer, 2)
        write(state)
        train(data, model, optimizer, 1, 2)

    with pytest.raises(commsched.CommschedError, match=WRITTEN):
        run(loop)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("made", ["after step", "before, and synchronized"])
def test_a_state_dict_as_a_target(write: Callable[[Any], None], made: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        state = model.state_dict()
        train(data, model, optimizer, 2)
        if made == "after step":
            state = model.state_dict()
        elif len(data.ranks) == 1:
            optimizer.synchronize()
        write(state)
        train(data, model, optimizer, 2, 2)

    require_plain(loop)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_into_an_earlier_state_dict(tmp_path: Any) -> None:
    saved = {"model": {name: torch.ones_like(value) for name, value in mlp().state_dict().items()}}
    dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        state = {"model": model.state_dict()}
        train(data, model, optimizer, 2)
        if data.ranks == [0]:  # it loads what is in its own memory, and not by several threads at once
            dcp.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
        model.load_state_dict(state["model"])

    with pytest.raises(commsched.CommschedError, match=WRITTEN):
        run(loop)


def _plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _decaying_backwards(model: nn.Module) -> torch.optim.Optimizer:
    """Its result depends on which of two parameters in one memory is updated first."""
    return torch.optim.SGD([*model.parameters()][::-1], lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize("optimizer", [_plain_sgd, _decaying_backwards])
@pytest.mark.parametrize("tied_at", [0, 2])
def test_parameters_that_come_to_lie_in_the_same_memory_after_wrapping(tied_at: int, optimizer: Any) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        read = []
        for step in range(4):
            if step == tied_at:
                model[2].weight.data = model[1].weight.data
            train(data, model, optimizer, 1, step)
            read.append(model[1].weight.detach().clone())  # while the update of the other one would be outstanding
        return read

    def square() -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))).double()

    require_plain(loop, model=square, optimizer=optimizer)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)])
def test_a_tied_weight_that_the_optimizer_has_twice_is_updated_twice(kind: Any) -> None:
    """A script writes ``[*encoder.parameters(), *decoder.parameters()]``, say. torch warns, and makes two updates."""

    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        model[2].weight = model[0].weight
        return model

    def make(model: Any) -> torch.optim.Optimizer:
        return kind([*model[0].parameters(), *model[2].parameters(), *model[4].parameters()])

    require_plain(train, model=tied, optimizer=make)
