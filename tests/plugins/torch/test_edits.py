"""Edits of gradients whose averages are on the way are recorded, are done in time, and are the same on all ranks."""

from __future__ import annotations

import copy
import gc
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched.plugins.torch.edits import Edit, Edits, Recorded

from .loops.loop import Data, batch, require_plain, run, sgd, train
from .loops.test_overlap import LATE, PATIENCE_SECONDS, Held, networked


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _halved(model: nn.Module) -> None:
    for gradient in gradients(model):
        gradient *= 0.5
        gradient.div_(torch.tensor(3.0))


def _clamped(model: nn.Module) -> None:
    for gradient in gradients(model):
        gradient.clamp_(max=0.001)
        gradient.clip_(-0.002)


def _some_twice(model: Any) -> None:
    nn.utils.clip_grad_value_(model[0].parameters(), 0.001)
    torch._foreach_mul_(gradients(model), 4.0)
    nn.utils.clip_grad_value_(model.parameters(), 0.003)


EDITS: dict[str, Callable[[nn.Module], None]] = {
    "clip by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.001),
    "clip by value, one by one": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.001, foreach=False),
    "clip by value, foreach": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.001, foreach=True),
    "scaled": _halved,
    "clamped from one side": _clamped,
    "some of them twice": _some_twice,
}


@pytest.mark.parametrize("name", EDITS)
def test_nothing_waits_for_an_edit_and_its_gradients(name: str) -> None:
    def loop(network: Held | None, data: Data, model: Any, optimizer: Any) -> Any:
        train(data, model, optimizer, steps=1)
        optimizer.zero_grad()
        loss = data.loss(model, 1)
        if network is not None:
            network.hold()
            timer = threading.Timer(PATIENCE_SECONDS, network.let_go)
            timer.start()
        loss.backward()
        EDITS[name](model)
        optimizer.step()
        hidden = model[0](batch(7))
        if network is not None:
            assert network.let_go(), LATE
            timer.cancel()
        return hidden, model[2](torch.tanh(hidden)), [gradient.clone() for gradient in gradients(model)]

    networked(loop)


def _with_the_last_read(data: Data, model: Any) -> Any:
    return [model[2].weight.grad.clone(), model[2].bias.grad.sum()]


def _read_by_one_rank(data: Data, model: Any) -> None:
    if 0 in data.ranks:
        [gradient.sum() for gradient in gradients(model)]


def _views(data: Data, model: Any) -> Any:
    return [gradient.view(-1) for gradient in gradients(model)], [gradient.data for gradient in gradients(model)]


READS: dict[str, Callable[[Data, Any], Any]] = {
    "nothing": lambda data, model: None,
    "the last": _with_the_last_read,
    "on one rank": _read_by_one_rank,
    "through views": _views,
}


