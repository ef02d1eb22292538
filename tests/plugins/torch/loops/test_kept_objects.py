"""Gradients that the user holds on to, sets before backward, or lets others write to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commsched

from ..where import here
from .loop import LARGE, Data, batch, mlp, require_plain, run, train


@pytest.mark.parametrize("of_model", [False, True])
@pytest.mark.parametrize("local_passes", [0, 1])
def test_gradients_listed_once_are_those_of_every_step(local_passes: int, of_model: bool) -> None:
    """With zero_grad(set_to_none=False), ``.grad`` is always the same object."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        data.loss(model, 0).backward()
        listed = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
        seen = []
        for step in range(1, 4):
            (model if of_model else optimizer).zero_grad(set_to_none=False)
            seen.append([gradient.clone() for gradient in listed])
            for number in range(local_passes):
                with data.no_sync(optimizer):
                    data.loss(model, 10 * step + number).backward()
            data.loss(model, step).backward()
            seen.append([gradient.clone() for gradient in listed])
            torch._foreach_mul_(listed, 0.5)
            optimizer.step()
            assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), listed))
        return seen

    require_plain(loop)


def test_gradients_set_before_the_first_backward_are_those_of_every_step() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        listed = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), listed):
            parameter.grad = gradient
        for step in range(4):
            torch._foreach_zero_(listed)
            data.loss(model, step).backward()
            torch._foreach_mul_(listed, 0.5)
            optimizer.step()

    require_plain(loop)


def test_zeros_put_there_while_averages_are_on_their_way_do_not_touch_them() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        seen = []
        for step in range(4):
            data.loss(model, step).backward()
            optimizer.step()
            held = [parameter.grad for parameter in model.parameters()]
            optimizer.zero_grad(set_to_none=False)
            seen.append([bool(gradient.any()) for gradient in held])
        return seen

    require_plain(loop, config=LARGE)


def test_zeros_in_place_of_what_was_set_by_hand() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = (parameter * 2).detach() if step != 1 else parameter * 2  # which has a graph
            optimizer.zero_grad(set_to_none=False)
            assert not any(parameter.grad.requires_grad or parameter.grad.any() for parameter in model.parameters())
            data.loss(model, step).backward()
            optimizer.step()

    require_plain(loop)


@pytest.mark.parametrize("local", [False, True])
def test_a_flat_buffer_of_gradients_is_refused_by_name(local: bool) -> None:
    """It would be zeroed, or clipped, without those that travel."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        flat = here(torch.zeros(sum(parameter.numel() for parameter in model.parameters()), dtype=torch.float64))
        parts = flat.split([parameter.numel() for parameter in model.parameters()])
        for parameter, part in zip(model.parameters(), parts):
            parameter.grad = part.view_as(parameter)
        if local:
            with data.no_sync(optimizer):
                data.loss(model).backward()
        data.loss(model).backward()
        optimizer.step()

    with pytest.raises(commsched.CommschedError, match=r"'2\.bias'\.grad is a view of a larger tensor"):
        run(loop)


def test_views_put_there_after_backward_are_copied() -> None:
    """Gradients of several losses that were made one, flat."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) * 0.5
            parts = flat.split([parameter.numel() for parameter in model.parameters()])
            for parameter, part in zip(model.parameters(), parts):
                parameter.grad = part.view_as(parameter)
            optimizer.step()

    require_plain(loop)


def test_gradients_that_autograd_makes_as_views_of_one_tensor() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(torch.randn(2, 2, dtype=torch.float64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.cat(list(self.parts))

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for number in range(2):
                with data.no_sync(optimizer):
                    data.loss(model, 10 * step + number).backward()
            data.loss(model, step).backward()
            optimizer.step()

    require_plain(loop, model=Joined)


class AddsByItself(torch.autograd.Function):
    """Its backward adds to ``weight.grad``, as fused kernels do, and returns none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.detach().t()

    @staticmethod
    def backward(ctx: Any, outgoing: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        own = outgoing.t() @ x
        if ctx.weight.grad is None:
            ctx.weight.grad = own
        else:
            ctx.weight.grad.add_(own)
        return outgoing @ ctx.weight.detach(), None


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_function_whose_backward_adds_to_grad_by_itself(set_to_none: bool) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(AddsByItself.apply(x + self.first.bias, self.first.weight)))

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            data.loss(model, step).backward()
            optimizer.step()

    require_plain(loop, model=lambda: Fused().double())


@pytest.mark.parametrize("one_rank", [False, True])
def test_torch_autograd_grad_between_backward_and_step(one_rank: bool) -> None:
    """It adds to no gradient, so no round ends with it, whoever calls it."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            if 0 in data.ranks or not one_rank:
                torch.autograd.grad(model(batch(0, step)).sum(), list(model.parameters()))
            optimizer.step()

    require_plain(loop)


@pytest.mark.parametrize("steps_itself", [False, True])
def test_a_hook_from_before_wrapping_that_drops_the_gradient_is_refused_by_name(steps_itself: bool) -> None:
    def make() -> Any:
        model: Any = mlp()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda it: model.after_gradient(it))
        return model

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        def drop(parameter: nn.Parameter) -> None:
            if steps_itself:
                optimizer.step()
            parameter.grad = None

        model.after_gradient = drop
        data.loss(model).backward()

    with pytest.raises(commsched.CommschedError, match=r"'2\.\w+' was dropped within backward, by a hook"):
        run(loop, model=make)


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "float32 and back": lambda model: model.float().double(),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
}


