"""Several backward passes before one step(), without no_sync: what one is told to do for speed, and few do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import commsched
from commsched import SchedulerConfig

from .loops.loop import LARGE, SMALL, Data, batch, require_plain, run
from .test_rounds import Training, on_two_ranks
from .where import here

STEPS = 2
CHANGED_ON_SOME = r"the gradient of '\w+\.\w+' was changed or dropped before step\(\) on some ranks"


class Chain(nn.Module):
    """Parts that a loss may leave out, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(4, 4), nn.Linear(4, 4)
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, reentrant: bool = False) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.twice, x, use_reentrant=True) if reentrant else self.twice(x))
        return x


def chain() -> nn.Module:
    return Chain().double()


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def left(data: Data, model: Any, step: int) -> torch.Tensor:
    return data.loss(lambda x: model.left(model(x)), step)


def right(data: Data, model: Any, step: int) -> torch.Tensor:
    return data.loss(lambda x: model.right(model(x)), step)


def _three(data: Data, model: Any, optimizer: Any, step: int) -> None:
    for part in range(3):
        left(data, model, 3 * step + part).backward()


def _one_graph_twice(data: Data, model: Any, optimizer: Any, step: int) -> None:
    loss = left(data, model, step)
    loss.backward(retain_graph=True)
    loss.backward()


def _partly_disjoint(data: Data, model: Any, optimizer: Any, step: int) -> None:
    left(data, model, step).backward()
    right(data, model, step).backward()


def _second_touches_some(data: Data, model: Any, optimizer: Any, step: int) -> None:
    left(data, model, step).backward()
    data.loss(model.first, step + 5).backward()


def _zeroed_in_place(data: Data, model: Any, optimizer: Any, step: int) -> None:
    left(data, model, step).backward()
    model.zero_grad(set_to_none=False)
    right(data, model, step).backward()


def _zeroed_by_the_optimizer(data: Data, model: Any, optimizer: Any, step: int) -> None:
    left(data, model, step).backward()
    optimizer.zero_grad(set_to_none=False)
    right(data, model, step).backward()


def _partly_dropped(data: Data, model: Any, optimizer: Any, step: int) -> None:
    left(data, model, step).backward()
    model.twice.zero_grad()
    right(data, model, step).backward()


def _clipped_between(data: Data, model: Any, optimizer: Any, step: int) -> None:
    left(data, model, step).backward()
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.01)
    left(data, model, step + 5).backward()


def _replaced_between(data: Data, model: Any, optimizer: Any, step: int) -> None:
    left(data, model, step).backward()
    model.first.weight.grad = model.first.weight.grad * 0.5
    model.twice.weight.grad = None
    data.loss(lambda x: model.left(torch.tanh(model.first(x))), step + 5).backward()


