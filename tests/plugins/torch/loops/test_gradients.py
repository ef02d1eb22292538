"""Gradients read or edited between backward and step() are averages, and what they then are is what the update uses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched import SchedulerConfig

from ..where import here
from .loop import LARGE, SMALL, Data, batch, require_plain, run


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def by_hand(model: nn.Module) -> torch.Tensor:
    norm = torch.stack([gradient.norm() for gradient in gradients(model)]).norm()
    for gradient in gradients(model):
        gradient.mul_(0.01 / norm)
    return norm


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-0.01, 0.01)


def replaced(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def replaced_by_what_says_nothing_of_it(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def with_total_norm(model: nn.Module) -> torch.Tensor:
    norm = nn.utils.get_total_norm(gradients(model))
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
    return norm


CLIPPING: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "foreach norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=True),
    "largest": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf")),
    "norm, error if not finite": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, error_if_nonfinite=True),
    "total norm": with_total_norm,
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "one layer only": lambda model: nn.utils.clip_grad_norm_(model[2].parameters(), 0.01),  # type: ignore[index]
    "by hand": by_hand,
    "through .data": through_data,
    "logged only": lambda model: [gradient.norm().item() for gradient in gradients(model)],
    "copied": lambda model: [gradient.clone() for gradient in gradients(model)],
    "replaced": replaced,
    "replaced unread": replaced_by_what_says_nothing_of_it,
}


@pytest.mark.parametrize(
    ("name", "config"),
    [*((name, SMALL) for name in CLIPPING), *((name, LARGE) for name in ("norm", "value", "replaced unread"))],
)
def test_clipping_and_editing(name: str, config: SchedulerConfig) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            seen.append(CLIPPING[name](model))
            optimizer.step()
        return seen

    require_plain(loop, config=config)


def _transposed_in_place(model: Any) -> None:
    model[0].weight.grad.t_()


def _transposed_through_data(model: Any) -> None:
    model[0].weight.grad.data = model[0].weight.grad.data.t()


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout")
@pytest.mark.parametrize("when", ["before step()", "before another backward", "kept over step()"])
@pytest.mark.parametrize("edit", [_transposed_in_place, _transposed_through_data], ids=lambda function: function.__name__)
def test_gradients_that_are_transposed(edit: Callable[[Any], None], when: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            if when != "kept over step()":
                optimizer.zero_grad()
            data.loss(model, step).backward()
            if when != "kept over step()":
                edit(model)
            if when == "before another backward":
                data.loss(model, step + 5).backward()
            optimizer.step()
            if when == "kept over step()":
                edit(model)

    require_plain(loop, model=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double())


def test_gradients_that_get_another_shape_are_refused_by_name() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        data.loss(model).backward()
        _transposed_in_place(model)
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(commsched.CommschedError, match=r"the gradient of '0\.weight' has the shape \[4, 8\]"):
        run(loop)


@pytest.mark.parametrize("clip_first", [False, True])
def test_a_gradient_dropped_between_backward_and_step(clip_first: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            if clip_first:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            model[0].weight.grad = None
            optimizer.step()

    require_plain(loop)


@pytest.mark.parametrize("ordered", [False, True])
def test_one_rank_may_log_its_gradients(ordered: bool) -> None:
    """Others may wait for it elsewhere before step(): in an all-reduce of the loss, say."""
    barrier = threading.Barrier(2)

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            if 0 in data.ranks:
                assert all(gradient.isfinite().all() for gradient in gradients(model))
            if len(data.ranks) == 1:
                barrier.wait(60)
            optimizer.step()

    require_plain(loop, config=LARGE, ordered=ordered)


def test_one_rank_may_log_its_gradients_where_it_lacks_some() -> None:
    """It learns which of them other ranks have, though these wait for it elsewhere before step()."""
    barrier = threading.Barrier(2)

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.mean(lambda rank, step=step: (model if rank else model[0])(batch(rank, step)).square().mean()).backward()
            if 0 in data.ranks:
                assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
            if len(data.ranks) == 1:
                barrier.wait(60)
            optimizer.step()

    require_plain(loop, config=LARGE)


def _added_to_the_next(data: Data, model: nn.Module, optimizer: Any, step: int) -> None:
    first = gradients(model)
    optimizer.zero_grad()
    data.loss(model, step + 5).backward()
    for parameter, gradient in zip(model.parameters(), first):
        parameter.grad = parameter.grad + 2 * gradient


def _dropped_by_the_next(data: Data, model: Any, optimizer: Any, step: int) -> None:
    held = model[2].weight.grad
    optimizer.zero_grad()
    data.loss(model[0], step + 5).backward()
    for parameter in model[0].parameters():
        parameter.grad = parameter.grad + held.sum()


@pytest.mark.parametrize("use", [_added_to_the_next, _dropped_by_the_next], ids=lambda function: function.__name__)
def test_a_gradient_that_is_held_keeps_its_values(use: Callable[..., None]) -> None:
    """Of several losses, say, whose gradients are combined by hand."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        products: list[torch.Tensor] = []
        last: list[torch.Tensor] = []
        for step in range(4):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            products += [(a * b).sum() for a, b in zip(last, gradients(model))]
            last = gradients(model)
            if step % 2:
                use(data, model, optimizer, step)
            optimizer.step()
        return products

    require_plain(loop)


