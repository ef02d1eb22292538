"""What the kvstore refuses, by name, on all ranks, and never by waiting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mxnet as mx
import pytest
from mxnet import gluon, nd

from commsched import ManifestMismatch, RanksDiverged, Session, UnsupportedError
from commsched.plugins.mxnet import ScheduledStore

from .test_errors import both_raise
from .training import ROWS, backward, batches, mlp, share, step

SHAPE = (2,)


def push(store: ScheduledStore, *keys: Any, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> None:
    for key in keys:
        store.pushpull(key, nd.ones(shape, dtype=dtype))


def begun(session: Session) -> ScheduledStore:
    """A store that has had two steps of the keys 0 and 1."""
    store = ScheduledStore(session)
    push(store, 0, 1, 0, 1)
    return store


# --- keys ---


def test_a_key_that_is_not_pushed_in_a_step() -> None:
    def use(session: Session) -> None:
        push(begun(session), 0, 0)

    both_raise(UnsupportedError, "key 0 is pushed again, and key 1 was not pushed in this step: push every key", use)


def test_a_key_that_one_rank_does_not_push_in_a_step() -> None:
    """While the other waits for its sum."""

    def use(session: Session) -> None:
        store = begun(session)
        push(store, *((0, 1) if session.rank == 0 else (0, 0)))
        nd.waitall()
        push(store, 0)

    both_raise(UnsupportedError, "key 0 is pushed again, and key 1 was not pushed in this step", use)


def test_a_key_that_one_rank_does_not_push_in_the_last_step() -> None:
    def use(session: Session) -> None:
        push(begun(session), *((0, 1) if session.rank == 0 else (0,)))
        session.close()

    both_raise(UnsupportedError, "the session is to be closed, and key 1 was not pushed in this step", use)


def test_a_step_that_one_rank_makes_once_more() -> None:
    """The numbers of its optimizer, which count updates, are not what is wrong."""

    def use(session: Session) -> None:
        store, weights = optimizing(session, mx.optimizer.SGD()), [nd.ones(SHAPE), nd.ones(SHAPE)]
        for _ in range(4 - session.rank):
            for key, weight in enumerate(weights):
                store.pushpull(key, nd.ones(SHAPE), out=weight)
        weights[0].wait_to_read()
        session.close()

    both_raise(
        RanksDiverged, r"rank 1 ended the training of kvstore 1 \(key 0 and 1 more\) after 2 steps.* rank 0 did not", use
    )


def test_a_broadcast_in_the_middle_of_a_step() -> None:
    def use(session: Session) -> None:
        store = begun(session)
        push(store, 0)
        store.broadcast("b", nd.ones(2), out=nd.ones(2))

    both_raise(UnsupportedError, "key 'b' is broadcast, and key 1 was not pushed in this step", use)


def test_one_kvstore_for_two_trainers() -> None:
    """The optimizer of the second would update for both."""

    def use(session: Session) -> None:
        store = ScheduledStore(session)
        for net in (mlp(0), mlp(1)):
            trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=store)
            (inputs, labels), *_ = batches(2)
            backward(net, inputs[share(session)], labels[share(session)])
            trainer.step(2 * ROWS)

    both_raise(UnsupportedError, r"key 0 \(net_dense0_bias\) was broadcast before: create a kvstore for each", use)


def test_keys_in_another_order_than_in_the_first_step() -> None:
    def use(session: Session) -> None:
        push(begun(session), *((0, 1) if session.rank == 0 else (1, 0)))
        session.close()  # rank 0 has nothing else to wait for

    both_raise(
        UnsupportedError, "key 1 is pushed before key 0, and after it in the first step: push keys in the same order", use
    )


def test_a_key_that_is_new_in_the_third_step() -> None:
    both_raise(UnsupportedError, "key 2 is pushed since the second step only", lambda session: push(begun(session), 2))


def test_other_keys_on_another_rank() -> None:
    both_raise(
        ManifestMismatch,
        r"rank \d pushes key \d for the first time while rank \d pushes key \d for the first time: push the same keys",
        lambda session: push(ScheduledStore(session), session.rank),
    )


def test_a_second_step_while_another_rank_is_in_the_first() -> None:
    both_raise(
        ManifestMismatch,
        r"rank \d begins its second step while rank \d pushes key 1|rank \d pushes key 1 .* begins its second step: push the",
        lambda session: push(ScheduledStore(session), 0, 1 - session.rank),
    )


def test_a_broadcast_while_another_rank_pushes() -> None:
    def use(session: Session) -> None:
        store = ScheduledStore(session)
        if session.rank == 0:
            push(store, 0)
        else:
            store.broadcast(0, nd.ones(SHAPE), out=nd.ones(SHAPE))

    both_raise(ManifestMismatch, r"rank \d (broadcasts|pushes) key 0 .*while rank \d (broadcasts|pushes) key 0", use)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda store, rank: push(store, 0, shape=(2 + rank,)),
            r"key 0: the shape and type is 'key 0' float32\[2\] on rank 0 but 'key 0' float32\[3\] on rank 1",
        ),
        (
            lambda store, rank: store.pushpull(0, nd.ones(2), priority=-rank),
            "key 0: the priority is 0 on rank 0 but -1 on rank 1",
        ),
        (
            lambda store, rank: store.broadcast(0, nd.ones(2 + rank), out=nd.ones(2 + rank)),
            r"key 0: the shape and type is \[2\] of float32 on rank 0 but \[3\] of float32 on rank 1",
        ),
        (lambda store, rank: store.init(0, nd.ones(2) * rank), "key 0 has another value on rank 1 than on rank 0, and without"),
    ],
)
def test_what_differs_between_ranks(use: Callable[[ScheduledStore, int], None], message: str) -> None:
    both_raise(ManifestMismatch, message, lambda session: use(ScheduledStore(session), session.rank))


# --- arrays ---


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda store: push(store, 0, shape=(3,)), r"'key 0' float32\[2\] is 'key 0' float32\[3\] now: create another kvstore"),
        (lambda store: push(store, 0, dtype="float64"), r"'key 0' float32\[2\] is 'key 0' float64\[2\] now"),
        (lambda store: push(store, 0, dtype="int32"), "key 0 is int32; only gradients of float16, float32, float64"),
        (lambda store: store.pushpull(0, nd.ones(2).tostype("row_sparse")), "key 0 is row_sparse: only dense ones"),
        (
            lambda store: store.pushpull(0, nd.ones(2, ctx=mx.cpu(1))),
            r"key 0 is on cpu\(1\); gradients are averaged on cpu\(0\)",
        ),
        (lambda store: store.pushpull(0, [nd.ones(2)] * 2), "key 0 comes from 2 devices: commsched takes one process for each"),
        (
            lambda store: store.pushpull(0, nd.ones(2), out=nd.ones(3)),
            r"key 0 is pushed with shape \[2\], and pulled with \[3\]",
        ),
        (lambda store: store.pushpull([0, 1], [nd.ones(2)] * 2), r"one key at a time, not \[0, 1\]"),
        (lambda store: store.push(0, nd.ones(2)), r"push\(\) and pull\(\) apart are not supported; call pushpull\(\)"),
        (lambda store: store.pull(0, out=nd.ones(2)), r"push\(\) and pull\(\) apart are not supported"),
        (lambda store: store.set_gradient_compression({"type": "2bit"}), "gradient compression is not supported"),
        (lambda store: store.save_optimizer_states("never-written"), "no optimizer is set: its states are not on the kvstore"),
        (lambda store: store.load_optimizer_states("never-written"), "no optimizer is set"),
    ],
)
def test_what_cannot_be_used(use: Callable[[ScheduledStore], None], message: str) -> None:
    both_raise(UnsupportedError, message, lambda session: use(begun(session)))


def test_states_that_are_not_there_leave_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "states").write_bytes(b"earlier ones")
    both_raise(
        UnsupportedError,
        "no optimizer is set",
        lambda session: begun(session).save_optimizer_states(str(tmp_path / "states")),
    )
    assert (tmp_path / "states").read_bytes() == b"earlier ones"


def test_sparse_parameters_of_a_trainer() -> None:
    def use(session: Session) -> None:
        net = gluon.nn.Embedding(5, 3, sparse_grad=True)
        net.initialize()
        gluon.Trainer(net.collect_params(), "sgd", kvstore=ScheduledStore(session)).step(1)

    both_raise(ValueError, "Cannot use .*ScheduledStore.* for multi-device training with sparse gradients", use)


# --- optimizers and values ---


def optimizing(session: Session, optimizer: mx.optimizer.Optimizer) -> ScheduledStore:
    store = ScheduledStore(session)
    store.set_optimizer(optimizer)
    return store


def test_no_weight_for_the_optimizer() -> None:
    both_raise(
        UnsupportedError,
        "key 0 is pushed without out, the weight that the optimizer is to update",
        lambda session: push(optimizing(session, mx.optimizer.SGD()), 0),
    )


def test_an_optimizer_that_draws_random_numbers() -> None:
    both_raise(UnsupportedError, "SGLD adds noise", lambda session: optimizing(session, mx.optimizer.SGLD()))


def test_other_optimizers() -> None:
    both_raise(
        ManifestMismatch,
        "the optimizer's momentum is 0.0 on rank 0 but 0.5 on rank 1",
        lambda session: optimizing(session, mx.optimizer.SGD(momentum=0.5 * session.rank)),
    )


def test_other_weights() -> None:
    def use(session: Session) -> None:
        store = optimizing(session, mx.optimizer.SGD())
        store.pushpull(0, nd.ones(2), out=nd.ones(2) * session.rank)

    both_raise(ManifestMismatch, r"key 0: the weight \(a digest\) is \w+ on rank 0 but \w+ on rank 1", use)


def trained(session: Session, batch: Callable[[int], int], seed: int = 0) -> gluon.Trainer:
    net = mlp(seed)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=ScheduledStore(session))
    for number, (inputs, labels) in enumerate(batches(2, steps=3)):
        backward(net, inputs[share(session)], labels[share(session)])
        trainer.step(batch(number))
    return trainer


def test_values_that_differ_when_backward_has_run() -> None:
    """The first gradients would be of other weights."""
    both_raise(
        ManifestMismatch,
        r"key 0 \(net_dense0_bias\) had another value on rank 1 than on rank 0 when backward ran: begin alike",
        lambda session: trained(session, lambda _: 2 * ROWS, seed=session.rank),
    )


def test_other_batch_sizes_in_the_first_step() -> None:
    both_raise(
        ManifestMismatch,
        r"key 0 \(net_dense0_bias\): its rescale_grad \(of the batch size\) is 0.2\d* on rank 0 but 0.1\d* on rank 1",
        lambda session: trained(session, lambda _: 5 + session.rank),
    )


def test_other_numbers_of_the_optimizer_later() -> None:
    """In the last step; found when the session closes."""

    def use(session: Session) -> None:
        net = mlp()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=ScheduledStore(session))
        for number, (inputs, labels) in enumerate(batches(2, steps=3)):
            if number == 2 and session.rank == 1:
                trainer.optimizer.wd = 0.1
            step(net, trainer, inputs[share(session)], labels[share(session)])
        session.close()

    both_raise(RanksDiverged, r"of kvstore 1 \(key 0 .*and 5 more\) differ .*: 'wd' is 0.0 on rank 0 but 0.1 on rank 1", use)


def test_a_weight_that_one_rank_changes() -> None:
    def use(session: Session) -> None:
        net = mlp()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=ScheduledStore(session))
        for inputs, labels in batches(2, steps=4):
            step(net, trainer, inputs[share(session)], labels[share(session)])
            if session.rank == 1:
                net[2].bias.data()[:] = 1
        session.close()

    both_raise(RanksDiverged, r"weights of kvstore 1 .* differ .*: 'key \d \(net_dense2_bias\)' is .* on rank 1", use)


def test_a_weight_that_one_rank_changes_is_found_while_the_training_goes_on() -> None:
    """Nobody closes the session, which would look at the weights once more."""

    def use(session: Session) -> None:
        failures: SimpleQueue[Exception] = SimpleQueue()
        session.when_failed(failures.put)
        store, weight = optimizing(session, mx.optimizer.SGD()), nd.ones(SHAPE)
        for _ in range(4):  # those of the second step are taken in the third, and compared in the fourth
            store.pushpull(0, nd.ones(SHAPE), out=weight)
            weight[:] = session.rank
        raise failures.get(timeout=60)

    both_raise(RanksDiverged, r"weights of kvstore 1 .* differ .*: 'key 0' is .* on rank 1", use)


def test_states_that_only_one_rank_loads(tmp_path: Path) -> None:
    def use(session: Session) -> None:
        store, weight, file = (
            optimizing(session, mx.optimizer.SGD(momentum=0.9)),
            nd.ones(SHAPE),
            str(tmp_path / str(session.rank)),
        )
        for number in range(5):
            if number == 2:
                store.save_optimizer_states(file)
                if session.rank == 1:
                    store.load_optimizer_states(file)
            store.pushpull(0, nd.ones(SHAPE), out=weight)
        session.close()

    both_raise(
        RanksDiverged, r"of kvstore 1 .* differ .*: 'what load_states\(\) has read' is 0 on rank 0 but \d+ on rank 1", use
    )


def test_another_batch_size_later_is_refused_as_with_dist_sync() -> None:
    both_raise(
        UserWarning,
        "Possible change in the `batch_size` from previous",
        lambda session: trained(session, lambda number: 2 * ROWS - number),
    )


def test_averages_apart_from_updates_are_refused_as_with_dist_sync() -> None:
    both_raise(
        AssertionError,
        r"allreduce_grads\(\) when parameters are updated on kvstore is not supported",
        lambda session: trained(session, lambda _: 2 * ROWS).allreduce_grads(),
    )
