"""Training over the kvstore is plain MXNet on the joint batch. Every gate is delayed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd
from numpy.typing import NDArray

from commsched import Session
from commsched.plugins.mxnet import ScheduledStore
from commsched.session.local import local_sessions

from .training import (
    CLASSES,
    ROWS,
    Numbers,
    Train,
    Weights,
    backward,
    batches,
    mlp,
    on_ranks,
    require_equal,
    share,
    train_alone,
    weights_of,
)

SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01})
ADAM = ("adam", {"learning_rate": 0.01})


def train_over_store(
    train: Train,
    optimizer: tuple[str, dict[str, Any]] = SGD,
    *,
    world_size: int = 2,
    make_net: Callable[[], Any] = mlp,
    dtype: str = "float64",
    **options: Any,
) -> list[Weights]:
    def run(session: Session) -> Weights:
        net = make_net()
        trainer = gluon.Trainer(net.collect_params(), *optimizer, kvstore=ScheduledStore(session), **options)
        for inputs, labels in batches(world_size, dtype=dtype):
            train(net, trainer, inputs[share(session)], labels[share(session)])
        return weights_of(net)

    return on_ranks(run, world_size, delay_seconds=0.002)


def step_of(batch: int) -> Train:
    """As scripts for ``dist_sync`` do: gradients are of all workers' sum, so the batch is that of all."""

    def step(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        backward(net, inputs, labels)
        trainer.step(batch)

    return step


def plainly(
    train: Train, optimizer: tuple[str, dict[str, Any]] = SGD, world_size: int = 2, make_net: Callable[[], Any] = mlp
) -> Weights:
    return train_alone(make_net, lambda net: gluon.Trainer(net.collect_params(), *optimizer), world_size, train)


@pytest.mark.parametrize("optimizer", [SGD, ADAM, ("nadam", {"learning_rate": 0.01})], ids=lambda optimizer: optimizer[0])
def test_a_trainer(optimizer: tuple[str, dict[str, Any]]) -> None:
    train = step_of(2 * ROWS)
    require_equal(train_over_store(train, optimizer), plainly(train, optimizer))


def test_a_trainer_on_three_ranks_hybridized() -> None:
    """By a power of two: MXNet keeps one over the batch size in float32, and a third would be rounded."""
    train = step_of(8)
    static = {"static_alloc": True, "static_shape": True}
    ours = train_over_store(train, world_size=3, make_net=lambda: mlp(0, hybridize=static, deferred=True))
    require_equal(ours, plainly(train, world_size=3, make_net=lambda: mlp(0, deferred=True)))


def test_a_trainer_that_updates_by_itself_and_clips() -> None:
    def train(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        backward(net, inputs, labels)
        trainer.allreduce_grads()
        for parameter in net.collect_params().values():
            norm = float(parameter.grad().norm().asscalar())
            parameter.grad()[:] *= min(1.0, 0.5 / norm)
        trainer.update(1)

    require_equal(train_over_store(train, update_on_kvstore=False), plainly(train))


def test_multiples_schedules_and_rates_set_by_hand() -> None:
    def make_net() -> Any:
        net = mlp()
        net[0].weight.lr_mult, net[1].weight.wd_mult = 0.3, 0.0
        return net

    def train(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        step_of(2 * ROWS)(net, trainer, inputs, labels)
        trainer.set_learning_rate(trainer.learning_rate * 0.8)

    require_equal(train_over_store(train, make_net=make_net), plainly(train, make_net=make_net))


def test_arrays_of_numpys_interface() -> None:
    def make_net() -> Any:
        mx.npx.set_np()  # of a thread
        net = gluon.nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(gluon.nn.Dense(8, "tanh"), gluon.nn.Dense(CLASSES))
        net.initialize(Numbers(0))
        return net

    def train(net: Any, trainer: gluon.Trainer, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        with mx.autograd.record():
            losses = gluon.loss.SoftmaxCrossEntropyLoss()(net(mx.np.array(inputs)), mx.np.array(labels))
        losses.backward()
        trainer.step(2 * ROWS)

    try:
        alone = train_alone(
            make_net, lambda net: gluon.Trainer(net.collect_params(), *SGD), world_size=2, train=train, dtype="float32"
        )
        require_equal(train_over_store(train, make_net=make_net, dtype="float32"), alone, 1e-5)
    finally:
        mx.npx.reset_np()


# --- Module ---


def symbol() -> mx.sym.Symbol:
    net = mx.sym.var("data")
    for number, outputs in enumerate((12, 9, CLASSES)):
        net = mx.sym.FullyConnected(net, num_hidden=outputs, name=f"layer{number}")
        net = mx.sym.Activation(net, act_type="tanh") if outputs != CLASSES else net
    return mx.sym.SoftmaxOutput(net, name="softmax")


def fit(seed: int, rows: slice, kvstore: Any, optimizer: tuple[str, dict[str, Any]], epochs: int = 2) -> Weights:
    inputs = np.concatenate([inputs[rows] for inputs, _ in batches(2, dtype="float32")])
    labels = np.concatenate([labels[rows] for _, labels in batches(2, dtype="float32")])
    batch = rows.stop - rows.start
    module = mx.mod.Module(symbol(), context=mx.cpu())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module.fit(
            mx.io.NDArrayIter(inputs, labels, batch),
            initializer=Numbers(seed),
            kvstore=kvstore,
            optimizer=optimizer[0],
            optimizer_params=optimizer[1],
            num_epoch=epochs,
        )
    return {name: array.asnumpy() for name, array in module.get_params()[0].items()}


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=lambda optimizer: optimizer[0])
def test_a_module_begins_with_rank_0s_values(optimizer: tuple[str, dict[str, Any]]) -> None:
    ours = on_ranks(lambda session: fit(session.rank, share(session), ScheduledStore(session), optimizer), delay_seconds=0.002)
    require_equal(ours, fit(0, slice(0, 2 * ROWS), None, optimizer), 1e-5)


def test_a_module_that_updates_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    ours = on_ranks(lambda session: fit(0, share(session), ScheduledStore(session), SGD), delay_seconds=0.002)
    require_equal(ours, fit(0, slice(0, 2 * ROWS), None, SGD), 1e-5)


# --- loops of one's own ---


def test_a_weight_may_be_read_before_the_other_keys_of_its_step_are_pushed() -> None:
    """Small as they are, they share no partition, and do not wait for each other."""

    def run(session: Session) -> list[float]:
        store, seen = ScheduledStore(session), []
        weights = [nd.zeros(2), nd.zeros(3)]
        store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
        for number in range(3):
            for key, weight in enumerate(weights):
                store.pushpull(key, nd.ones(weight.shape) * (session.rank + 1 + number), out=weight)
                seen.append(float(weight[0].asscalar()))
        return seen

    assert on_ranks(run, delay_seconds=0.002) == [[-3, -3, -8, -8, -15, -15]] * 2


def test_sums_that_are_awaited_keep_no_temporary_memory() -> None:
    """MXNet has four pieces of it: an operation that needs one would wait for the sums."""
    computed = threading.Event()

    def run(session: Session) -> bool:
        store, keys = ScheduledStore(session), range(6)
        for key in (*keys, *keys):  # the second step is collective, too
            store.pushpull(key, nd.ones(2))
        if session.rank == 0:
            for key in keys:
                store.pushpull(key, nd.ones(2))
            for _ in keys:
                nd.ones(3).sum().wait_to_read()
            computed.set()
            return True
        before_any_sum = computed.wait(60)
        for key in keys:
            store.pushpull(key, nd.ones(2))
        return before_any_sum

    assert on_ranks(run) == [True, True]


def test_sums_of_scalars() -> None:
    def run(session: Session) -> list[float]:
        mx.npx.set_np()  # of a thread
        store, arrays = ScheduledStore(session), [mx.np.array(1.0 + session.rank) for _ in range(3)]
        for array in arrays:
            store.pushpull(0, array)
        return [float(array) for array in arrays]

    assert on_ranks(run, delay_seconds=0.002) == [[3.0] * 3] * 2


def test_sums_without_an_optimizer_and_keys_that_are_names() -> None:
    def run(session: Session) -> list[NDArray[Any]]:
        store, outs = ScheduledStore(session), []
        for number in range(3):
            gradient, out = nd.ones((2, 3), dtype="float16") * (session.rank + number), nd.zeros((2, 3), dtype="float16")
            store.pushpull("a", [gradient], out=[out])
            store.pushpull("b", gradient)
            outs += [out.asnumpy(), gradient.asnumpy()]
        return outs

    for outs in on_ranks(run, delay_seconds=0.002):
        assert [out.tolist() for out in outs] == [[[2 * number + 1] * 3] * 2 for number in (0, 0, 1, 1, 2, 2)]


def test_broadcast_puts_rank_0s_value_in_place_bit_for_bit() -> None:
    def run(session: Session) -> list[NDArray[Any]]:
        store, outs = ScheduledStore(session), [nd.zeros(3), nd.zeros(3)]
        store.broadcast("a", nd.array([np.nan, 1e-42, 3]) + session.rank, out=outs[0])
        store.broadcast("b", nd.ones(3), out=outs[1:])  # alike already
        return [out.asnumpy() for out in outs]

    first, second = on_ranks(run, delay_seconds=0.002)
    assert [out.tobytes() for out in first] == [out.tobytes() for out in second]
    assert np.isnan(first[0][0])
    assert first[0][2] == 3
    assert first[1].tolist() == [1, 1, 1]


def test_broadcast_takes_what_is_not_trained_whatever_its_type() -> None:
    def run(session: Session) -> list[int]:
        store, out = ScheduledStore(session), nd.zeros(2, dtype="int32")
        store.broadcast("table", nd.array([1 << 30, 3], dtype="int32") + session.rank, out=out)
        return [int(number) for number in out.asnumpy()]

    assert on_ranks(run, delay_seconds=0.002) == [[1 << 30, 3]] * 2


def test_what_it_says_of_itself() -> None:
    def run(session: Session) -> None:
        store = ScheduledStore(session)
        assert (store.type, store.rank, store.num_workers) == ("dist_sync_commsched", session.rank, 2)
        assert store.is_capable("optimizer")
        with pytest.raises(ValueError, match="unknown capability: flying"):
            store.is_capable("flying")

    on_ranks(run)


def test_training_goes_on_from_saved_states(tmp_path: Path) -> None:
    """Each rank saves and loads a file of its own."""
    step = step_of(2 * ROWS)

    def train(net: Any, trainer: gluon.Trainer, part: Sequence[Any], rows: slice) -> None:
        for inputs, labels in part:
            step(net, trainer, inputs[rows], labels[rows])

    def run(session: Session) -> Weights:
        net, file = mlp(), str(tmp_path / str(session.rank))
        first, second = (gluon.Trainer(net.collect_params(), *ADAM, kvstore=ScheduledStore(session)) for _ in range(2))
        train(net, first, batches(2)[:4], share(session))
        first.save_states(file)
        second.load_states(file)
        train(net, second, batches(2)[4:], share(session))
        return weights_of(net)

    net = mlp()
    train(net, gluon.Trainer(net.collect_params(), *ADAM), batches(2), slice(None))
    require_equal(on_ranks(run, delay_seconds=0.002), weights_of(net))


def test_alone_it_is_plain_training_to_the_bit() -> None:
    before = set(threading.enumerate())
    (session,) = local_sessions(1)
    with session:
        ours, plain = mlp(), mlp()
        trainers = [
            gluon.Trainer(ours.collect_params(), *ADAM, kvstore=ScheduledStore(session)),
            gluon.Trainer(plain.collect_params(), *ADAM),
        ]
        for inputs, labels in batches(1):
            for net, trainer in zip((ours, plain), trainers):
                backward(net, inputs, labels)
                trainer.step(len(inputs))
        require_equal([weights_of(ours)], weights_of(plain), 0.0)
        require_equal([fit(0, slice(0, ROWS), ScheduledStore(session), ADAM)], fit(0, slice(0, ROWS), None, ADAM), 0.0)
        assert session.core.group_count == 0
    assert set(threading.enumerate()) <= before  # what an earlier test has begun may end meanwhile


def test_its_name_is_known_to_mxnet() -> None:
    """Where it is used by name: tests/plugins/mxnet/rank.py."""
    assert mx.kv.KVStoreBase.kv_registry["dist_sync_commsched"] is ScheduledStore