def _noise(data: Data, model: nn.Module, of_the_rank: bool) -> None:
    generator = torch.Generator().manual_seed(data.ranks[0] if of_the_rank else 5)
    for gradient in gradients(model):
        gradient += 0.01 * here(torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype))


def _scaled_through_data(data: Data, model: nn.Module, of_the_rank: bool) -> None:
    for gradient in gradients(model):
        gradient.sum()
        gradient.data.mul_(0.5 + 1e-6 * of_the_rank * data.ranks[0])


def _overflow(data: Data, model: nn.Module, of_the_rank: bool) -> None:
    for gradient in gradients(model):
        gradient.fill_(float("inf") if data.ranks[0] == 0 or not of_the_rank else 1.0)


def _given_other_memory(data: Data, model: nn.Module, of_the_rank: bool) -> None:
    for gradient in gradients(model):
        gradient.data = gradient * (0.5 + 0.1 * of_the_rank * data.ranks[0])


EDITS = [_given_other_memory, _noise, _scaled_through_data, _overflow]


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("edit", EDITS, ids=lambda function: function.__name__)
def test_edits_that_differ_between_ranks_are_refused(edit: Callable[..., None], accumulated: bool) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        data.loss(model).backward()
        edit(data, model, True)
        if accumulated:
            data.loss(model, 5).backward()
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(
        commsched.CommschedError, match=r"of '\d\.\w+' was changed before step\(\) to other values here than on"
    ):
        run(loop)


