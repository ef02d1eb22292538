"""A static order of launches ends by itself where backward leaves out parameters."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch import nn

from commsched import SchedulerConfig, Session
from commsched.plugins.torch import ScheduledOptimizer
from commsched.session.local import local_sessions
from commsched.testing.world import run_world
from tests.session.test_session import Ordered

#: Steps after which an order is static; steps after which it has ended.
STATIC, ENDED = 15, 25


class Experts(nn.Module):
    """The gradient of the front comes last, also if it comes with ``step()``: the order of readiness does not change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.front, self.back = nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False)

    def forward(self, inputs: torch.Tensor, uses_front: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.front(inputs) if uses_front else inputs
        return self.back(hidden)  # type: ignore[no-any-return]


def train(session: Session, together: threading.Barrier) -> tuple[list[bool], list[torch.Tensor]]:
    """Whether the order was static after each step, and the weights. From step STATIC on rank 1 leaves out the front. From
    step ENDED on rank 0 reads gradients before ``step()``, and rank 1 waits for that."""
    model, static = Experts(), []
    optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, session=session)
    if session.rank == 0:
        session.reconfigure(replace(session.core.next_config, order="static"))
    for step in range(ENDED + 5):
        optimizer.zero_grad()
        inputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(2 * step + session.rank))
        model(inputs, uses_front=step < STATIC or session.rank == 0).square().mean().backward()
        if step >= ENDED:
            if session.rank == 0:
                assert model.back.weight.grad is not None
                assert model.back.weight.grad.isfinite().all()
            together.wait(60)
        optimizer.step()
        static.append(session.core.is_static)
    optimizer.synchronize()
    return static, [parameter.detach().clone() for parameter in model.parameters()]


def test_a_rank_that_leaves_out_a_parameter_ends_the_static_order() -> None:
    sessions = local_sessions(2, SchedulerConfig(2000, 2000), wrap_transport=Ordered)
    together = threading.Barrier(2)

    def rank_main(rank: int) -> tuple[list[bool], list[torch.Tensor]]:
        with sessions[rank] as session:
            return train(session, together)

    (static, weights), (theirs, others) = run_world(2, rank_main)
    assert static[STATIC - 1]
    assert theirs[STATIC - 1]
    assert not any(static[ENDED:])
    assert not any(theirs[ENDED:])
    assert all(torch.equal(ours, other) for ours, other in zip(weights, others))
