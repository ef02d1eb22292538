"""Training through the plugin is plain Gluon on the joint batch, whatever the optimizer and the loop. Every gate is delayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon, nd
from numpy.typing import NDArray

from commsched import Session
from commsched.plugins.mxnet import ScheduledTrainer

from .training import (
    CLASSES,
    FEATURES,
    ROWS,
    Numbers,
    Train,
    as_nd,
    backward,
    batches,
    fill,
    mlp,
    on_ranks,
    require_equal,
    share,
    step,
    train_alone,
    train_scheduled,
    weights_of,
)

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "wd": 0.01},
    "nag": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.01},
    "signum": {"learning_rate": 0.01},
    "nadam": {"learning_rate": 0.01},
}
#: MXNet has these in float32 only, or computes in it.
IN_FLOAT32: dict[str, dict[str, Any]] = {
    "adadelta": {},
    "adagrad": {"learning_rate": 0.05},
    "ftrl": {"learning_rate": 0.05},
    "lamb": {"learning_rate": 0.01},
    "lars": {"learning_rate": 0.1, "momentum": 0.9},
    "rmsprop": {"learning_rate": 0.01, "centered": True},
}
SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})


def same_as_plain(
    train: Train = step,
    optimizer: str = SGD[0],
    parameters: dict[str, Any] = SGD[1],
    *,
    make_net: Callable[[int], Any] = mlp,
    world_size: int = 2,
    dtype: str = "float64",
    tolerance: float = 1e-9,
) -> None:
    alone = train_alone(
        lambda: make_net(0),
        lambda net: gluon.Trainer(net.collect_params(), optimizer, dict(parameters)),
        world_size,
        train,
        dtype,
    )
    require_equal(train_scheduled(make_net, optimizer, parameters, world_size, train, dtype), alone, tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    same_as_plain(optimizer=name, parameters=OPTIMIZERS[name])


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_optimizers_in_float32(name: str) -> None:
    same_as_plain(
        optimizer=name,
        parameters=IN_FLOAT32[name],
        make_net=lambda rank: mlp(rank, "float32"),
        dtype="float32",
        tolerance=1e-5,
    )


def test_three_ranks() -> None:
    """By the mean: MXNet keeps one over the batch size in float32, and a third of a third is rounded otherwise."""

    def train(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(as_nd(inputs)), as_nd(labels)).mean()
        loss.backward()
        trainer.step(1)

    same_as_plain(train, world_size=3)


class Scale(gluon.nn.HybridBlock):
    """Each feature times a weight of float16. (On a CPU, MXNet has no dense layers of it.)"""

    def __init__(self, seed: int) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(FEATURES,), dtype="float16")
        self.initialize()
        fill(self, seed)

    def hybrid_forward(self, F, x, weight):  # type: ignore[no-untyped-def]
        return F.broadcast_mul(x, weight)


def test_float16_with_its_copy_in_32_bits() -> None:
    """Each rank rounds its own gradient to 16 bits, and so is the average."""

    def train(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        with autograd.record():
            loss = (net(as_nd(inputs)) ** 2).sum()
        loss.backward()
        trainer.step(len(inputs))

    same_as_plain(
        train,
        parameters={"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True},
        make_net=Scale,
        dtype="float16",
        tolerance=5e-3,
    )


@pytest.mark.parametrize("hybridize", [{}, {"static_alloc": True, "static_shape": True}], ids=["hybridized", "static"])
@pytest.mark.parametrize("deferred", [False, True], ids=["shapes known", "shapes found by forward"])
def test_hybridized(hybridize: dict[str, Any], deferred: bool) -> None:
    same_as_plain(make_net=lambda rank: mlp(rank, hybridize=hybridize, deferred=deferred))


def test_parameters_whose_shape_the_first_forward_finds_begin_as_rank_0s() -> None:
    same_as_plain(make_net=lambda rank: mlp(rank, deferred=True))


def test_arrays_of_numpys_interface() -> None:
    def make_net(rank: int) -> Any:
        mx.npx.set_np()  # of a thread
        net = gluon.nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(gluon.nn.Dense(8, "tanh"), gluon.nn.Dense(CLASSES))
        net.initialize(Numbers(rank))
        net.hybridize()
        return net

    def train(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        with autograd.record():
            losses = gluon.loss.SoftmaxCrossEntropyLoss()(net(mx.np.array(inputs)), mx.np.array(labels))
        losses.backward()
        trainer.step(len(inputs))

    try:
        same_as_plain(train, make_net=make_net, dtype="float32", tolerance=1e-5)
    finally:
        mx.npx.reset_np()


def test_a_learning_rate_scheduler() -> None:
    def make_schedule() -> mx.lr_scheduler.LRScheduler:
        return mx.lr_scheduler.FactorScheduler(step=2, factor=0.7, base_lr=0.1)

    alone = train_alone(
        mlp, lambda net: gluon.Trainer(net.collect_params(), "sgd", {"lr_scheduler": make_schedule()}), world_size=2
    )
    require_equal(train_scheduled(mlp, lambda: mx.optimizer.SGD(lr_scheduler=make_schedule())), alone)


def test_a_function_for_a_scheduler() -> None:
    """Plain Gluon takes one, if it is set later."""

    def train(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        trainer.optimizer.lr_scheduler = lambda num_update: 0.1 / (1 + num_update)
        step(net, trainer, inputs, labels)

    same_as_plain(train)


def test_averaged_again_what_was_averaged_stays() -> None:
    def train(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        backward(net, inputs, labels)
        trainer.allreduce_grads()
        for parameter in net.collect_params().values():
            parameter.grad()[:] *= 0.5
        trainer.step(len(inputs), ignore_stale_grad=True)

    same_as_plain(train)


def test_a_learning_rate_set_by_hand_counts_from_the_next_step() -> None:
    def train(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        step(net, trainer, inputs, labels)
        trainer.set_learning_rate(trainer.learning_rate * 0.8)

    same_as_plain(train)


def test_clipping_by_the_norm_of_all_gradients_sees_averages() -> None:
    """Gradients are of the sum of a batch's losses; averaged over ranks they are half of the joint batch's."""

    norms: list[float] = []

    def train(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        backward(net, inputs, labels)
        trainer.allreduce_grads()
        gradients = [parameter.grad() for parameter in net.collect_params().values()]
        norms.append(gluon.utils.clip_global_norm(gradients, 0.5 * len(inputs)))
        trainer.update(len(inputs))

    def in_float32(rank: int = 0) -> Any:
        return mlp(rank, "float32")  # what clip_global_norm wants

    alone = train_alone(in_float32, lambda net: gluon.Trainer(net.collect_params(), *SGD), 2, train, "float32")
    assert max(norms) > 0.5 * 2 * ROWS, "nothing was clipped"
    require_equal(train_scheduled(in_float32, *SGD, train=train, dtype="float32"), alone, 1e-5)


def test_gradients_that_add_up() -> None:
    def make_net(rank: int) -> Any:
        net = mlp(rank)
        net.collect_params().setattr("grad_req", "add")
        return net

    def train(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        backward(net, inputs, labels)
        backward(net, inputs * 0.5, labels)
        trainer.step(2 * len(inputs))
        net.collect_params().zero_grad()

    same_as_plain(train, make_net=make_net)


def test_gradients_that_add_up_over_steps() -> None:
    def make_net(rank: int) -> Any:
        net = mlp(rank)
        net.collect_params().setattr("grad_req", "add")
        return net

    def train(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        step(net, trainer, inputs, labels)  # nobody sets them to zero, and averages are of equal batches
        for parameter in net.collect_params().values():
            parameter.grad()[:] *= 0.5

    same_as_plain(train, make_net=make_net)


def test_several_batches_for_one_step_by_writing_over() -> None:
    """Plain Gluon uses the gradient of the last backward."""

    def train(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        backward(net, inputs * 2, labels)
        step(net, trainer, inputs, labels)

    same_as_plain(train)


class Convolutional(gluon.HybridBlock):
    """With batch normalisation, whose statistics are each rank's own, used as they are (``use_global_stats``)."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body = gluon.nn.HybridSequential()
            self.body.add(gluon.nn.Conv2D(16, 3, in_channels=1, activation="relu"), gluon.nn.MaxPool2D())
            self.body.add(gluon.nn.BatchNorm(in_channels=16, use_global_stats=True))
            self.body.add(gluon.nn.Conv2D(32, 2, in_channels=16, activation="relu"), gluon.nn.Flatten())
            self.body.add(gluon.nn.Dense(CLASSES, in_units=32 * 2 * 2))

    def hybrid_forward(self, F, x):  # type: ignore[no-untyped-def]
        image = F.broadcast_mul(x.reshape((-1, 1, 1, FEATURES)), F.ones((1, 1, 8, 1)))
        return self.body(F.concat(image, image, dim=3).slice_axis(axis=3, begin=0, end=8))


