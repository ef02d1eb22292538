"""The MXNet plugin under the public conformance suite."""

from __future__ import annotations

from typing import Any

import pytest
from mxnet import gluon

from commsched import Session
from commsched.plugins.common.weights_check import WeightsCheck
from commsched.plugins.mxnet import ScheduledStore, ScheduledTrainer
from commsched.plugins.mxnet.operation import Operation
from commsched.plugins.mxnet.queued_group import QueuedGroup
from commsched.testing import check_plugin
from commsched.testing.check_plugin import Weights

from .training import ROWS, backward, batches, mlp, share, step, weights_of

SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})


class Adapter:
    tolerance = 1e-9

    def __init__(self, hybridize: dict[str, Any] | None = None) -> None:
        self.hybridize = hybridize

    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        net = mlp(seed + rank, hybridize=self.hybridize)
        trainer = ScheduledTrainer(net.collect_params(), *SGD, session=session)
        for inputs, labels in batches(world_size, steps, seed=seed):
            mine = slice(rank * ROWS, (rank + 1) * ROWS)
            step(net, trainer, inputs[mine], labels[mine])
        return weights_of(net)

    def train_alone(self, world_size: int, steps: int, seed: int) -> Weights:
        net = mlp(seed, hybridize=self.hybridize)
        trainer = gluon.Trainer(net.collect_params(), *SGD)
        for inputs, labels in batches(world_size, steps, seed=seed):
            step(net, trainer, inputs, labels)
        return weights_of(net)


class StoreAdapter(Adapter):
    """Over the kvstore, which adds up. A Trainer asks for rank 0's values too late for ranks that begin apart."""

    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        net, store = mlp(seed + rank), ScheduledStore(session)
        for name, parameter in net.collect_params().items():
            store.broadcast(name, parameter.data(), out=parameter.data())
        trainer = gluon.Trainer(net.collect_params(), *SGD, kvstore=store)
        for inputs, labels in batches(world_size, steps, seed=seed):
            backward(net, inputs[share(session)], labels[share(session)])
            trainer.step(len(inputs))
        return weights_of(net)


@pytest.mark.parametrize(
    ("adapter", "world_sizes"),
    [(Adapter(), (1, 2, 4)), (Adapter({"static_alloc": True, "static_shape": True}), (2,)), (StoreAdapter(), (1, 2))],
    ids=["plain", "static", "kvstore"],
)
def test_it_conforms(adapter: Adapter, world_sizes: tuple[int, ...]) -> None:
    check_plugin(adapter, world_sizes=world_sizes)


def test_without_its_gate_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that is completed when the gradient is handed over, and not when the average is there."""
    begin = QueuedGroup._begin

    def begin_and_complete(self: QueuedGroup, tensor: int, operation: Operation) -> None:
        begin(self, tensor, operation)
        self._take_and_complete(tensor)

    monkeypatch.setattr(QueuedGroup, "_begin", begin_and_complete)
    monkeypatch.setattr(WeightsCheck, "begin", lambda self, step: False)  # which may find it first
    with pytest.raises(AssertionError, match=r"is not finite; memory was read|is not bitwise equal on rank 0"):
        check_plugin(Adapter(), world_sizes=(2,))
