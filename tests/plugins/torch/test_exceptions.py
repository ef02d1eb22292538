"""A training loop that catches what is raised goes on as in plain torch, or ends with the error that ranks would diverge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commsched

from .loops.loop import LARGE, SMALL, Data, batch, require_plain, run, train

CONFIGS = pytest.mark.parametrize(("config", "ordered"), [(SMALL, False), (LARGE, False), (SMALL, True)])


class TooLarge(RuntimeError):
    """As torch.OutOfMemoryError."""


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise TooLarge("the batch is too large")


class Chain(nn.Module):
    """Forward and backward raise between the layers when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.fails == "forward":
            raise TooLarge("the batch is too large")
        x = torch.tanh(self.second(_Raise.apply(x) if self.fails == "backward" else x))  # type: ignore[no-untyped-call]
        return self.last(x)  # type: ignore[no-any-return]


def chain() -> nn.Module:
    return Chain().double()


def step(data: Data, model: Any, optimizer: Any, number: int, fails: str = "") -> None:
    """What a loop does that skips a batch that is too large."""
    optimizer.zero_grad()
    model.fails = fails
    try:
        data.loss(model, number).backward()
    except TooLarge:
        return
    finally:
        model.fails = ""
    optimizer.step()


@CONFIGS
@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("which", [{0}, {1}, {1, 2}, {3}], ids=str)
def test_all_ranks_may_skip_a_batch(fails: str, which: set[int], config: commsched.SchedulerConfig, ordered: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for number in range(4):
            step(data, model, optimizer, number, fails if number in which else "")

    require_plain(loop, model=chain, config=config, ordered=ordered)


def test_the_batch_is_tried_again_in_halves() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for number in range(3):
            optimizer.zero_grad()
            model.fails = "backward" if number == 1 else ""
            try:
                data.loss(model, number).backward()
            except TooLarge:
                model.fails = ""
                optimizer.zero_grad()
                for half in (slice(0, 2), slice(2, 5)):
                    data.mean(lambda rank: model(batch(rank, number)[half]).square().mean()).backward()  # noqa: B023
            optimizer.step()

    require_plain(loop, model=chain)


def test_backward_raised_and_what_it_left_is_used() -> None:
    """Without zero_grad(), the gradients of the layers that backward came to stay, and are added to."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, 1)
        optimizer.zero_grad()
        model.fails = "backward"
        for rank in data.ranks:
            with pytest.raises(TooLarge):
                (model(batch(rank, 1)).square().mean() / len(data.ranks)).backward()
        model.fails = ""
        data.loss(model, 2).backward()
        optimizer.step()
        train(data, model, optimizer, 1, 3)

    require_plain(loop, model=chain)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_batch_skipped_by_one_rank_is_an_error(fails: str, ordered: bool) -> None:
    """Skipped in forward, the rank takes part with its next batch instead, until it has none left."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for number in range(4):
            step(data, model, optimizer, number, fails if number == 1 and data.ranks == [1] else "")

    ends = r"rank 1 left" if fails == "forward" else r"rank \d (called step|dropped the gradients).*ranks would diverge"
    with pytest.raises(commsched.TransportError, match=ends):
        run(loop, model=chain, ordered=ordered)


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_the_last_batch_skipped_by_one_rank_is_an_error(fails: str) -> None:
    """There is no step after it in which the ranks would meet."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for number in range(2):
            step(data, model, optimizer, number, fails if number == 1 and data.ranks == [1] else "")

    with pytest.raises(commsched.CommschedError, match="rank 1"):
        run(loop, model=chain)


def _fail_in_forward(data: Data, model: Any, optimizer: Any) -> None:
    model.fails = "forward"
    train(data, model, optimizer, 1, 1)


def _fail_in_backward(data: Data, model: Any, optimizer: Any) -> None:
    model.fails = "backward"
    train(data, model, optimizer, 1, 1)


def _fail_in_a_hook(data: Data, model: Any, optimizer: Any) -> None:
    def hook(_: torch.Tensor) -> None:
        raise TooLarge("the batch is too large")

    model.second.weight.register_hook(hook)
    train(data, model, optimizer, 1, 1)


def _fail_between(data: Data, model: Any, optimizer: Any) -> None:
    data.loss(model, 1).backward()
    raise TooLarge("the batch is too large")


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("fail", [_fail_in_forward, _fail_in_backward, _fail_in_a_hook, _fail_between])
def test_what_ends_one_rank_is_told_to_the_others(fail: Callable[..., None], ordered: bool) -> None:
    told: list[str] = []

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, 1)
        if data.ranks == [1]:
            fail(data, model, optimizer)
        try:
            train(data, model, optimizer, 3, 1)
        except commsched.CommschedError as error:
            told.append(str(error))
            raise

    with pytest.raises((TooLarge, commsched.CommschedError), match="the batch is too large"):
        run(loop, model=chain, ordered=ordered)
    assert len(told) == 1
    assert "rank 1 ended: TooLarge: the batch is too large" in told[0]


def _closure(data: Data, model: Any, optimizer: Any, number: int, fails: str) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        model.fails = fails
        loss = data.loss(model, number)
        loss.backward()
        if fails == "closure":
            raise TooLarge("the batch is too large")
        return loss

    return closure


@pytest.mark.parametrize("fails", ["forward", "backward", "closure"])
def test_a_closure_may_raise(fails: str) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for number in range(4):
            try:
                optimizer.step(_closure(data, model, optimizer, number, fails if number == 1 else ""))
            except TooLarge:
                assert number == 1
            model.fails = ""

    require_plain(loop, model=chain)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, TooLarge])
def test_what_ends_an_update_is_told_to_the_others(error: type[BaseException]) -> None:
    """Half an update is in place; nobody may go on from there."""
    told: list[str] = []

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        def fail(*_: Any) -> None:
            raise error("no more")

        train(data, model, optimizer, 1)
        model(batch(0))
        if data.ranks == [1]:
            optimizer.optimizer.register_step_pre_hook(fail)
        try:
            train(data, model, optimizer, 3, 1)
        except commsched.CommschedError as failure:
            told.append(str(failure))
            raise

    with pytest.raises((error, commsched.CommschedError)):
        run(loop)
    assert len(told) == 1
    assert f"rank 1: the optimizer raised {error.__name__}: no more" in told[0]


class _OutOfMemory:
    """Stands for the undo log of an elastic job, which has no memory for its first copy."""

    def __init__(self) -> None:
        self.is_full = True

    def before_update(self, keys: Any) -> None:
        if self.is_full:
            self.is_full = False
            raise MemoryError

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_an_update_whose_copy_had_no_memory_is_made_by_the_next_reader() -> None:
    caught = []

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(4):
            if step == 2 and data.ranks == [1]:
                optimizer._undo = _OutOfMemory()
            optimizer.zero_grad()
            try:
                loss = data.loss(model, step)
            except MemoryError:
                caught.append(step)
                loss = data.loss(model, step)
            loss.backward()
            optimizer.step()

    require_plain(loop)
    assert caught == [2]


def test_who_catches_the_failure_is_told_again() -> None:
    """A rank that goes on regardless does not train on with weights of its own."""
    told: list[str] = []

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for number in range(4):
            if number == 1 and data.ranks == [1]:
                raise TooLarge("the batch is too large")
            try:
                train(data, model, optimizer, 1, number)
            except commsched.CommschedError as failure:
                told.append(str(failure))

    with pytest.raises((TooLarge, commsched.CommschedError), match="the batch is too large"):
        run(loop)
    assert len(told) >= 2
    assert all("rank 1 ended: TooLarge" in text for text in told)
