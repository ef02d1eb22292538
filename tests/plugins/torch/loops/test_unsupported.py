"""What cannot be trained with is named before training, or before it goes wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import commsched
from commsched.plugins.torch import ScheduledOptimizer
from commsched.plugins.torch.checks import require_plain
from commsched.session.local import local_sessions
from commsched.testing.world import run_world

from .loop import Data, run, sgd, train
from .loop import require_plain as require_plain_training

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "parameter '0.weight' has no shape yet"),
    "8 bits": (lambda: nn.ParameterList([torch.zeros(2).to(torch.float8_e4m3fn)]), "parameter '0' is torch.float8_e4m3fn"),
}


class _Alone(nn.parallel.DistributedDataParallel):
    """As far as the collector sees; a real one needs a process group."""

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = model


def test_a_model_that_is_wrapped_elsewhere_is_named_before_training() -> None:
    """DDP would read each gradient in C++ while it is on its way."""
    wrapped: list[nn.Module] = []

    def make() -> nn.Module:
        wrapped.append(_Alone(nn.Linear(4, 2).double()))
        return wrapped[-1].module

    with pytest.raises(commsched.UnsupportedError, match=r"wrapped in _Alone, .*comm_hook"):
        run(lambda *_: None, model=make)


def test_a_wrapper_that_is_gone_does_no_harm() -> None:
    wrapper = _Alone(nn.Linear(4, 2))
    wrapper.itself = [wrapper]
    model = wrapper.module
    with pytest.raises(commsched.UnsupportedError):
        require_plain(model, model.parameters())
    del wrapper
    require_plain(model, model.parameters())


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("part", [False, True])
def test_a_model_that_is_wrapped_later_is_named_there(part: bool, steps: int) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, steps)
        optimizer.synchronize()
        _Alone(copy.deepcopy(model))
        _Alone(model[0] if part else model)

    with pytest.raises(commsched.CommschedError, match="_Alone is put around a model whose gradients a ScheduledOptimizer av"):
        run(loop)


def test_after_detach_a_model_may_be_wrapped() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> nn.Module:
        optimizer.detach()
        return _Alone(model)

    run(loop)


@pytest.mark.parametrize("where", ["around", "within"])
def test_sharded_models_are_named_before_training(where: str) -> None:
    """As far as their class says; a real one needs a process group. Its parameters are parts, though they look whole."""

    class Sharded(FullyShardedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self._fsdp_wrapped_module = module

        _apply = nn.Module._apply  # by which a module moves to a device: that of the class needs a real one

    outer: list[nn.Module] = []

    def make() -> nn.Module:
        inner = nn.Linear(4, 2).double()
        outer.append(Sharded(inner))
        return inner if where == "around" else nn.Sequential(outer[-1])

    message = {"around": "the model is wrapped in Sharded", "within": "module '0' is wrapped in Sharded"}[where]
    with pytest.raises(commsched.UnsupportedError, match=message):
        run(lambda *_: None, model=make)


@pytest.mark.parametrize("name", REFUSED)
def test_models_are_named_before_training(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(commsched.UnsupportedError, match=message):
        run(lambda *_: None, model=make)


def test_optimizers_are_named_before_training() -> None:
    sessions = local_sessions(2)
    model = nn.Linear(2, 2)
    with pytest.raises(commsched.UnsupportedError, match="LBFGS is not supported: it runs backward several times"):
        ScheduledOptimizer(torch.optim.LBFGS(model.parameters()), model, session=sessions[0])
    for session in sessions:
        session.abort("the test is over")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: nn.Linear(4, 2 + rank), r"'weight' float32\[2, 4\] on rank 0 but 'weight' float32\[3, 4\] on rank 1"),
        (
            lambda rank: nn.Linear(4, 2).to([torch.float32, torch.float64][rank]),
            "float32.* on rank 0 but .*float64.* on rank 1",
        ),
        (lambda rank: nn.Sequential(*[nn.Linear(4, 4)] * 1, *[nn.Linear(4, 4) for _ in range(rank)]), "rank 1 has 4"),
    ],
)
def test_different_models_are_named_before_any_data_moves(make: Callable[[int], nn.Module], message: str) -> None:
    def rank_loop(rank: int) -> None:
        with sessions[rank] as session:
            ScheduledOptimizer(torch.optim.SGD(models[rank].parameters(), lr=0.1), models[rank], session=session)

    models = [make(rank) for rank in range(2)]
    before = [[p.detach().clone() for p in model.parameters()] for model in models]
    sessions = local_sessions(2)
    with pytest.raises(commsched.ManifestMismatch, match=message):
        run_world(2, rank_loop, timeout_seconds=300)
    for model, weights in zip(models, before):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights))
    for session in sessions:
        session.abort("the test is over")


@pytest.mark.parametrize("rows", [1, 3])
def test_a_parameter_of_another_shape_is_named_until_it_has_another_optimizer(rows: int) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, 2)
        optimizer.zero_grad()
        model[2].weight.data = model[2].weight.data[:1].repeat(rows, 1)
        model[2].bias.data = model[2].bias.data[:1].repeat(rows)
        if new:
            optimizer = data.scheduled(sgd(model), model)
        train(data, model, optimizer, 2, 2)

    new = False
    wrong = rf"the gradient of '2\.(weight|bias)' has the shape \[{rows}.*the parameter had \[2.*make a new optimizer"
    with pytest.raises(commsched.CommschedError, match=wrong):
        run(loop)
    new = True
    require_plain_training(loop)


def test_a_group_that_is_removed() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, 1)
        del optimizer.param_groups[0]
        train(data, model, optimizer, 1, 1)

    def groups(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)

    with pytest.raises(commsched.CommschedError, match=r"were removed from param_groups.*freeze them"):
        run(loop, optimizer=groups)