def _clipped_at_the_end(data: Data, model: Any, optimizer: Any, step: int) -> None:
    _partly_disjoint(data, model, optimizer, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def _local_after_averaged(data: Data, model: Any, optimizer: Any, step: int) -> None:
    left(data, model, step).backward()
    with data.no_sync(optimizer):
        right(data, model, step).backward()
    if step == 1:
        left(data, model, step + 5).backward()


def _gradients_of_a_function_between(data: Data, model: Any, optimizer: Any, step: int) -> None:
    left(data, model, step).backward()
    torch.autograd.grad(left(data, model, step), list(model.first.parameters()))
    right(data, model, step).backward()


def _reused_within_checkpoints(data: Data, model: Any, optimizer: Any, step: int) -> None:
    """The gradient of one parameter comes twice within one backward."""
    data.loss(lambda x: model.left(model(x, reentrant=True)), step).backward()


def _first_on_one_rank(data: Data, model: Any, optimizer: Any, step: int) -> None:
    """The other rank must count the average that it has no share in."""
    data.mean(lambda rank: _one_side(model, rank, step, rank == 1)).backward()
    data.mean(lambda rank: _one_side(model, rank, step + 5, False)).backward()


def _second_on_one_rank(data: Data, model: Any, optimizer: Any, step: int) -> None:
    data.mean(lambda rank: _one_side(model, rank, step, False)).backward()
    data.mean(lambda rank: _one_side(model, rank, step + 5, rank == 0)).backward()


def _dropped_on_the_only_rank(data: Data, model: Any, optimizer: Any, step: int) -> None:
    """What the other rank has dropped must not come back."""
    data.mean(lambda rank: _one_side(model, rank, step, rank == 1)).backward()
    model.right.zero_grad()
    data.mean(lambda rank: _one_side(model, rank, step + 5, step > 0 and rank == 1)).backward()


def _one_side(model: Any, rank: int, step: int, both: bool) -> torch.Tensor:
    hidden = model(batch(rank, step))
    loss: torch.Tensor = model.left(hidden).square().mean()
    return loss + model.right(hidden).square().mean() if both else loss


ACCUMULATE: dict[str, Callable[[Data, Any, Any, int], None]] = {
    function.__name__.strip("_"): function
    for function in (
        _three,
        _one_graph_twice,
        _partly_disjoint,
        _second_touches_some,
        _zeroed_in_place,
        _zeroed_by_the_optimizer,
        _partly_dropped,
        _clipped_between,
        _replaced_between,
        _clipped_at_the_end,
        _local_after_averaged,
        _gradients_of_a_function_between,
        _reused_within_checkpoints,
        _first_on_one_rank,
        _second_on_one_rank,
        _dropped_on_the_only_rank,
    )
}


@pytest.mark.parametrize(("config", "ordered"), [(SMALL, False), (LARGE, True)], ids=["cut", "merged, ordered"])
@pytest.mark.parametrize("name", ACCUMULATE)
def test_accumulation(name: str, config: SchedulerConfig, ordered: bool) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            ACCUMULATE[name](data, model, optimizer, step)
            optimizer.step()

    require_plain(loop, model=chain, optimizer=decaying, config=config, ordered=ordered)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.always = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        output: torch.Tensor = self.always(x)
        return output + self.sometimes(x) if both else output


def part(data: Data, model: Any, step: int) -> torch.Tensor:
    return data.loss(lambda x: model(x, False), step + 5)


def _local_then_a_part(data: Data, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    with data.no_sync(optimizer):
        data.loss(model, step).backward()
    part(data, model, step).backward()


def _zeroed_and_used_by_one_rank(data: Data, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    data.mean(lambda rank: model(batch(rank, step), rank == 1 or step == 0).square().mean()).backward()


def _model_zeroed_and_used_by_one_rank(data: Data, model: Any, optimizer: Any, step: int) -> None:
    model.zero_grad(set_to_none=False)
    data.mean(lambda rank: model(batch(rank, step), rank == 1 or step == 0).square().mean()).backward()


def _some_by_hand(data: Data, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    parameters = list(model.sometimes.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(data.loss(model.sometimes, step), parameters)):
        parameter.grad = gradient
    part(data, model, step).backward()


def _one_object_for_all(data: Data, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    of_rank = [here(torch.full((2, 4), rank + step + 1.0, dtype=torch.float64)) for rank in data.ranks]
    same = torch.stack(of_rank).mean(0)
    model.sometimes.weight.grad = model.always.weight.grad = same
    if step != 1:
        data.loss(lambda x: x[:, :2] + model.always.bias, step).backward()


LEFT = (
    _local_then_a_part,
    _zeroed_and_used_by_one_rank,
    _model_zeroed_and_used_by_one_rank,
    _some_by_hand,
)


@pytest.mark.parametrize(("config", "ordered"), [(SMALL, False), (LARGE, True)], ids=["cut", "merged, ordered"])
@pytest.mark.parametrize("accumulate", LEFT, ids=lambda function: function.__name__.strip("_"))
def test_gradients_from_before_that_the_last_backward_leaves_are_clipped_as_averages(
    accumulate: Callable[..., None], config: SchedulerConfig, ordered: bool
) -> None:
    """Clipping collects them all before it reads one."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            accumulate(data, model, optimizer, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()

    require_plain(loop, model=lambda: Branches().double(), config=config, ordered=ordered)


def test_gradients_from_before_are_unscaled_as_averages() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(2):
            optimizer.zero_grad()
            with data.no_sync(optimizer):
                scaler.scale(data.loss(model, step)).backward()
            scaler.scale(part(data, model, step)).backward()
            scaler.step(optimizer)
            scaler.update()

    require_plain(loop, model=lambda: Branches().double())


def test_one_tensor_set_by_hand_as_the_gradient_of_several() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(4):
            _one_object_for_all(data, model, optimizer, step)
            optimizer.step()

    require_plain(loop, model=lambda: Branches().double())


@pytest.mark.parametrize("read", [False, True])
def test_a_step_skipped_without_zero_grad_accumulates(read: bool) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> list[Any]:
        norms = []
        for step in range(4):
            left(data, model, step).backward()
            if read:
                norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        return norms

    require_plain(loop, model=chain)


def test_never_zeroed() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            _partly_disjoint(data, model, optimizer, step)
            optimizer.step()

    require_plain(loop, model=chain)


def test_losses_over_disjoint_parameters_travel_once() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> int:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model.left, step).backward()
            data.loss(model.right, step).backward()
            optimizer.step()
        step_of_the_network: int = optimizer._exchange.places.groups[0].step
        return step_of_the_network

    assert run(loop, model=chain) == [2, 2]


def test_gradients_are_averages_after_each_backward() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        seen = []
        for step in range(3):
            left(data, model, step).backward()
            seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        return seen

    require_plain(loop, model=chain)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("rank_that_steps", [0, 1])
def test_ranks_with_different_numbers_of_backward_passes_are_told(rank_that_steps: int, ordered: bool) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        left(data, model, 0).backward()
        if rank_that_steps in data.ranks:
            optimizer.step()
            optimizer.synchronize()
        else:
            left(data, model, 1).backward()

    with pytest.raises(
        commsched.TransportError, match=r"rank \d (called step\(\)|dropped .* or ran backward again).*, but rank \d"
    ):
        run(loop, model=chain, ordered=ordered)


@pytest.mark.parametrize("again", [False, True])
def test_an_edit_of_what_only_some_ranks_have_is_refused(again: bool) -> None:
    """Its own rank is the one to find it, as the other reads nothing."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        if 1 in data.ranks:
            left(data, model, 0).backward()
            nn.utils.clip_grad_value_(model.parameters(), 1e-6)
        if again:
            data.loss(lambda x: model.first(model.first(x)), 1).backward()
            data.loss(lambda x: model.first(x), 1).backward()
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(commsched.CommschedError, match=CHANGED_ON_SOME):
        run(loop, model=chain)


def _drop_the_right(model: Any, set_to_none: bool) -> None:
    if set_to_none:
        model.right.zero_grad()
    else:
        _zero_by_replacing(model.right)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_gradient_of_one_rank_that_all_drop(set_to_none: bool) -> None:
    """It is the average, also where this rank had none, that is dropped."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        data.mean(lambda rank: _one_side(model, rank, 0, rank == 1)).backward()
        _drop_the_right(model, set_to_none)
        data.mean(lambda rank: _one_side(model, rank, 5, rank == 0)).backward()
        optimizer.step()

    require_plain(loop, model=chain)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_gradient_that_all_drop_and_one_rank_makes_again_is_refused(set_to_none: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        data.mean(lambda rank: _one_side(model, rank, 0, rank == 1)).backward()
        _drop_the_right(model, set_to_none)
        if 0 in data.ranks:
            data.loss(model.right, 5).backward()
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(commsched.TransportError, match="another number of backward passes"):
        run(loop, model=chain)


def test_a_rank_that_drops_an_average_alone_is_refused_again_and_again() -> None:
    """The same error comes if the user catches it, and none when the session closes."""

    def rank_main(training: Training) -> None:
        training.backward()
        if training.session.rank == 1:
            training.model.weight.grad = None
        for _ in range(2):
            with pytest.raises(commsched.UnsupportedError, match="'weight' was changed or dropped before step"):
                training.backward()

    on_two_ranks(rank_main)


def _zero_by_replacing(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = torch.zeros_like(parameter)


def test_it_is_said_once_on_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            _three(data, model, optimizer, step)
            optimizer.step()

    with caplog.at_level(logging.INFO, "commsched"):
        run(loop, model=chain)
    said = [record.getMessage() for record in caplog.records if "accumulate" in record.getMessage()]
    assert said == [
        "gradients accumulate over several backward passes, and each is averaged; all but the last within optimizer.no_sync() "
        "would save its traffic"
    ]