@pytest.mark.parametrize("edit", EDITS, ids=lambda function: function.__name__)
def test_edits_that_are_the_same_on_all_ranks(edit: Callable[..., None]) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            if step == 1:
                edit(data, model, False)
            optimizer.step()
            if edit is _overflow:
                with torch.no_grad():
                    [parameter.fill_(1.0) for parameter in model.parameters()]

    require_plain(loop, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_edit_in_place_on_one_rank_is_refused_where_the_others_do_not_look() -> None:
    """They have nothing to compare it with."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        data.loss(model).backward()
        if 1 in data.ranks:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(commsched.CommschedError, match=r"of '\d\.\w+' was changed or dropped before step\(\) on some ranks"):
        run(loop)


@pytest.mark.parametrize("rank", range(3))
def test_the_rank_that_drops_a_gradient_is_named_on_the_others(rank: int) -> None:
    said: list[str] = []

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        data.loss(model).backward()
        if data.ranks == [rank]:
            model[2].weight.grad = None
        try:
            optimizer.step()
            optimizer.synchronize()
        except commsched.CommschedError as error:
            said.append(str(error))
            raise

    with pytest.raises(commsched.CommschedError):
        run(loop, world_size=3)
    line = f"'2.weight' was changed or dropped before step() on some ranks (rank {rank} has dropped one), but others"
    assert len(said) == 3
    assert all(line in each for each in said), said


def test_the_rank_that_does_not_step_is_named_on_the_others() -> None:
    said: dict[int, str] = {}

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        data.loss(model).backward()
        try:
            if data.ranks == [2]:
                optimizer.zero_grad()
                data.loss(model, 1).backward()
            optimizer.step()
            optimizer.synchronize()
        except commsched.CommschedError as error:
            said[data.ranks[0]] = str(error)
            raise

    with pytest.raises(commsched.CommschedError):
        run(loop, world_size=3)
    assert {said[rank].partition(":")[0] for rank in said} & {
        f"rank {rank} called step() in step 0, but rank 2 dropped the gradients of that round or ran backward again"
        for rank in range(2)
    }, said


def test_reading_a_gradient_within_backward_is_refused() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        model[2].weight.register_post_accumulate_grad_hook(lambda p: print(p.grad.sum()))
        data.loss(model).backward()

    with pytest.raises(commsched.CommschedError, match=r"'2\.weight' is read within backward"):
        run(loop, config=LARGE)


@pytest.mark.parametrize("before_wrapping", [False, True])
def test_hooks_that_change_gradients_within_backward(before_wrapping: bool) -> None:
    def halve(model: Any) -> None:
        model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        model[2].register_full_backward_pre_hook(lambda module, outgoing: (outgoing[0] * 3,))

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        if before_wrapping:
            halve(model)
        return model

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        if not before_wrapping:
            halve(model)
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            optimizer.step()

    require_plain(loop, model=make)


def test_gradients_of_inputs_and_torch_autograd_grad_beside_backward() -> None:
    """They take no part: a saliency map, say."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        maps = []
        for step in range(3):
            optimizer.zero_grad()
            inputs = here(torch.ones(2, 4, dtype=torch.float64)).requires_grad_()
            (saliency,) = torch.autograd.grad(model(inputs).sum(), inputs)
            data.loss(model, step).backward()
            model(inputs).sum().backward(inputs=[inputs])
            optimizer.step()
            maps += [saliency, inputs.grad]
        return maps

    require_plain(loop)


def test_parameters_gradients_by_torch_autograd_grad_are_this_ranks_own() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            own = torch.autograd.grad(data.loss(model, step), list(model.parameters()))
            expected = torch.autograd.grad(data.loss(model, step), list(model.parameters()))
            assert all(torch.equal(a, b) for a, b in zip(own, expected))
            optimizer.step()

    require_plain(loop)


def _as_float32(model: nn.Module) -> None:
    model.zero_grad()
    model.float()(batch(0, dtype=torch.float32)).sum().backward()


SPOILING: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "create_graph": (lambda model, loss: loss.backward(create_graph=True), r"has a graph \(create_graph=True\)"),
    "another type": (
        lambda model, loss: (loss.backward(), _as_float32(model)),
        r"the gradient of '2\.\w+' is torch\.float32.*when it was wrapped, the parameter was dense torch\.float64",
    ),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("name", SPOILING)
def test_what_would_spoil_a_gradient_is_refused_by_name(name: str) -> None:
    act, message = SPOILING[name]

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        act(model, data.loss(model))
        optimizer.step()

    with pytest.raises(commsched.CommschedError, match=message):
        run(loop)


class _ForwardOfItsOwn(torch.autograd.Function):
    """It has no gradient for the weight by autograd: backward returns None for it, and keeps it elsewhere, as Megatron does."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight = weight
        return inputs @ weight.detach().T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        if ctx.weight.main_grad is not None:
            ctx.weight.main_grad.add_(gradients[0].T @ inputs)
        return gradients[0] @ ctx.weight.detach(), None


@pytest.mark.parametrize("kept_elsewhere", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_autograd_function_that_returns_none_for_a_parameter(kept_elsewhere: bool, set_to_none: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        weight = model[0].weight
        for step in range(4):
            optimizer.zero_grad(set_to_none)
            weight.main_grad = torch.zeros_like(weight) if kept_elsewhere else None
            data.loss(lambda inputs: model[2](_ForwardOfItsOwn.apply(inputs, weight)), step).backward()
            if kept_elsewhere:
                weight.grad = weight.main_grad
            optimizer.step()

    require_plain(loop)
