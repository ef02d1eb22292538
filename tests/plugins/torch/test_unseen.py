"""What reads parameters where PyTorch dispatches nothing: step() waits for it, or it is named."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import swa_utils

import commsched
from commsched.plugins.torch.marked import unnoticed

from .loops.loop import Data, batch, mlp, require_plain, run, train
from .test_accumulation import decaying

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")

X = batch(9)


def scripted_function(_: nn.Module) -> Callable[..., torch.Tensor]:
    code = "def f(x, w, b, v, c):\n  return torch.relu(x @ w.t() + b) @ v.t() + c\n"
    return torch.jit.CompilationUnit(code).f  # type: ignore[no-any-return]


def scripted_function_of_all(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    function = scripted_function(model)
    return lambda x: function(x, *model.parameters())


def scripted(model: nn.Module) -> nn.Module:
    return torch.jit.script(model)


def traced(model: nn.Module) -> nn.Module:
    return torch.jit.trace(model, X, check_trace=False)


class _Unseen(torch.autograd.Function):
    """As an extension in C++."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        with torch._C.DisableTorchFunctionSubclass():
            return x @ w.T + b

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        return None, gradient.T @ ctx.x, gradient.sum(0)


def extension(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    first = model[0]  # type: ignore[index]
    return lambda x: model[2](torch.relu(_Unseen.apply(x, first.weight, first.bias)))  # type: ignore[index,no-any-return]


def on_rank_0(data: Data, wrap: Callable[[Any], Any], model: nn.Module) -> Any:
    """Ranks are threads, and not everything in torch may be done by several at once. Rank 0 says all that goes to the log."""
    return wrap(model) if data.ranks == [0] else model


READERS: dict[str, Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "scripted function": scripted_function_of_all,
    "scripted module": scripted,
    "extension": extension,
    "address": lambda model: by_address(model),
}


@pytest.mark.parametrize("name", READERS)
def test_from_the_first_forward_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, on_rank_0(data, READERS[name], model), optimizer, 4)

    with caplog.at_level(logging.INFO, "commsched"):
        require_plain(loop)
    said = [record.message for record in caplog.records if "is read by code that does not wait" in record.message]
    assert len(said) == 1
    assert said[0].startswith("'0.")
    assert said[0].endswith("step() waits for all averages from now on")


@pytest.mark.parametrize("make", [scripted, traced, extension], ids=lambda make: make.__name__)
def test_only_later(make: Callable[[Any], Any]) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, 2)
        if len(data.ranks) == 1:
            optimizer.synchronize()  # before tracing
        forward = on_rank_0(data, make, model)
        train(data, model, optimizer, 1, 2)
        train(data, forward, optimizer, 3, 3)

    require_plain(loop)


