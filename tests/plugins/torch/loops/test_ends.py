"""How a loop ends: the last update, and ranks that end at different steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched.plugins.torch import ScheduledOptimizer
from commsched.session.local import local_sessions

from ..where import here
from .loop import Data, alone, mlp, require_close, require_plain, run, sgd, train


def test_the_last_update_is_in_place_when_the_session_closes() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> nn.Module:
        train(data, model, optimizer)
        return model

    expected = [parameter.detach() for parameter in alone(loop).parameters()]
    for model in run(loop):
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        require_close([parameter.detach() for parameter in model.parameters()], expected)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_last_backward_without_a_step_through_other_layers_on_each_rank(ordered: bool) -> None:
    """What one rank has begun to send, the other has to send too, or closing waits for ever."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, steps=1)
        inputs = here(torch.ones(1, 8, dtype=torch.float64))
        data.mean(lambda rank: model[2](inputs).sum() if rank else model[0](inputs[:, :4]).sum()).backward()

    require_plain(loop, ordered=ordered)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_with_fewer_batches_is_named_at_the_first_step_that_lacks_it(early: int, clip: bool) -> None:
    """The other rank has the weights of the last common step, and is told before it reads others."""
    weights: dict[int, list[torch.Tensor]] = {}

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        train(data, model, optimizer, steps=2)
        weights[data.ranks[0]] = [parameter.detach().clone() for parameter in model.parameters()]
        if data.ranks != [early]:
            optimizer.zero_grad()
            data.loss(model, 2).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            model(here(torch.ones(1, 4, dtype=torch.float64)))
            raise AssertionError("it computed with weights that cannot be")

    with pytest.raises(
        commsched.TransportError,
        match=rf"rank {early} left after step 1; the average of tensor '.*' of step 2 waits for it; if it had fewer batches",
    ):
        run(loop)
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))


def test_one_rank_is_plain_torch() -> None:
    """To the bit, without a hook."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        for step in range(3):
            train(data, model, optimizer, steps=1, first=step)
            assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        return [parameter.detach().clone() for parameter in model.parameters()]

    (session,) = local_sessions(1)
    torch.manual_seed(3)
    model = mlp()
    optimizer = ScheduledOptimizer(sgd(model), model, session=session)
    require_close(loop(Data([0]), model, optimizer), alone(loop, world_size=1), 0.0)
    with optimizer.no_sync():
        pass
    optimizer.synchronize()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    session.close()
