"""Weights that differ between ranks end the job by name, whatever made them differ."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from commsched.core.errors import CommschedError, RanksDiverged
from commsched.plugins.common import weights_check
from commsched.plugins.common.weights_check import PARTS
from commsched.plugins.torch import ScheduledOptimizer
from commsched.plugins.torch.compared import ComparedWeights
from commsched.plugins.torch.device import Device, digest_on_device
from commsched.session.local import local_sessions
from commsched.testing.world import run_world

from .loops.loop import Data, alone, mlp, train


def job(
    loop: Callable[[Data, Any, Any], None], model: Callable[[], nn.Module] = mlp, every: int = 1
) -> dict[int, CommschedError]:
    """The error with which each of three ranks ends."""
    errors: dict[int, CommschedError] = {}

    def rank_loop(rank: int) -> None:
        try:
            with sessions[rank] as session:
                optimizer = torch.optim.SGD(models[rank].parameters(), lr=0.1, momentum=0.9)
                data = Data([rank], session)
                loop(data, models[rank], data.scheduled(optimizer, models[rank]))
        except CommschedError as error:
            errors[rank] = error

    torch.manual_seed(1)
    models = [model() for _ in range(3)]
    sessions = local_sessions(3, check_weights=every)
    try:
        run_world(3, rank_loop, timeout_seconds=300)
    finally:
        for session in sessions:
            session.abort("the test is over")
    return errors


def flip_a_bit(parameter: torch.Tensor) -> None:
    """It does what a bad memory, or a bad link, may do."""
    parameter.data.as_strided((1,), (1,), parameter.storage_offset()).view(torch.int64)[0] ^= 1 << 20


def with_frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def with_strides() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 1, 2)), nn.Conv2d(3, 4, (1, 2)), nn.Flatten()).double()
    return model.to(memory_format=torch.channels_last)


def with_every_other_column() -> nn.Module:
    """The model has a weight that is a slice with a step, so no view of its bytes is contiguous."""
    model = mlp()
    wide = model[2].weight.detach().repeat_interleave(2, dim=1)
    model[2].weight = nn.Parameter(wide[:, ::2])
    return model


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (mlp, "2.weight"),
        (mlp, "0.bias"),
        (with_frozen, "0.weight"),
        (with_strides, "2.weight"),
        (with_every_other_column, "2.weight"),
    ],
)
def test_a_bit_that_flips_on_one_rank(model: Callable[[], nn.Module], name: str) -> None:
    def loop(data: Data, its_model: nn.Module, optimizer: Any) -> None:
        for step in count():  # every rank trains until it hears of it
            train(data, its_model, optimizer, steps=1, first=step)
            if step == 3 and data.ranks == [1]:
                optimizer.synchronize()
                flip_a_bit(its_model.get_parameter(name))

    errors = job(loop, model)
    assert isinstance(errors[0], RanksDiverged)
    assert str(errors[0]).startswith(f"weights differ between ranks after step 4: '{name}' is ")
    assert " on ranks 0, 2 but " in str(errors[0])
    assert " on rank 1" in str(errors[0])
    assert str(errors[0]).endswith(
        "; ranks on different kinds of processors may round updates differently: set check_weights=0 there"
    )
    assert [str(errors[rank]) for rank in (1, 2)] == [str(errors[0])] * 2


def test_it_is_found_in_the_last_step_too() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, optimizer, steps=1)
        if data.ranks == [2]:
            optimizer.synchronize()
            flip_a_bit(model.get_parameter("2.bias"))
        train(data, model, optimizer, steps=1)

    assert "'2.bias' is " in str(job(loop)[0])


def test_every_weight_is_compared_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_check, "MIN_PART_BYTES", 16)

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        if data.ranks == [1]:
            flip_a_bit(model.get_parameter("2.weight"))
        train(data, model, optimizer, steps=2 * PARTS + 1)

    errors = job(loop, every=2)
    assert str(errors[0]).startswith("weights differ between ranks after step ")
    assert "'2.weight' is " in str(errors[0])


def test_parameters_that_are_added_are_compared() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        optimizer.detach()
        scheduled = ScheduledOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), model, session=data.session)
        train(data, model, scheduled, steps=2)
        scheduled.add_param_group({"params": list(model[0].parameters())})
        train(data, model, scheduled, steps=1)
        scheduled.synchronize()
        if data.ranks == [1]:
            flip_a_bit(model.get_parameter("0.bias"))
        train(data, model, scheduled, steps=2)

    assert str(job(loop)[0]).startswith("weights of optimizer 2 differ between ranks after step 3: '0.bias' is ")


def test_an_optimizer_that_calls_its_closure_is_compared() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            return super().step(closure)

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        optimizer.detach()
        scheduled = ScheduledOptimizer(Twice(model.parameters(), lr=0.1), model, session=data.session)

        def closure() -> torch.Tensor:
            scheduled.zero_grad()
            loss = data.loss(model)
            loss.backward()
            return loss

        for step in range(3):
            scheduled.step(closure)
            if step == 1 and data.ranks == [1]:
                flip_a_bit(model.get_parameter("0.bias"))

    assert str(job(loop)[0]).startswith("weights of optimizer 2 differ between ranks after step 2: '0.bias' is ")


def test_without_the_setting_nothing_is_compared() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        if data.ranks == [1]:
            flip_a_bit(model.get_parameter("0.bias"))
        train(data, model, optimizer)

    assert job(loop, every=0) == {}
    assert alone(lambda data, model, optimizer: train(data, model, optimizer)) is None


class Wrapping(torch.Tensor):
    """A tensor whose values are its own affair, as those of distributed or quantized tensors."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError("nothing reads it")


def test_only_plain_numbers_are_compared() -> None:
    compared: list[dict[str, str]] = []
    session: Any = SimpleNamespace(
        device="cpu", check_weights=1, world_size=2, compare=lambda what, step, values, hint: compared.append(values)
    )
    parameters = {
        "plain": nn.Parameter(torch.ones(3)),
        "sparse": torch.ones(3).to_sparse(),
        "wrapping": torch.Tensor._make_wrapper_subclass(Wrapping, (3,)),
        "elsewhere": torch.ones(3, device="meta"),
    }
    slots: Any = [
        SimpleNamespace(flag=flag, name=name, parameter=tensor) for flag, (name, tensor) in enumerate(parameters.items())
    ]
    weights = ComparedWeights(session, Device(), slots, "")
    weights.compare(0)
    assert [list(values) for values in compared] == [["plain"]]


@pytest.mark.parametrize("nbytes", [0, 3, 64, 64 + 3, 4 * (1 << 20) + 8])
def test_a_digest_made_on_a_device_tells_any_bit(nbytes: int) -> None:
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    digest = int(digest_on_device(values))
    assert int(digest_on_device(values.clone())) == digest
    for place in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        for bit in (1, 128):
            changed = values.clone()
            changed[place] ^= bit
            assert int(digest_on_device(changed)) != digest
    if nbytes > 8:
        assert int(digest_on_device(values.flip(0))) != digest