@pytest.mark.parametrize("after", READS)
@pytest.mark.parametrize("before", READS)
def test_what_is_read_before_and_after_an_edit(before: str, after: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            aliases = READS[before](data, model)
            seen += copy.deepcopy([aliases]) if before == "the last" else []
            _some_twice(model)
            seen += copy.deepcopy([aliases]) if before == "through views" else []  # they are of the same memory
            seen += copy.deepcopy([READS[after](data, model)])
            optimizer.step()
        return seen

    require_plain(loop)


def _accumulated(data: Data, model: nn.Module, optimizer: Any, step: int) -> None:
    data.loss(model, step + 5).backward()


def _without_sync(data: Data, model: nn.Module, optimizer: Any, step: int) -> None:
    with data.no_sync(optimizer):
        data.loss(model, step + 5).backward()
    data.loss(model, step + 6).backward()


def _dropped(data: Data, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    data.loss(model, step + 5).backward()


def _zeroed(data: Data, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    data.loss(model, step + 5).backward()


def _one_replaced(data: Data, model: Any, optimizer: Any, step: int) -> None:
    model[0].weight.grad = model[0].weight.grad * 2
    model[2].weight.grad = torch.full_like(model[2].weight, 0.25)


def _one_given_other_memory(data: Data, model: Any, optimizer: Any, step: int) -> None:
    model[0].weight.grad.data = model[0].weight.grad * 2


def _one_without(data: Data, model: Any, optimizer: Any, step: int) -> None:
    model[0].weight.grad = None


LATER = [_accumulated, _without_sync, _dropped, _zeroed, _one_replaced, _one_given_other_memory, _one_without]


@pytest.mark.parametrize("later", LATER, ids=lambda function: function.__name__)
@pytest.mark.parametrize("again", [False, True])
def test_what_becomes_of_edited_gradients(later: Callable[..., None], again: bool) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        held = []
        for step in range(4):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            _some_twice(model)
            if step % 2:
                held.append(gradients(model))  # they keep their values
            later(data, model, optimizer, step)
            if again:
                _some_twice(model)
            optimizer.step()
        return held

    require_plain(loop)


def test_gradients_that_are_kept_over_step_are_edited_once() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(4):
            data.loss(model, step).backward()
            _halved(model)
            optimizer.step()

    require_plain(loop)


def test_an_optimizer_that_needs_all_gradients_gets_the_edited_ones() -> None:
    class Elsewhere(torch.optim.SGD):
        pass

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            _some_twice(model)
            optimizer.step()

    require_plain(loop, optimizer=lambda model: Elsewhere(model.parameters(), lr=0.1))


def test_a_closure_may_edit() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = data.loss(model, step)
                loss.backward()
                _some_twice(model)
                return loss

            optimizer.step(closure)

    require_plain(loop)


def _other_number(model: nn.Module, rank: int) -> None:
    torch._foreach_mul_(gradients(model), 0.5 + 1e-6 * rank)


def _other_tensor(model: nn.Module, rank: int) -> None:
    torch._foreach_mul_(gradients(model), torch.tensor(0.5 if rank else -0.5))


def _other_limit(model: nn.Module, rank: int) -> None:
    for gradient in gradients(model):
        gradient.clamp_(max=0.5) if rank else gradient.clamp_(min=0.5)


def _other_order(model: nn.Module, rank: int) -> None:
    if rank:
        torch._foreach_mul_(gradients(model), 0.5)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    if not rank:
        torch._foreach_mul_(gradients(model), 0.5)


def _not_finite(model: nn.Module, rank: int) -> None:
    torch._foreach_mul_(gradients(model), float("nan" if rank else "inf"))


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize(
    "edit", [_other_number, _other_tensor, _other_limit, _other_order, _not_finite], ids=lambda function: function.__name__
)
def test_edits_that_differ_between_ranks_are_refused(edit: Callable[..., None], read: bool) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        data.loss(model).backward()
        if read and 1 in data.ranks:
            [gradient.sum() for gradient in gradients(model)]
        edit(model, data.ranks[0])
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(commsched.CommschedError, match=r"'\d\.\w+' was changed before step\(\) to other values here than on"):
        run(loop)


def test_an_edit_on_one_rank_only_is_refused() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        data.loss(model).backward()
        if 1 in data.ranks:
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(commsched.CommschedError, match=r"of '\d\.\w+' was changed or dropped before step\(\) on some ranks"):
        run(loop)


def test_an_edit_within_backward_is_refused() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        model[2].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(2))
        data.loss(model).backward()

    with pytest.raises(commsched.CommschedError, match=r"'2\.weight' is read within backward"):
        run(loop)


def test_numbers_that_are_rounded_differently_are_the_same() -> None:
    """Processors of different kinds compute a norm of float32 differently."""

    def recorded(number: float) -> Edits:
        edits, slot = Edits(), SimpleNamespace(flag=0, dtype=torch.float32, was_read=False)
        edits.record(Edit(torch.Tensor.mul_, False, [number], {}), "mul_", [slot], [Recorded(number, "+", math.log2(number))])  # type: ignore[list-item]
        return edits

    own = recorded(0.125)
    assert not own.differs((own.sizes + recorded(0.125 + 1e-8).sizes) / 2)
    assert own.differs((own.sizes + recorded(0.125 + 1e-4).sizes) / 2)


@pytest.mark.parametrize("read", [True, False])
def test_a_gradient_that_was_read_outlives_its_model(read: bool) -> None:
    def loop(data: Data, another: nn.Module, _: Any) -> Any:
        model = copy.deepcopy(another)
        optimizer = data.scheduled(sgd(model), model)
        data.loss(model).backward()
        held = gradients(model)
        if read:
            [gradient.sum() for gradient in held]
        del model, optimizer
        gc.collect()
        return held[0] + 1

    if read:
        require_plain(loop)
    else:
        with pytest.raises(commsched.CommschedError, match=r"the gradient of '0\.weight' is read, but its model is gone"):
            run(loop)
