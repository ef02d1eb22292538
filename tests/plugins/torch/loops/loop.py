"""One training loop, run twice: by plain torch with the batches of all ranks, and on each rank with its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from commsched import SchedulerConfig, Session
from commsched.core.interfaces import Transport
from commsched.plugins.torch import ScheduledOptimizer
from commsched.session.local import local_sessions
from commsched.testing.check_plugin import Delayed
from commsched.testing.world import run_world

from ..where import here

# Weights are cut, and a bias goes with the last piece of its weight; all tensors are merged.
SMALL, LARGE = SchedulerConfig(96, 192), SchedulerConfig()
TIMEOUT_SECONDS = 300.0
CHECK_WEIGHTS = 1  # in every step
DELAY_SECONDS = 0.001  # the most at each send and reply
TOLERANCE = 1e-9  # relative, for float64: the sum over ranks has another order


def batch(rank: int, step: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return here(torch.randn(5, 4, generator=generator, dtype=torch.float64).to(dtype))


class Data:
    """What a loop trains with: the batches of one rank or, for plain training, of ``ranks``.

    Everything that a loop must do differently with commsched is here; there is little.
    """

    def __init__(self, ranks: Sequence[int], session: Session | None = None) -> None:
        self.ranks = ranks
        self._session = session

    @property
    def session(self) -> Session:
        assert self._session is not None, "plain training has no session"
        return self._session

    def mean(self, of_rank: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The mean of ``of_rank(rank)``, whose gradient is the average of theirs."""
        losses = [of_rank(rank) for rank in self.ranks]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def loss(
        self, model: Callable[[torch.Tensor], torch.Tensor], step: int = 0, dtype: torch.dtype = torch.float64
    ) -> torch.Tensor:
        return self.mean(lambda rank: model(batch(rank, step, dtype)).square().mean())

    def scheduled(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        """Line 2 of the README."""
        return ScheduledOptimizer(optimizer, model, session=self._session) if self._session is not None else optimizer

    def no_sync(self, optimizer: Any) -> AbstractContextManager[object]:
        return optimizer.no_sync() if self._session is not None else nullcontext()


Loop = Callable[[Data, Any, Any], Any]
MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(data: Data, model: nn.Module, optimizer: Any, steps: int = 3, first: int = 0) -> None:
    """The loop of every tutorial."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        data.loss(model, step).backward()
        optimizer.step()


def _seeded(model: MakeModel) -> nn.Module:
    torch.default_generator.manual_seed(3)  # not those of all devices too, which notes each time who asked for it
    its_model: nn.Module = here(model())
    return its_model


def alone(loop: Loop, *, world_size: int = 2, model: MakeModel = mlp, optimizer: MakeOptimizer = sgd) -> Any:
    """``loop`` with plain torch."""
    its_model = _seeded(model)
    return loop(Data(range(world_size)), its_model, optimizer(its_model))


def run(
    loop: Loop,
    *,
    world_size: int = 2,
    model: MakeModel = mlp,
    optimizer: MakeOptimizer = sgd,
    config: SchedulerConfig = SMALL,
    ordered: bool = False,
    wrap_transport: Callable[[Transport], Transport] | None = None,
    timeout_seconds: float | None = None,
) -> list[Any]:
    """What ``loop`` returns on every rank, with commsched. Sends and replies are delayed, and what is in flight is NaN, unless
    ``wrap_transport`` puts something else between. ``ordered``: tasks start in an agreed order."""

    def rank_loop(rank: int) -> Any:
        with sessions[rank] as session:
            data = Data([rank], session)
            return loop(data, models[rank], data.scheduled(optimizer(models[rank]), models[rank]))

    def delayed(transport: Transport) -> Transport:
        slow = Delayed(transport, transport.rank, DELAY_SECONDS)
        slow.ordered = ordered
        return slow

    models = [_seeded(model) for _ in range(world_size)]  # here: the random state of torch is that of the process
    sessions = local_sessions(world_size, config, wrap_transport=wrap_transport or delayed, check_weights=CHECK_WEIGHTS)
    try:
        return run_world(world_size, rank_loop, timeout_seconds=timeout_seconds or TIMEOUT_SECONDS)
    finally:
        for session in sessions:
            session.abort("the test is over")


def require_plain(
    loop: Loop,
    *,
    model: MakeModel = mlp,
    optimizer: MakeOptimizer = sgd,
    config: SchedulerConfig = SMALL,
    tolerance: float = TOLERANCE,
    ordered: bool = False,
    timeout_seconds: float | None = None,
) -> None:
    """What ``loop`` returns, the weights and the optimizer's state after it are those of plain training, on every rank."""

    def and_all_state(data: Data, its_model: nn.Module, its_optimizer: Any) -> Any:
        returned = loop(data, its_model, its_optimizer)
        weights = {name: parameter.detach().clone() for name, parameter in its_model.named_parameters()}
        return {"returned": returned, "weights": weights, "optimizer": its_optimizer.state_dict()}

    expected = alone(and_all_state, model=model, optimizer=optimizer)
    results = run(
        and_all_state, model=model, optimizer=optimizer, config=config, ordered=ordered, timeout_seconds=timeout_seconds
    )
    for rank, result in enumerate(results):
        require_close(result, expected, tolerance, f"rank {rank} differs from plain training:")
        require_close(result["weights"], results[0]["weights"], 0.0, f"rank {rank} differs from rank 0:")


def require_close(value: Any, expected: Any, tolerance: float = TOLERANCE, where: str = "differs:") -> None:
    """Alike in structure, with numbers within ``tolerance``, relative to the largest of each tensor."""
    if isinstance(expected, torch.Tensor):
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype), where
        both = value.detach(), expected.detach()
        a, b = (torch.view_as_real(each) if each.is_complex() else each.double() for each in both)
        largest = b.abs().max().item() if b.numel() else 0.0
        assert torch.allclose(a, b, rtol=0.0, atol=tolerance * largest + (1e-12 if tolerance else 0.0)), f"{where}: {a} {b}"
    elif isinstance(expected, dict):
        assert value.keys() == expected.keys(), where
        for key in expected:
            require_close(value[key], expected[key], tolerance, f"{where} {key}")
    elif isinstance(expected, list | tuple):
        assert len(value) == len(expected), where
        for index, (a, b) in enumerate(zip(value, expected)):
            require_close(a, b, tolerance, f"{where} {index}")
    elif isinstance(expected, float):
        assert math.isclose(value, expected, rel_tol=tolerance, abs_tol=1e-15), f"{where}: {value} {expected}"
    else:
        assert value == expected, f"{where}: {value} {expected}"