@pytest.mark.parametrize("hybridize", [None, {"static_alloc": True, "static_shape": True}], ids=["plain", "static"])
def test_convolutions(hybridize: dict[str, Any] | None) -> None:
    """Their gradients may lie in memory in an order that only MXNet knows."""

    def make_net(rank: int) -> Any:
        net = Convolutional()
        net.initialize()
        fill(net, rank)
        for name, parameter in net.collect_params(".*running.*").items():
            parameter.set_data(nd.ones(parameter.shape) * (1 if "var" in name else 0))
        if hybridize is not None:
            net.hybridize(**hybridize)
        return net

    same_as_plain(make_net=make_net, dtype="float32", tolerance=2e-5)


class TwoWays(gluon.Block):
    """A layer, then one of two others."""

    def __init__(self, seed: int) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.first = gluon.nn.Dense(8, in_units=FEATURES, dtype="float64")
            self.left = gluon.nn.Dense(CLASSES, in_units=8, dtype="float64")
            self.right = gluon.nn.Dense(CLASSES, in_units=8, dtype="float64")
            self.never = gluon.nn.Dense(CLASSES, in_units=8, dtype="float64")
        self.initialize()
        fill(self, seed)
        for parameter in self.collect_params().values():
            parameter.grad()[:] = 1e3  # of an earlier step, say: must not count

    def losses(self, inputs: NDArray[Any], labels: NDArray[Any], way: int) -> nd.NDArray:
        outputs = (self.left, self.right)[way](self.first(as_nd(inputs)))
        return gluon.loss.SoftmaxCrossEntropyLoss()(outputs, as_nd(labels))


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_parameter_that_only_some_ranks_use_counts_as_zero_on_the_others(times: int) -> None:
    """On the joint batch its gradient comes from the rows of the ranks that use it. One that nobody uses stays as it is. To
    average more than once changes nothing."""

    def alone() -> dict[str, NDArray[Any]]:
        net = TwoWays(0)
        trainer = gluon.Trainer(net.collect_params(), *SGD)
        for inputs, labels in batches(2):
            with autograd.record():
                loss = nd.concat(
                    net.losses(inputs[:ROWS], labels[:ROWS], 0), net.losses(inputs[ROWS:], labels[ROWS:], 1), dim=0
                )
            loss.backward()
            trainer.step(len(inputs), ignore_stale_grad=True)
        return weights_of(net)

    def run(session: Session) -> dict[str, NDArray[Any]]:
        net = TwoWays(session.rank)
        trainer = ScheduledTrainer(net.collect_params(), *SGD, session=session)
        for inputs, labels in batches(2):
            with autograd.record():
                loss = net.losses(inputs[share(session)], labels[share(session)], session.rank)
            loss.backward()
            for _ in range(times - 1):
                trainer.allreduce_grads()
            trainer.step(ROWS, ignore_stale_grad=True)
        assert (net.never.weight.grad().asnumpy() == 1e3).all()
        return weights_of(net)

    require_equal(on_ranks(run, delay_seconds=0.002), alone())
