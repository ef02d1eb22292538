"""Sparse gradients: the update gets the average as a sparse gradient of the rows that any rank has touched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched import SchedulerConfig

from .loops.loop import LARGE, SMALL, Data, alone, require_close, require_plain, run

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own Adagrad

ROWS = 12


class Words(nn.Module):
    """A sparse table beside dense layers."""

    def __init__(self, bag: bool) -> None:
        super().__init__()
        self.table = (nn.EmbeddingBag if bag else nn.Embedding)(ROWS, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, words: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        output: torch.Tensor = self.head(torch.tanh(self.table(words)) * scale)
        return output


def words(rank: int, step: int) -> torch.Tensor:
    """Some rows more than once, some on both ranks, most on none."""
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randint(0, ROWS, (2, 2), generator=generator)


def loss(data: Data, model: Any, step: int, scale: float = 1.0) -> torch.Tensor:
    return data.mean(lambda rank: model(words(rank, step), scale).square().mean())


def make(bag: bool = False) -> Callable[[], nn.Module]:
    return lambda: Words(bag).double()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.3),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("bag", [False, True], ids=["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize(("config", "ordered"), [(SMALL, False), (LARGE, True)], ids=["cut", "merged, ordered"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, config: SchedulerConfig, ordered: bool, bag: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad(set_to_none=step != 2)
            loss(data, model, step).backward()
            optimizer.step()

    require_plain(loop, model=make(bag), optimizer=OPTIMIZERS[name], config=config, ordered=ordered)


def test_momentum() -> None:
    """Its state is sparse."""

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        for step in range(4):
            optimizer.zero_grad()
            loss(data, model, step).backward()
            optimizer.step()
        state = optimizer.state_dict()["state"]
        return [p.detach().clone() for p in model.parameters()], [state[i]["momentum_buffer"].to_dense() for i in range(3)]

    def momentum(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    expected = alone(loop, model=make(), optimizer=momentum)
    for result in run(loop, model=make(), optimizer=momentum):
        require_close(result, expected)


def test_sparse_state_that_would_have_to_be_broadcast_is_refused_by_name() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        loss(data, model, 0).backward()
        optimizer.step()
        optimizer.synchronize()
        data.scheduled(optimizer.optimizer, model)

    said = "the optimizer's state 'momentum_buffer' holds a torch.float64 torch.sparse_coo tensor; only dense tensors"
    with pytest.raises(commsched.UnsupportedError, match=said):
        run(loop, model=make(), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))


@pytest.mark.parametrize("config", [SMALL, LARGE], ids=["cut", "merged"])
def test_sparse_adam_beside_adam(config: SchedulerConfig) -> None:
    """Two optimizers of one model. A row that was touched with a zero gradient decays its averages, one untouched does not."""

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        dense = data.scheduled(torch.optim.Adam(model.head.parameters(), lr=0.01), model)
        for step in range(5):
            optimizer.zero_grad()
            dense.zero_grad()
            loss(data, model, step, scale=float(step != 2)).backward()
            optimizer.step()
            dense.step()
        return dense.state_dict()

    def sparse_adam(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(model.table.parameters(), lr=0.05)

    require_plain(loop, model=make(), optimizer=sparse_adam, config=config)


def test_accumulation() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            loss(data, model, step).backward()
            loss(data, model, step + 5).backward()
            with data.no_sync(optimizer):
                loss(data, model, step + 7).backward()
            optimizer.step()

    require_plain(loop, model=make(), optimizer=OPTIMIZERS["Adagrad"])


@pytest.mark.parametrize("user", [0, 1])
def test_a_table_that_one_rank_uses(user: int) -> None:
    def backward(data: Data, model: Any, step: int) -> None:
        def outputs(rank: int) -> Any:
            return model(words(rank, step)) if rank == user else model.head(torch.ones(2, 3, dtype=torch.float64))

        data.mean(lambda rank: outputs(rank).square().mean()).backward()

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            backward(data, model, step)
            backward(data, model, step + 4)
            optimizer.step()

    require_plain(loop, model=make(), optimizer=OPTIMIZERS["Adagrad"])


@pytest.mark.parametrize("change", ["read", "in place", "replaced", "dropped"])
def test_read_or_changed_before_step(change: str) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> list[Any]:
        norms = []
        for step in range(3):
            optimizer.zero_grad()
            loss(data, model, step).backward()
            weight = model.table.weight
            norms.append((weight.grad.coalesce().values().norm(), weight.grad.is_sparse, weight.grad.to_dense()))
            if change == "in place":
                weight.grad.mul_(0.5)
            elif change == "replaced":
                weight.grad = weight.grad * 0.5
            elif change == "dropped":
                weight.grad = None
            optimizer.step()
        return norms

    require_plain(loop, model=make(), optimizer=OPTIMIZERS["Adagrad"])


def test_unfrozen_later() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(4):
            model.table.requires_grad_(step > 0)
            optimizer.zero_grad()
            loss(data, model, step).backward()
            if step == 1:
                assert model.table.weight.grad.coalesce().values().isfinite().all()
            optimizer.step()

    def frozen() -> nn.Module:
        model = Words(False).double()
        model.table.requires_grad_(False)
        return model

    require_plain(loop, model=frozen, optimizer=OPTIMIZERS["Adagrad"])


def test_it_is_said_what_travels(caplog: pytest.LogCaptureFixture) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> list[str]:
        for step in range(2):
            optimizer.zero_grad()
            loss(data, model, step).backward()
            optimizer.step()
        return [str(spec) for spec in optimizer._exchange.places.manifests[0].tensors]

    with caplog.at_level(logging.INFO, "commsched"):
        assert run(loop, model=make(), optimizer=OPTIMIZERS["SGD"])[1][:2] == [
            f"'table.weight' float64[{ROWS}, 3]",
            f"'table.weight.rows' float32[{ROWS}]",
        ]
    said = [record.getMessage() for record in caplog.records if "sparse" in record.getMessage()]
    assert said == [f"the gradient of 'table.weight' is sparse; it travels densely: {ROWS * 3 * 8} bytes per step"]


def _functional(data: Data, model: Any) -> torch.Tensor:
    return nn.functional.embedding(words(data.ranks[0], 0) % 2, model.head.weight, sparse=True).sum()


def _tied(data: Data, model: Any) -> torch.Tensor:
    return nn.functional.linear(model.table(words(data.ranks[0], 0)), model.table.weight).sum()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (_functional, r"the gradient of 'head\.weight' is sparse, but when it was wrapped no Embedding"),
        (_tied, r"the gradient of 'table\.weight' is dense, but its module says sparse=True"),
    ],
)
def test_what_was_not_announced_is_refused_by_name(act: Callable[[Data, Any], torch.Tensor], message: str) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        act(data, model).backward()
        optimizer.step()

    with pytest.raises(commsched.CommschedError, match=message):
        run(loop, model=make(), optimizer=OPTIMIZERS["SGD"])
