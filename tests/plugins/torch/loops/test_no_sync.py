"""Gradients that backward has left within no_sync(), and that no backward outside follows before step()."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched import SchedulerConfig

from .loop import LARGE, SMALL, Data, require_plain, run, train
from .test_gradients import CLIPPING

READS = ("logged only", "copied")
ON_THIS_RANK = r"the gradient of '\d\.\w+' was changed on rank {rank} .*last backward before step\(\) was within no_sync\(\)"
ON_ANOTHER_RANK = r"a gradient was changed on another rank .*put the last backward outside no_sync\(\)"


def local(data: Data, model: nn.Module, optimizer: Any, step: int) -> None:
    with data.no_sync(optimizer):
        data.loss(model, step).backward()


@pytest.mark.parametrize("after_an_average", [False, True])
@pytest.mark.parametrize("name", [name for name in CLIPPING if name not in READS])
def test_changing_own_sums_is_refused_on_all_ranks_before_the_update(name: str, after_an_average: bool) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        (rank,) = data.ranks
        train(data, model, optimizer, steps=1)
        now = [parameter.data for parameter in model.parameters()]
        before = [values.clone() for values in now]
        optimizer.zero_grad()
        if after_an_average:
            data.loss(model, 5).backward()
        local(data, model, optimizer, 1)
        CLIPPING[name](model)
        optimizer.step()
        with pytest.raises(commsched.UnsupportedError, match=ON_THIS_RANK.format(rank=rank)):
            data.loss(model, 2)
        assert all(map(torch.equal, now, before))
        both.wait()
        data.session.abort("the test is over")

    both = threading.Barrier(2, timeout=60)
    run(loop)


def test_a_rank_that_changed_nothing_is_told_too() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        (rank,) = data.ranks
        local(data, model, optimizer, 0)
        if rank == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        with pytest.raises(commsched.UnsupportedError, match=ON_THIS_RANK.format(rank=1) if rank == 1 else ON_ANOTHER_RANK):
            optimizer.synchronize()
        both.wait()
        data.session.abort("the test is over")

    both = threading.Barrier(2, timeout=60)
    run(loop)


@pytest.mark.parametrize("name", READS)
def test_own_sums_may_be_read(name: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            local(data, model, optimizer, step)
            CLIPPING[name](model)
            optimizer.step()

    require_plain(loop)


@pytest.mark.parametrize("of_model", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_own_sums_may_be_dropped(set_to_none: bool, of_model: bool) -> None:
    """A part of them, or all; and what was done to them before does not matter."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad()
            local(data, model, optimizer, step)
            if step % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                (model if of_model else optimizer).zero_grad(set_to_none=set_to_none)
            if step == 2:
                model[0].zero_grad(set_to_none=set_to_none)
            if step == 3:
                local(data, lambda x: model[0](x), optimizer, step)
            optimizer.step()

    require_plain(loop)


def test_a_gradient_hook_of_the_users_that_scales_each_pass() -> None:
    """Before it is accumulated, a gradient may be changed: by a hook, as with DistributedDataParallel."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        for step in range(3):
            optimizer.zero_grad()
            local(data, model, optimizer, step)
            optimizer.step()

    require_plain(loop)


def branches() -> nn.Module:
    return nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)]).double()


def test_a_kept_gradient_is_replaced_in_an_open_round() -> None:
    """The round has begun with one branch, and guards what the other has: until it is gone."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        data.loss(model[0], 0).backward()
        data.loss(model[1], 0).backward()
        optimizer.step()
        for step in range(1, 4):
            data.loss(model[0], step).backward()
            model[1].zero_grad()
            local(data, model[1], optimizer, step)
            optimizer.step()

    require_plain(loop, model=branches)


@pytest.mark.parametrize("config", [SMALL, LARGE])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("clip", ["value", "norm", "one after the other"])
def test_what_joins_an_open_round_is_clipped_as_averages(clip: str, first: int, config: SchedulerConfig) -> None:
    """A round that one branch has begun takes along what the other has got within no_sync()."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model[first], step).backward()
            for part in range(2):
                local(data, model[1 - first], optimizer, step + part)
            if clip == "one after the other":
                for parameter in model.parameters():
                    nn.utils.clip_grad_value_([parameter], 0.01)
            else:
                CLIPPING[clip](model)
            optimizer.step()

    require_plain(loop, model=branches, config=config)