def _penalty(model: nn.Module) -> torch.Tensor:
    """A reader that is seen, after one that is not."""
    return 0.1 * sum((parameter.square().sum() for parameter in model.parameters()), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("make", [scripted_function_of_all, extension], ids=lambda make: make.__name__)
def test_with_a_penalty_on_the_weights_in_the_loss(make: Callable[[Any], Any]) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        forward = on_rank_0(data, make, model)
        for step in range(3):
            optimizer.zero_grad()
            (data.loss(forward, step) + _penalty(model)).backward()
            optimizer.step()

    require_plain(loop)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = [len(x) - 2, 2]
        ids = torch.nested.nested_tensor([row.abs().long().sum(-1) % 10 for row in (x * 9).split(lengths)], layout=torch.jagged)
        return self.head(self.table(ids)).values()


@pytest.mark.parametrize("average", [False, True])
def test_nested_tensors(average: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        if average:
            swa_utils.AveragedModel(model)
        for step in range(3):
            optimizer.zero_grad()
            (data.loss(model, step) + _penalty(model)).backward()
            optimizer.step()

    require_plain(loop, model=lambda: Words().double())


class _Address(torch.autograd.Function):
    """As an extension that takes the address of the memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.w = x, w
        with torch._C.DisableTorchFunctionSubclass(), unnoticed():
            w_values, b_values = (
                torch.tensor(list((ctypes.c_double * each.numel()).from_address(each.data_ptr())), dtype=torch.float64)
                for each in (w, b)
            )
            return x @ w_values.view(w.shape).T + b_values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch._C.DisableTorchFunctionSubclass(), unnoticed():
            return gradient @ ctx.w, gradient.T @ ctx.x, gradient.sum(0)


def by_address(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    first, last = model[0], model[2]  # type: ignore[index]

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(_Address.apply(x, first.weight, first.bias))
        return _Address.apply(hidden, last.weight, last.bias)  # type: ignore[no-any-return]

    return forward


def test_an_address_taken_only_later_is_named_before_it_spoils_a_step() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, 2)
        train(data, by_address(model), optimizer, 1, 2)

    with pytest.raises(commsched.CommschedError, match=r"'\d\.\w+' has a gradient, but since step\(\) no reader"):
        run(loop)


@pytest.mark.parametrize("make", [scripted, traced, extension, by_address], ids=lambda make: make.__name__)
def test_later_and_synchronized_as_the_error_says(make: Callable[[Any], Any]) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, 2)
        forward = on_rank_0(data, make, model)
        for step in range(2, 5):
            if len(data.ranks) == 1:
                optimizer.synchronize()
            train(data, forward, optimizer, 1, step)

    require_plain(loop)


def _partly_scripted() -> nn.Module:
    return nn.Sequential(scripted(nn.Sequential(nn.Linear(4, 8), nn.ReLU())), nn.Linear(8, 2)).double()


@pytest.mark.parametrize(
    "make", [lambda: scripted(mlp()), lambda: traced(mlp()), _partly_scripted], ids=["scripted", "traced", "partly scripted"]
)
def test_models_that_are_torchscript_when_they_are_wrapped(make: Callable[[], nn.Module]) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        [p.detach() for p in model.parameters()]  # so that every parameter was read once
        train(data, model, optimizer)

    require_plain(loop, model=make)


def _loss(model: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = torch.func.functional_call(model, parameters, (x,))
    return outputs.square().mean()


def _grad(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return torch.func.grad(lambda p: _loss(model, p, x))(dict(model.named_parameters()))


def _grad_of_detached(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return torch.func.grad(lambda p: _loss(model, p, x))({k: p.detach() for k, p in model.named_parameters()})


def _vjp(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    loss, pull = torch.func.vjp(lambda p: _loss(model, p, x), dict(model.named_parameters()))
    return pull(torch.ones_like(loss))[0]


def _of_each_row(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    of_row = torch.func.grad(lambda p, row: _loss(model, p, row[None]))
    rows = torch.func.vmap(of_row, (None, 0))(dict(model.named_parameters()), x)
    return {name: gradients.mean(0) for name, gradients in rows.items()}


def _autograd_grad(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(model(x).square().mean(), list(named.values()))))


FUNCTIONAL = [_grad, _grad_of_detached, _vjp, _of_each_row, _autograd_grad]


@pytest.mark.parametrize("gradients_of", FUNCTIONAL, ids=lambda function: function.__name__)
@pytest.mark.parametrize("copied_before", [False, True])
def test_gradients_put_there_by_hand(gradients_of: Callable[..., dict[str, torch.Tensor]], copied_before: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        if copied_before:  # so that every parameter was read once
            [p.detach() for p in model.parameters()]
        for step in range(4):
            optimizer.zero_grad()
            of_ranks = [gradients_of(model, batch(rank, step)) for rank in data.ranks]
            for name, parameter in model.named_parameters():
                parameter.grad = torch.stack([gradients[name] for gradients in of_ranks]).mean(0)
            optimizer.step()

    require_plain(loop)


def _mapped(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.func.vmap(lambda row: model(row[None])[0])


def _called_functionally(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,))


def _forward_mode(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The parameters are read within a transform of what they are not."""
    return lambda x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[0]  # type: ignore[no-any-return]


def _graph(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        make_fx(model)(x)
        return model(x)  # type: ignore[no-any-return]

    return forward


def _exported(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.export.export(model, (x,)).module()(x)  # type: ignore[no-any-return]

    return forward


def _traced_each_time(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        graph = str(traced(model).graph)  # type: ignore[operator]
        assert "add_" not in graph  # the update is not part of the model
        return model(x)  # type: ignore[no-any-return]

    return forward


WITHIN = [_mapped, _called_functionally, _forward_mode, _graph, _exported, _traced_each_time]


@pytest.mark.parametrize("wrap", WITHIN, ids=lambda wrap: wrap.__name__)
def test_an_update_within_what_records_or_transforms(wrap: Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]) -> None:
    barrier = threading.Barrier(2)

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        def meet(*ranks: int) -> None:
            if data.ranks in [[rank] for rank in ranks]:
                barrier.wait(60)

        forward = on_rank_0(data, wrap, model)
        for step in range(3):
            optimizer.zero_grad()
            meet(1)  # some of what rank 0 does shows in all threads until its forward is over
            loss = data.loss(forward, step)
            meet(0)
            loss.backward()
            optimizer.step()
            meet(0, 1)

    require_plain(loop, optimizer=decaying)


def test_a_gradient_per_parameter_of_what_a_transform_captures() -> None:
    """Nothing of the parameters passes into the transform but by reading them in it."""

    def loop(data: Data, model: Any, optimizer: Any) -> list[torch.Tensor]:
        train(data, model, optimizer, 1)
        x = batch(7)
        return [torch.func.grad(lambda inputs: model(inputs).square().mean())(x)]

    require_plain(loop)


def test_a_counter_of_operations_does_not_count_updates() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def loop(data: Data, model: Any, optimizer: Any) -> int:
        train(data, model, optimizer, 1)
        with FlopCounterMode(display=False) as counter:
            model(batch(0))
        return int(counter.get_total_flops())

    require_plain(loop)


def test_reading_once_more_does_not_make_step_wait() -> None:
    """What is read for the first time after the first backward is read before the first step() all the same."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model[0], step).backward()
            data.loss(model, step).backward()
            optimizer.step()
            if len(data.ranks) == 1:
                assert optimizer._why_step_waits is None

    require_plain(loop)