def convolution() -> nn.Module:
    layers = [nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 2, padding=1), nn.Flatten()]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("zeroed", ["before", "after"])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_model_that_is_converted(name: str, zeroed: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            train(data, model, optimizer, 1, step)
            if zeroed == "before":
                optimizer.zero_grad()
            CONVERSIONS[name](model)

    def fused(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

    tolerance = 1e-5 if name == "float32 and back" else 1e-9
    require_plain(loop, model=convolution, optimizer=fused, tolerance=tolerance)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("name", CONVERSIONS)
def test_gradients_that_are_converted_and_used(name: str) -> None:
    """By the next backward, which adds to them, or by the update."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, optimizer, 1)
        CONVERSIONS[name](model)
        for step in range(3):
            data.loss(model, step).backward()
            CONVERSIONS[name](model)
            optimizer.step()

    require_plain(loop, model=convolution, tolerance=1e-5 if name == "float32 and back" else 1e-9)


def test_gradients_that_are_shared_and_used_are_refused_by_name() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, optimizer, 1)
        model.share_memory()
        data.loss(model).backward()
        optimizer.step()

    with pytest.raises(commsched.CommschedError, match=r"replaced through \.data.* model\.to\(\), .* call zero_grad\(\) bef"):
        run(loop, model=convolution)


def test_memory_of_another_type_that_a_gradient_is_given_is_refused_by_name() -> None:
    """Copied where averages travel, its values would not be those that the update would have had."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        data.loss(model).backward()
        for gradient in [parameter.grad for parameter in _parameters_with_gradients(model)]:
            gradient.data = gradient.data.float()
        optimizer.step()

    with pytest.raises(commsched.CommschedError, match=r"replaced through \.data: assign to \.grad instead"):
        run(loop, model=convolution)


def _masked(model: nn.Module) -> None:
    for parameter in _parameters_with_gradients(model):
        parameter.grad.data = parameter.grad.data * 0.5


def _from_a_flat_one(model: nn.Module) -> None:
    gradients: Any = [parameter.grad for parameter in _parameters_with_gradients(model)]
    flat = nn.utils.parameters_to_vector(gradients)
    nn.utils.vector_to_parameters(flat / flat.norm(), gradients)


def _overwritten(model: nn.Module) -> None:
    for parameter in _parameters_with_gradients(model):
        parameter.grad.data = torch.full_like(parameter, 0.1)


def _set(model: nn.Module) -> None:
    for parameter in _parameters_with_gradients(model):
        parameter.grad.set_(parameter.grad * 0.5)


def _parameters_with_gradients(model: nn.Module) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


REPLACE_MEMORY: dict[str, Callable[[nn.Module], None]] = {
    "masked": _masked,
    "from a flat one": _from_a_flat_one,
    "overwritten": _overwritten,
    "set": _set,
}


@pytest.mark.parametrize("name", REPLACE_MEMORY)
def test_gradients_that_get_other_memory_through_data(name: str) -> None:
    """It is an edit as any other, and later ones are averaged in their own memory."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            data.loss(model, step).backward()
            REPLACE_MEMORY[name](model)
            if step > 1 and name != "from a flat one":  # a part of which has no memory of its own to add to
                data.loss(model, step + 10).backward()
            optimizer.step()

    require_plain(loop)


def _zero_what_was_given(data: Data, model: nn.Module, optimizer: Any, given: list[torch.Tensor], step: int) -> None:
    torch._foreach_zero_(given)
    data.loss(model, step).backward()


def _zero_after_accumulation(data: Data, model: nn.Module, optimizer: Any, given: list[torch.Tensor], step: int) -> None:
    optimizer.zero_grad()
    data.loss(model, step).backward()
    for parameter, values in zip(_parameters_with_gradients(model), given):
        parameter.grad.data = values
    data.loss(model, step + 5).backward()
    torch._foreach_mul_(given, 0.5)


def _step_again(data: Data, model: nn.Module, optimizer: Any, given: list[torch.Tensor], step: int) -> None:
    torch._foreach_mul_(given, 0.5)


USES = [_zero_what_was_given, _zero_after_accumulation, _step_again]


@pytest.mark.parametrize("from_a_flat_one", [False, True])
@pytest.mark.parametrize("use", USES, ids=lambda function: function.__name__)
def test_memory_given_to_gradients_and_used_later_is_refused_by_name(use: Callable[..., None], from_a_flat_one: bool) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        data.loss(model).backward()
        each = [parameter.grad * 0.5 for parameter in _parameters_with_gradients(model)]
        flat = nn.utils.parameters_to_vector(each)
        parts = flat.split([part.numel() for part in each])
        given = [part.view_as(whole) for part, whole in zip(parts, each)] if from_a_flat_one else each
        for parameter, values in zip(_parameters_with_gradients(model), given):
            parameter.grad.data = values
        optimizer.step()
        use(data, model, optimizer, given, 1)
        optimizer.step()

    with pytest.raises(commsched.CommschedError, match=r"grad was given memory through \.data, and something else still holds"):
        run(loop)


def test_memory_given_to_gradients_may_be_held_if_they_are_dropped() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        given: list[torch.Tensor] = []
        for step in range(4):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            [values.zero_() for values in given]
            given = [parameter.grad * 0.5 for parameter in _parameters_with_gradients(model)]
            for parameter, values in zip(_parameters_with_gradients(model), given):
                parameter.grad.data = values
            optimizer.step()

    require_plain(loop)


def test_one_rank_that_gives_gradients_other_memory_is_told() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        data.loss(model).backward()
        model[0].weight.grad.norm()
        if data.ranks == [1]:
            _masked(model)
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(commsched.CommschedError, match=r"the gradient of '0\.weight' was changed"):
        run(loop)


def test_reading_gradients_in_another_thread_while_backward_runs_is_refused_by_name() -> None:
    """There; backward goes on, and afterwards any thread may read."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        def read() -> None:
            try:
                model[2].weight.grad.sum()
            except commsched.UnsupportedError as error:
                refused.append(str(error))

        def read_elsewhere(_: Any = None) -> None:
            if len(data.ranks) > 1:
                return  # plain training: the gradient may not be there yet
            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            reader.join(60)
            assert not reader.is_alive()

        def forward(x: torch.Tensor) -> torch.Tensor:
            hidden = model[1](model[0](x))
            hidden.register_hook(read_elsewhere)
            return model[2](hidden)

        refused: list[str] = []
        for step in range(3):
            optimizer.zero_grad()
            data.loss(forward, step).backward()
            if len(data.ranks) == 1:
                assert len(refused) == step + 1
            read_elsewhere()
            optimizer.step()
        assert all("'2.weight' is read while backward runs in another thread" in text for text in refused)

    require_plain(loop)


def branches() -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in ("always", "sometimes")}).double()


