"""zero_grad(), of the model or the optimizer, wherever a loop has it."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
from torch import nn

import commsched

from .loop import Data, batch, require_plain, run, train


def zero(model: nn.Module, optimizer: Any, of_model: bool, set_to_none: bool) -> None:
    (model if of_model else optimizer).zero_grad(set_to_none=set_to_none)
    for parameter in model.parameters():
        assert parameter.grad is None if set_to_none else parameter.grad is None or not parameter.grad.any()


@pytest.mark.parametrize("where", ["before forward", "before backward", "after step", "after clipping and step"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("of_model", [True, False])
def test_gradients_are_zeroed(of_model: bool, set_to_none: bool, where: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(4):
            if where == "before forward":
                zero(model, optimizer, of_model, set_to_none)
            loss = data.loss(model, step)
            if where == "before backward":
                zero(model, optimizer, of_model, set_to_none)
            loss.backward()
            if where == "after clipping and step":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if where in ("after step", "after clipping and step"):
                zero(model, optimizer, of_model, set_to_none)

    require_plain(loop)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("of_model", [True, False])
def test_gradients_are_zeroed_between_backward_and_step(of_model: bool, set_to_none: bool) -> None:
    """Without gradients nothing is updated; with zeros, momentum and decay go on."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.1
        for step in range(4):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            if step in (1, 2):
                zero(model, optimizer, of_model, set_to_none)
            optimizer.step()

    require_plain(loop)


def test_gradients_are_never_zeroed() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            data.loss(model, step).backward()
            optimizer.step()

    require_plain(loop)


@pytest.mark.parametrize("of_model", [True, False])
def test_gradients_are_zeroed_once_and_add_up_after_that(of_model: bool) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(4):
            data.loss(model, step).backward()
            optimizer.step()
            if step == 0:
                zero(model, optimizer, of_model, set_to_none=False)

    require_plain(loop)


def test_step_without_backward() -> None:
    """With gradients of the step before, and with none."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, optimizer, steps=2)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        optimizer.step()
        train(data, model, optimizer, steps=1, first=2)

    require_plain(loop)


def test_step_before_the_first_backward() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        optimizer.step()
        train(data, model, optimizer)

    require_plain(loop)


@pytest.mark.parametrize("last_within", [False, True])
def test_no_sync_accumulates(last_within: bool) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for first in (0, 2):
            optimizer.zero_grad()
            with data.no_sync(optimizer):
                data.loss(model, first).backward()
                if last_within:
                    data.loss(model, first + 1).backward()
            if not last_within:
                data.loss(model, first + 1).backward()
            optimizer.step()

    require_plain(loop)


def test_no_sync_within_no_sync_lasts_until_the_outer_one_ends() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, optimizer, steps=1)  # from now on gradients have groups
        groups = data.session.core._groups.values()
        begun = [group.step for group in groups]
        with data.no_sync(optimizer):
            with data.no_sync(optimizer):
                data.loss(model, 1).backward()
            data.loss(model, 2).backward()
            assert [group.step for group in groups] == begun
        data.loss(model, 3).backward()
        optimizer.step()
        optimizer.synchronize()
        assert [group.step for group in groups] != begun

    run(loop)


def test_a_step_that_all_ranks_drop() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            if step != 1:
                optimizer.step()

    require_plain(loop)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("of_model", [False, True])
def test_a_step_that_all_ranks_drop_before_they_use_different_parts(of_model: bool, local: bool) -> None:
    """What is dropped was not whole, as a part was not used: ranks must not part over whether it goes on."""

    def loss(data: Data, model: Any, step: int, use: list[list[int]]) -> Any:
        return data.mean(lambda rank: sum(model[part](batch(rank, step)).square().mean() for part in use[rank]))

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(0, 6, 2):
            loss(data, model, step, [[0], [0, 1]]).backward()
            (model if of_model else optimizer).zero_grad()
            with data.no_sync(optimizer) if local else nullcontext():
                loss(data, model, step, [[0, 1], [2]]).backward()
            loss(data, model, step + 1, [[0, 1, 2], [0, 1, 2]]).backward()
            optimizer.step()
            optimizer.zero_grad()

    require_plain(loop, model=lambda: nn.ModuleList(nn.Linear(4, 2) for _ in range(4)).double())


DROPPED = [
    r"rank 0 called step\(\) in step 1, but rank 1 dropped the gradients",
    r"rank 1 dropped the gradients of that round or ran backward again, but rank 0 called step\(\) in step 1",
]


def test_a_step_that_one_rank_drops_is_an_error_on_both() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        (rank,) = data.ranks
        train(data, model, optimizer, steps=1)
        optimizer.zero_grad()
        data.loss(model, 1).backward()
        if rank == 0:
            optimizer.step()
        optimizer.zero_grad()
        try:
            with pytest.raises(commsched.TransportError, match=DROPPED[rank]):
                data.loss(model, 2).backward()
        finally:
            both.wait()
        data.session.abort("the test is over")

    both = threading.Barrier(2, timeout=60)
    run(loop)
