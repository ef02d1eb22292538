"""The same small training with and without commsched, to be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from numpy.typing import NDArray

from commsched import SchedulerConfig, Session
from commsched.core.interfaces import Transport
from commsched.plugins.mxnet import ScheduledTrainer
from commsched.session.local import local_sessions
from commsched.testing.check_plugin import Delayed
from commsched.testing.world import run_world

FEATURES, CLASSES = 6, 4
ROWS = 3  # per rank and step
STEPS = 8
SMALL = SchedulerConfig(partition_bytes=200, credit_bytes=400)  # so that tensors are split, merged and queued
NAG = ("nag", {"learning_rate": 0.1, "momentum": 0.9})

Weights = dict[str, NDArray[Any]]
MakeTrainer = Callable[[Any], gluon.Trainer]
Train = Callable[[Any, gluon.Trainer, NDArray[Any], NDArray[Any]], None]


def mlp(seed: int = 0, dtype: str = "float64", hybridize: Mapping[str, Any] | None = None, deferred: bool = False) -> Any:
    """Three layers, with weights of ``seed``; ``deferred``: their shapes are found by the first forward."""
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for inputs, outputs in ((FEATURES, 12), (12, 9), (9, CLASSES)):
            activation = "tanh" if outputs != CLASSES else None
            net.add(gluon.nn.Dense(outputs, activation, in_units=0 if deferred else inputs, dtype=dtype))
    if deferred:
        net.initialize(Numbers(seed))
    else:
        net.initialize()
        fill(net, seed)
    if hybridize is not None:
        net.hybridize(**hybridize)
    return net


def fill(net: Any, seed: int) -> None:
    """Give every parameter numbers of ``seed``."""
    rng = np.random.default_rng(seed)
    for parameter in net.collect_params().values():
        parameter.set_data(nd.array(rng.standard_normal(parameter.shape) / 3, dtype=parameter.dtype))


class Numbers(mx.init.Initializer):
    """Those of ``seed``, in the order of initialisation."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)

    def __call__(self, name: Any, array: nd.NDArray) -> None:
        array[:] = self._rng.standard_normal(array.shape) / 3


def batches(world_size: int, steps: int = STEPS, dtype: str = "float64", seed: int = 7) -> list[tuple[Any, Any]]:
    """Inputs and labels of the joint batch of each step."""
    rng = np.random.default_rng(seed)
    rows = world_size * ROWS
    return [
        (rng.standard_normal((rows, FEATURES)).astype(dtype), rng.integers(0, CLASSES, rows).astype(dtype))
        for _ in range(steps)
    ]


def share(session: Session) -> slice:
    """The rows of a joint batch that are this rank's."""
    return slice(session.rank * ROWS, (session.rank + 1) * ROWS)


def backward(net: Any, inputs: NDArray[Any], labels: NDArray[Any]) -> Any:
    """The losses of a batch, after their backward."""
    with autograd.record():
        losses = gluon.loss.SoftmaxCrossEntropyLoss()(net(as_nd(inputs)), as_nd(labels))
    losses.backward()
    return losses


def step(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
    backward(net, inputs, labels)
    trainer.step(len(inputs))


def as_nd(array: NDArray[Any]) -> nd.NDArray:
    return nd.array(array, dtype=array.dtype)


def weights_of(net: Any) -> Weights:
    return {name: parameter.data().asnumpy() for name, parameter in net.collect_params().items()}


def train_alone(
    make_net: Callable[[], Any], make_trainer: MakeTrainer, world_size: int, train: Train = step, dtype: str = "float64"
) -> Weights:
    """Plain Gluon, on the joint batches."""
    net = make_net()
    trainer = make_trainer(net)
    for inputs, labels in batches(world_size, dtype=dtype):
        train(net, trainer, inputs, labels)
    return weights_of(net)


def on_ranks(
    fn: Callable[[Session], Any],
    world_size: int = 2,
    *,
    config: SchedulerConfig = SMALL,
    delay_seconds: float = 0.0,
    wrap_transport: Callable[[Transport], Transport] | None = None,
) -> list[Any]:
    """``fn`` on every rank, each a thread in a session of its own. Sends and replies are delayed."""

    def delayed(transport: Transport) -> Transport:
        return Delayed(transport, transport.rank, delay_seconds)

    sessions = local_sessions(world_size, config, wrap_transport=delayed if delay_seconds else wrap_transport, check_weights=2)

    def run(rank: int) -> Any:
        with sessions[rank] as session:
            return fn(session)

    try:
        return run_world(world_size, run, timeout_seconds=300)
    finally:
        for session in sessions:
            session.abort("the test is over")


def train_scheduled(
    make_net: Callable[[int], Any],
    optimizer: Any,
    optimizer_params: Mapping[str, Any] | None = None,
    world_size: int = 2,
    train: Train = step,
    dtype: str = "float64",
) -> list[Weights]:
    """Each rank's weights; ``make_net`` is called with the rank. ``optimizer``: a name, or what makes one."""

    def run(session: Session) -> Weights:
        net = make_net(session.rank)
        made = optimizer if isinstance(optimizer, str) else optimizer()
        trainer = ScheduledTrainer(net.collect_params(), made, optimizer_params, session=session)
        for inputs, labels in batches(world_size, dtype=dtype):
            train(net, trainer, inputs[share(session)], labels[share(session)])
        return weights_of(net)

    return on_ranks(run, world_size, delay_seconds=0.002)


def require_equal(by_rank: list[Weights], alone: Weights, tolerance: float = 1e-9) -> None:
    """Bitwise equal on all ranks, and within ``tolerance`` of ``alone``, relative to each tensor's largest weight."""
    for rank, weights in enumerate(by_rank):
        assert weights.keys() == alone.keys()
        for name, expected in alone.items():
            assert weights[name].tobytes() == by_rank[0][name].tobytes(), f"'{name}' differs between rank 0 and rank {rank}"
            difference = np.abs(weights[name] - expected).max() / max(np.abs(expected).max(), 1e-30)
            assert difference <= tolerance, f"'{name}' differs from plain training by {difference:.2e} of its largest"
