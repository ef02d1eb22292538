"""The MXNet plugin under the public conformance suite."""

from __future__ import annotations

from typing import Any

import pytest
from mxnet import gluon

from commsched import Session
from commsched.plugins.mxnet import ScheduledTrainer
from commsched.plugins.mxnet.exchange import GradientExchange
from commsched.plugins.mxnet.operation import Operation
from commsched.testing import check_plugin
from commsched.testing.check_plugin import Weights

from .training import ROWS, batches, mlp, step, weights_of


class Adapter:
    def __init__(self, dtype: str = "float64", tolerance: float = 1e-9, hybridize: dict[str, Any] | None = None) -> None:
        self.dtype = dtype
        self.tolerance = tolerance
        self.hybridize = hybridize

    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        net = mlp(seed + rank, self.dtype, self.hybridize)
        trainer = ScheduledTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, session=session)
        for inputs, labels in batches(world_size, steps, self.dtype, seed):
            mine = slice(rank * ROWS, (rank + 1) * ROWS)
            step(net, trainer, inputs[mine], labels[mine])
        return weights_of(net)

    def train_alone(self, world_size: int, steps: int, seed: int) -> Weights:
        net = mlp(seed, self.dtype, self.hybridize)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        for inputs, labels in batches(world_size, steps, self.dtype, seed):
            step(net, trainer, inputs, labels)
        return weights_of(net)


@pytest.mark.parametrize(
    "adapter",
    [
        Adapter(),
        Adapter("float32", 1e-5),
        Adapter(hybridize={}),
        Adapter(hybridize={"static_alloc": True, "static_shape": True}),
    ],
    ids=["float64", "float32", "hybridized", "static"],
)
def test_it_conforms(adapter: Adapter) -> None:
    check_plugin(adapter)


def test_without_its_gate_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that is completed when the gradient is handed over, and not when the average is there."""
    begin = GradientExchange._begin

    def begin_and_complete(self: GradientExchange, tensor: int, operation: Operation) -> None:
        begin(self, tensor, operation)
        self._take_and_complete(tensor)

    monkeypatch.setattr(GradientExchange, "_begin", begin_and_complete)
    with pytest.raises(AssertionError, match="is not finite; memory was read between notify_ready and the opening"):
        check_plugin(Adapter(), world_sizes=(2,))