def in_place(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.9)


def replaced(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad * 0.9


@pytest.mark.parametrize("decay", [in_place, replaced])
@pytest.mark.parametrize("used", ["by all", "by one rank"])
def test_gradients_that_decay_instead_of_being_zeroed(used: str, decay: Callable[[nn.Parameter], None]) -> None:
    """A rank that had none does not have the average that others keep a part of."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        def loss(rank: int, step: int) -> torch.Tensor:
            hidden = model["always"](batch(rank, step))
            if used == "by all" or rank == 0:
                hidden = hidden + model["sometimes"](batch(rank, step))
            return hidden.square().mean()

        for step in range(4):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    decay(parameter)
            data.mean(lambda rank, step=step: loss(rank, step)).backward()
            optimizer.step()

    if used == "by all":
        require_plain(loop, model=branches)
    else:
        with pytest.raises(commsched.CommschedError, match=r"of 'sometimes\.\w+' was kept over step\(\), but other ranks had"):
            run(loop, model=branches)


@pytest.mark.parametrize("edit", ["signs", "order", "noise, normalised"])
def test_edits_that_leave_the_norm_but_not_the_gradient(edit: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        generator = torch.Generator().manual_seed(data.ranks[0])
        data.loss(model).backward()
        for gradient in (parameter.grad for parameter in model.parameters()):
            if edit == "signs":
                gradient.mul_(here(torch.randint(0, 2, gradient.shape, generator=generator)) * 2 - 1)
            elif edit == "order":
                order = here(torch.randperm(gradient.numel(), generator=generator))
                gradient.copy_(gradient.flatten()[order].view_as(gradient))
            else:
                gradient.add_(here(torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)))
                gradient.div_(gradient.norm())
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(commsched.CommschedError, match=r"was changed before step\(\) to other values here than on other ranks"):
        run(loop)
