"""What is refused, by name; and what a dead rank does to the others."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

from commsched import ConfigError, ManifestMismatch, RanksDiverged, Session, TransportError, UnsupportedError
from commsched.plugins.mxnet import ScheduledTrainer
from commsched.plugins.mxnet.operation import Operation
from commsched.plugins.mxnet.queued_group import BufferPlace, QueuedGroup
from tests.jobs.job import clean_environ
from tests.plugins.missing import import_without

from .probe import Probe
from .training import ROWS, backward, batches, fill, mlp, on_ranks, share, step, weights_of

SGD = ("sgd", {"learning_rate": 0.1})


def both_raise(kind: type[Exception], message: str, fn: Callable[[Session], object]) -> None:
    """``fn`` raises this on both ranks, or, on one, that the other has raised it and ended."""

    def run(session: Session) -> bool:
        with pytest.raises((kind, TransportError), match=message) as raised:
            fn(session)
        session.abort(f"{kind.__name__}: {raised.value}")
        return raised.errisinstance(kind)

    assert any(on_ranks(run))


def trained(session: Session, net: Any, *, steps: int = 1, trainer: ScheduledTrainer | None = None) -> ScheduledTrainer:
    trainer = trainer or ScheduledTrainer(net.collect_params(), *SGD, session=session)
    for inputs, labels in batches(2, steps=steps):
        step(net, trainer, inputs[share(session)], labels[share(session)])
    return trainer


# --- when it is made ---


def test_without_mxnet(tmp_path: Path) -> None:
    assert 'this plugin needs MXNet: pip install "commsched[mxnet]"' in import_without("mxnet", tmp_path)


def test_ranks_with_other_shapes() -> None:
    def make(session: Session) -> None:
        net = gluon.nn.Dense(3 + session.rank, in_units=2, prefix="net_")
        net.initialize()
        ScheduledTrainer(net.collect_params(), *SGD, session=session)

    both_raise(ManifestMismatch, r"'net_weight' float32\[3, 2\] on rank 0 but 'net_weight' float32\[4, 2\] on rank 1", make)


def test_a_trainer_that_was_refused_keeps_no_parameters() -> None:
    def make(session: Session) -> None:
        net, other = mlp(), gluon.nn.Dense(1 + session.rank, in_units=2, prefix="other_")
        other.initialize()
        with pytest.raises(ManifestMismatch, match="'other_weight'"):
            ScheduledTrainer([net[0].weight, other.weight], *SGD, session=session)
        trained(session, net)

    on_ranks(make)


def test_a_parameter_that_only_one_rank_has() -> None:
    def make(session: Session) -> None:
        net = gluon.nn.Dense(3, in_units=2, use_bias=session.rank == 0, prefix="net_")
        net.initialize()
        ScheduledTrainer(net.collect_params(), *SGD, session=session)

    both_raise(ManifestMismatch, r"'net_bias' float32\[3\] on rank 0 but nothing more on rank 1", make)


def test_a_parameter_that_only_one_rank_trains() -> None:
    def train(session: Session) -> None:
        net = mlp()
        if session.rank == 1:
            net[0].bias.grad_req = "null"
        trained(session, net)

    both_raise(ManifestMismatch, "'net_dense0_bias' is trained on rank 0 but is not on rank 1", train)


def test_other_optimizers() -> None:
    def train(session: Session) -> None:
        net = mlp()
        trainer = ScheduledTrainer(net.collect_params(), "sgd", {"momentum": 0.9 - 0.1 * session.rank}, session=session)
        trained(session, net, trainer=trainer)

    both_raise(ManifestMismatch, "the optimizer's momentum is 0.9 on rank 0 but 0.8 on rank 1", train)


def test_values_loaded_on_one_rank_only() -> None:
    def train(session: Session) -> None:
        net = mlp()
        trainer = ScheduledTrainer(net.collect_params(), *SGD, session=session)
        if session.rank == 1:
            net[1].weight.set_data(nd.ones((9, 12), dtype="float64"))
        trained(session, net, trainer=trainer)

    both_raise(ManifestMismatch, "'net_dense1_weight' has other values on rank", train)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: gluon.nn.Embedding(5, 3, sparse_grad=True, prefix="net_"),
            r"parameter 'net_weight' is default, its gradient row_sparse: only dense ones can be averaged \(sparse_grad=False",
        ),
        (
            lambda: gluon.nn.Dense(5, in_units=3, dtype="int32", prefix="net_"),
            "parameter 'net_weight' is int32; only gradients of",
        ),
    ],
)
def test_what_cannot_be_averaged(make: Callable[[], Any], message: str) -> None:
    def use(session: Session) -> None:
        net = make()
        net.initialize(mx.init.Zero())
        ScheduledTrainer(net.collect_params(), *SGD, session=session)

    both_raise(UnsupportedError, message, use)


@pytest.mark.parametrize(("contexts", "named"), [(mx.cpu(1), r"cpu\(1\)"), ([mx.cpu(0), mx.cpu(1)], r"cpu\(0\), cpu\(1\)")])
def test_other_devices(contexts: Any, named: str) -> None:
    def use(session: Session) -> None:
        net = gluon.nn.Dense(5, in_units=3, prefix="net_")
        net.initialize(ctx=contexts)
        ScheduledTrainer(net.collect_params(), *SGD, session=session)

    both_raise(UnsupportedError, rf"parameter 'net_weight' is on {named}; gradients are averaged on cpu\(0\) alone", use)


def test_a_second_trainer_of_the_same_parameters() -> None:
    def use(session: Session) -> None:
        net = mlp()
        first = ScheduledTrainer(net.collect_params(), *SGD, session=session)
        try:
            ScheduledTrainer(net[0].collect_params(), *SGD, session=session)
        finally:
            first.detach()

    both_raise(ConfigError, "parameter 'net_dense0_weight' belongs to another ScheduledTrainer; call its detach", use)


def test_two_parameters_of_one_name() -> None:
    def use(session: Session) -> None:
        nets = [mlp(), mlp()]
        ScheduledTrainer([net[0].weight for net in nets], *SGD, session=session)

    both_raise(ConfigError, "two parameters named 'net_dense0_weight': give their blocks other prefixes", use)


def test_an_optimizer_that_draws_random_numbers() -> None:
    def use(session: Session) -> None:
        ScheduledTrainer(mlp().collect_params(), "sgld", session=session)

    both_raise(UnsupportedError, "SGLD adds noise, which each rank would draw for itself", use)


@pytest.mark.parametrize("loads", [0, 1])
def test_parameters_loaded_on_one_rank_only_before_their_shapes_are_known(loads: int, tmp_path: Path) -> None:
    file = str(tmp_path / "parameters")
    mlp().save_parameters(file)

    def train(session: Session) -> None:
        net = mlp(session.rank, deferred=True)
        trainer = ScheduledTrainer(net.collect_params(), *SGD, session=session)
        if session.rank == loads:
            net.load_parameters(file)
        trained(session, net, trainer=trainer)

    both_raise(
        ManifestMismatch,
        rf"rank {loads} makes the first step while rank {1 - loads} initialises parameter 'net_dense0_weight': load or set"
        rf"|rank {1 - loads} initialises parameter 'net_dense0_weight' while rank {loads} makes the first step: load or set",
        train,
    )


# --- while it trains ---


def test_other_batch_sizes() -> None:
    def train(session: Session) -> None:
        net = mlp()
        trainer = trained(session, net)
        (inputs, labels), *_ = batches(2)
        backward(net, inputs[share(session)], labels[share(session)])
        trainer.step(ROWS + session.rank)
        trained(session, net, trainer=trainer)
        session.close()

    match = (
        r"of the optimizer of 'net_dense0_weight' and 5 more.* after step 2: 'rescale_grad.*' is 0\.3.* on rank 0 but 0\.25 on"
    )
    both_raise(RanksDiverged, match, train)


def test_other_batch_sizes_in_the_last_step_are_found_when_the_session_closes() -> None:
    def train(session: Session) -> None:
        net = mlp()
        trainer = trained(session, net)
        (inputs, labels), *_ = batches(2)
        backward(net, inputs[share(session)], labels[share(session)])
        trainer.step(ROWS + session.rank)
        session.close()

    both_raise(RanksDiverged, r"'rescale_grad \(of the batch size\)' is 0\.3.* on rank 0 but 0\.25 on rank 1", train)


def test_other_learning_rates() -> None:
    def train(session: Session) -> None:
        net = mlp()
        trainer = trained(session, net)
        trainer.set_learning_rate(0.1 * (1 + session.rank))
        trained(session, net, steps=3, trainer=trainer)

    both_raise(RanksDiverged, r"'learning_rate' is 0\.1 on rank 0 but 0\.2 on rank 1", train)


class Listed(mx.lr_scheduler.LRScheduler):
    """Has rates of its own, of which no number of it tells."""

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__()
        self.rates = list(rates)

    def __call__(self, num_update: int) -> float:
        return self.rates[num_update]


def test_other_learning_rates_of_a_scheduler() -> None:
    def train(session: Session) -> None:
        net = mlp()
        optimizer = mx.optimizer.SGD(lr_scheduler=Listed([0.1, 0.1, 0.1 * (1 + session.rank), 0.1]))
        trained(session, net, steps=3, trainer=ScheduledTrainer(net.collect_params(), optimizer, session=session))
        session.close()

    both_raise(RanksDiverged, r"'learning_rate' is 0\.1 on rank 0 but 0\.2 on rank 1", train)


def set_weight_decay(net: Any, trainer: ScheduledTrainer) -> None:
    trainer.optimizer.wd = 0.1


def set_numpys_number(net: Any, trainer: ScheduledTrainer) -> None:
    trainer.optimizer.wd = np.float32(0.1)


def set_multiple(net: Any, trainer: ScheduledTrainer) -> None:
    net[0].weight.lr_mult = np.float32(0.1)


@pytest.mark.parametrize(
    ("set_it", "match"),
    [
        (set_weight_decay, "'wd' is 0.0 on rank 0 but 0.1 on rank 1"),
        (set_numpys_number, r"'wd' is 0\.0 on rank 0 but 0\.10\d* on rank 1"),
        (set_multiple, "'lr_mult of net_dense0_weight' is 1.0 on rank 0 but 0.1"),
    ],
)
def test_other_numbers_of_the_optimizer(set_it: Callable[[Any, ScheduledTrainer], None], match: str) -> None:
    def train(session: Session) -> None:
        net = mlp()
        trainer = trained(session, net)
        if session.rank == 1:
            set_it(net, trainer)
        trained(session, net, trainer=trainer)
        session.close()

    both_raise(RanksDiverged, match, train)


@pytest.mark.parametrize("loads", [True, False])
def test_weights_that_one_rank_changes(loads: bool, tmp_path: Path) -> None:
    def train(session: Session) -> None:
        net = mlp()
        trainer = trained(session, net)
        if session.rank == 1:
            other = mlp(seed=1)
            if loads:
                other.save_parameters(str(tmp_path / "other"))
                net.load_parameters(str(tmp_path / "other"))
            else:
                net[2].bias.data()[:] = 1
        trained(session, net, steps=3, trainer=trainer)
        failed = threading.Event()  # the comparison may end after the third step
        session.when_failed(lambda _: failed.set())
        assert failed.wait(60)
        trained(session, net, trainer=trainer)

    name, more = (r"net_dense\d_\w+", r" \(5 more differ\)") if loads else ("net_dense2_bias", "")
    match = rf"weights of 'net_dense0_weight' and 5 more differ between ranks after step 1: '{name}' is .*on rank 1{more}"
    both_raise(RanksDiverged, match, train)


def test_a_second_trainer_for_the_same_parameters() -> None:
    """It takes over, as where a notebook's cell is run again; the first refuses to go on. One of a part of them is refused."""

    def train(session: Session) -> Any:
        net = mlp()
        first = trained(session, net)
        second = trained(session, net)
        with pytest.raises(UnsupportedError, match="another ScheduledTrainer was made for the same parameters: use that one"):
            trained(session, net, trainer=first)
        first.detach()
        with pytest.raises(ConfigError, match="parameter 'net_dense0_weight' belongs to another ScheduledTrainer; call its"):
            ScheduledTrainer([net[0].weight], *SGD, session=session)
        trained(session, net, trainer=second)
        return weights_of(net)

    def alone(net: Any, trainer: gluon.Trainer, inputs: Any, labels: Any) -> None:
        for _ in range(3):
            step(net, trainer, inputs, labels)

    plain = mlp()
    alone(plain, gluon.Trainer(plain.collect_params(), *SGD), *batches(2, steps=1)[0])
    ours, others = on_ranks(train)
    for name, weights in weights_of(plain).items():
        assert ours[name].tobytes() == others[name].tobytes()
        np.testing.assert_allclose(ours[name], weights)


def two_plain_steps(net: Any) -> None:
    trainer = gluon.Trainer(net.collect_params(), *SGD)
    for _ in range(2):
        step(net, trainer, *batches(2, steps=1)[0])


@pytest.mark.parametrize("differs", ["parameters", "owner"])
def test_a_second_trainer_that_is_refused_may_leave_the_first_as_it_is(differs: str) -> None:
    def train(session: Session) -> Any:
        net = mlp()
        first = trained(session, net)
        parameters = list(net.collect_params().values())
        if differs == "parameters":
            expected: Any = pytest.raises(ManifestMismatch, match=r"the trainer has 'net_dense0_weight' .* on rank 0")
            parameters = parameters[:: 1 - 2 * session.rank]
        else:
            said = "the trainer's parameters belong to an earlier ScheduledTrainer on rank 0 but no other one on rank 1"
            expected = pytest.raises(ConfigError, match=said)
            parameters = parameters if session.rank == 0 else list(mlp().collect_params().values())
        with expected:
            ScheduledTrainer(parameters, *SGD, session=session)
        if differs == "owner":  # the first has said on rank 0 that it ends
            session.gather("both have seen it")
            session.abort("refused")
            return weights_of(plain)
        trained(session, net, trainer=first)
        return weights_of(net)

    plain = mlp()
    two_plain_steps(plain)
    for weights in on_ranks(train):
        for name, values in weights_of(plain).items():
            np.testing.assert_allclose(weights[name], values)


def test_a_second_trainer_on_one_rank_while_others_train_on_with_the_first() -> None:
    def train(session: Session) -> None:
        net = mlp()
        first = trained(session, net)
        if session.rank == 0:
            ScheduledTrainer(net.collect_params(), *SGD, session=session)
        for _ in range(3):
            trained(session, net, trainer=first)
            nd.waitall()  # for averages to which rank 0 sends nothing

    both_raise(RanksDiverged, "rank 0 ended the training of .* after 1 steps, .* and rank 1 did not", train)


@pytest.mark.parametrize("ignores", [False, True])
def test_a_step_that_is_refused_can_be_made_when_the_mistake_is_mended(ignores: bool) -> None:
    """It has forgotten no gradient of the last backward."""

    def train(session: Session) -> Any:
        net = mlp()
        frozen = net[0].weight
        frozen.grad_req = "null"
        trainer = trained(session, net)
        inputs, labels = batches(2, steps=1)[0]
        backward(net, inputs[share(session)], labels[share(session)])
        frozen.grad_req = "write"
        with pytest.raises(UnsupportedError, match="'net_dense0_weight' is trained since the first step only"):
            trainer.step(ROWS, ignore_stale_grad=ignores)
        frozen.grad_req = "null"
        trainer.step(ROWS, ignore_stale_grad=ignores)
        return weights_of(net)

    plain = mlp()
    plain[0].weight.grad_req = "null"
    two_plain_steps(plain)
    for weights in on_ranks(train):
        for name, values in weights_of(plain).items():
            np.testing.assert_allclose(weights[name], values)


def test_a_parameter_that_is_frozen_on_one_rank_is_named_on_both_if_another_is_late() -> None:
    """Rank 0 finds it in its round, in which it has no new gradient of another parameter; rank 1 in its next round."""

    def train(session: Session) -> list[str]:
        net = mlp()
        unused = gluon.Parameter("unused", shape=(4,), dtype="float64")
        unused.initialize(mx.init.One())
        trainer = ScheduledTrainer([*net.collect_params().values(), unused], *SGD, session=session)
        said = []
        for number in range(3):
            inputs, labels = batches(2, steps=1)[0]
            if number == 1 and session.rank == 1:
                net[0].weight.grad_req = "null"
            with autograd.record():
                outputs = net(nd.array(inputs[share(session)], dtype="float64"))
                if number == 0 or session.rank == 1:
                    outputs = outputs + unused.data()
                loss = gluon.loss.SoftmaxCrossEntropyLoss()(outputs, nd.array(labels[share(session)], dtype="float64"))
            loss.backward()
            try:
                trainer.step(ROWS, ignore_stale_grad=True)
                unused.data().asnumpy()
            except UnsupportedError as error:
                said.append(str(error))
        session.gather("both have seen it")
        session.abort("refused")
        return said

    named = "parameter 'net_dense0_weight' has grad_req='null' on some ranks only: set it on all, or on none"
    assert on_ranks(train) == [[named, named], [named]]


def test_a_trainer_of_frozen_parameters() -> None:
    def train(session: Session) -> None:
        net = mlp()
        for parameter in net.collect_params().values():
            parameter.grad_req = "null"
        ScheduledTrainer(net.collect_params(), *SGD, session=session).step(ROWS)

    both_raise(UnsupportedError, r"no parameter is trained \(grad_req='null'\?\), so there is nothing to average", train)


def test_an_update_that_only_one_rank_makes() -> None:
    def train(session: Session) -> None:
        net = mlp()
        trainer = trained(session, net)
        (inputs, labels), *_ = batches(2)
        backward(net, inputs[share(session)], labels[share(session)])
        trainer.allreduce_grads()
        if session.rank == 0:
            trainer.update(ROWS)
        trained(session, net, trainer=trainer)
        session.close()

    both_raise(RanksDiverged, r"'calls of update\(\)' is 2 on rank 0 but 1 on rank 1", train)


def test_a_trainer_that_only_one_rank_lets_go() -> None:
    """While the other waits for averages, where only MXNet could end the wait."""

    def train(session: Session) -> None:
        net = mlp()
        trainer = trained(session, net)
        if session.rank == 0:
            trainer.detach()
        trained(session, net, trainer=trainer)
        nd.waitall()

    both_raise(
        RanksDiverged, "rank 0 ended the training of 'net_dense0_weight' and 5 more after 1 steps, by .* rank 1 did not", train
    )


def test_one_of_two_trainers_that_one_rank_steps_once_more() -> None:
    """The other rank ends, and must not wait for the first trainer's end before it tells of the second's."""

    def train(session: Session) -> None:
        net = mlp()
        trainers = [ScheduledTrainer(layer.collect_params(), *SGD, session=session) for layer in (net[0], net[1])]
        for inputs, labels in batches(2, steps=2):
            backward(net, inputs[share(session)], labels[share(session)])
            for trainer in trainers:
                trainer.step(ROWS)
        if session.rank == 0:
            backward(net, inputs[share(session)], labels[share(session)])
            trainers[1].step(ROWS)
            weights_of(net)
        session.close()

    both_raise(
        RanksDiverged, "rank 1 ended the training of 'net_dense1_weight' and 1 more after 2 steps.*equally many batches", train
    )


def test_states_that_only_one_rank_loads(tmp_path: Path) -> None:
    def train(session: Session) -> None:
        net = mlp()
        trainer = ScheduledTrainer(net.collect_params(), "adam", session=session)
        trained(session, net, trainer=trainer)
        if session.rank == 0:
            trainer.save_states(str(tmp_path / "states"))
            trainer.load_states(str(tmp_path / "states"))
        trained(session, net, trainer=trainer)
        session.close()

    both_raise(RanksDiverged, r"'what load_states\(\) has read' is \d+ on rank 0 but 0 on rank 1", train)


def test_a_parameter_frozen_on_one_rank_only() -> None:
    def train(session: Session) -> None:
        net = mlp()
        trainer = trained(session, net)
        if session.rank == 0:
            net[0].bias.grad_req = "null"
        trained(session, net, trainer=trainer)
        session.close()

    both_raise(UnsupportedError, "parameter 'net_dense0_bias' has grad_req='null' on some ranks only", train)


def test_a_parameter_unfrozen_later() -> None:
    def train(session: Session) -> None:
        net = mlp()
        net[0].bias.grad_req = "null"
        trainer = trained(session, net)
        net[0].bias.grad_req = "write"
        trained(session, net, trainer=trainer)

    both_raise(UnsupportedError, "parameter 'net_dense0_bias' is trained since the first step only", train)


def test_a_parameter_cast_to_another_type() -> None:
    def train(session: Session) -> None:
        net = mlp()
        trainer = trained(session, net)
        net.cast("float32")
        trainer.allreduce_grads()

    both_raise(UnsupportedError, r"parameter 'net_dense\d_\w+' float64\[.*\] is 'net_dense\d_\w+' float32\[.*\] now", train)


def test_update_without_averages() -> None:
    def train(session: Session) -> None:
        net = mlp()
        trainer = trained(session, net)
        (inputs, labels), *_ = batches(2)
        backward(net, inputs[share(session)], labels[share(session)])
        trainer.update(ROWS)

    both_raise(UnsupportedError, r"update\(\) without allreduce_grads\(\) since the last update", train)


def test_backward_between_the_average_and_the_update() -> None:
    def train(session: Session) -> None:
        net = mlp()
        trainer = trained(session, net)
        (inputs, labels), *_ = batches(2)
        backward(net, inputs[share(session)], labels[share(session)])
        trainer.allreduce_grads()
        backward(net, inputs[share(session)], labels[share(session)])
        trainer.update(ROWS)

    both_raise(
        UnsupportedError, r"backward has written the gradient of 'net_dense\d_\w+' between allreduce_grads\(\) and", train
    )


def test_a_parameter_without_a_new_gradient_is_refused_as_gluon_does() -> None:
    def train(session: Session) -> None:
        net = mlp()
        trained(session, net).step(ROWS)  # without a backward

    both_raise(UserWarning, "Gradient of Parameter `net_dense0_bias` on context cpu.0. has not been updated", train)


# --- failures ---


def test_who_reads_a_parameter_hears_of_a_rank_that_ended() -> None:
    """Rank 1 never calls step(), so rank 0 waits for averages that do not come."""

    def run(session: Session) -> None:
        net = mlp()
        trainer = trained(session, net)
        if session.rank == 1:
            waiting.wait(60)
            raise KeyError("no more")
        (inputs, labels), *_ = batches(2)
        step(net, trainer, inputs[share(session)], labels[share(session)])
        waiting.set()
        with pytest.raises(TransportError, match="rank 1 ended: KeyError: 'no more'"):
            weights_of(net)
        heard.append(True)
        with pytest.raises(TransportError, match="rank 1 ended: KeyError: 'no more'"):
            trainer.step(ROWS)
        session.abort("as expected")

    heard, waiting = [], threading.Event()
    with pytest.raises(KeyError, match="no more"):
        on_ranks(run)
    assert heard == [True]


def test_who_waits_for_long_is_told_for_what() -> None:
    """Rank 1 comes late."""

    def run(session: Session) -> None:
        session.core.warn_after_seconds = 0.05
        net = mlp()
        trainer = trained(session, net)
        if session.rank == 1:
            assert warned.wait(60)
        trained(session, net, trainer=trainer)
        weights_of(net)

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = record.getMessage()
            if re.match(r"rank 0 has waited \d s for the average of 'net_dense", line) and "rank 1 has not " in line:
                warned.set()

    warned, note = threading.Event(), Note()
    logging.getLogger("commsched").addHandler(note)
    try:
        on_ranks(run)
    finally:
        logging.getLogger("commsched").removeHandler(note)


def test_a_failed_backward_is_told_to_all_ranks() -> None:
    """MXNet skips what depends on an operation that failed; nobody waits for the gradient for ever."""

    def fail() -> None:
        if failing.is_set():
            raise ValueError("out of luck")

    def run(session: Session) -> None:
        net = mlp(session.rank)
        probe = Probe(on_backward=fail if session.rank == 1 else lambda: None)
        whole = gluon.nn.Sequential()
        whole.add(net, probe)
        trainer = trained(session, whole)
        both.wait(60)
        failing.set()
        (inputs, labels), *_ = batches(2)
        with pytest.raises((TransportError, mx.MXNetError), match=r"has not computed|ptrs"):
            step_and_read(whole, trainer, inputs[share(session)], labels[share(session)])
        with pytest.raises(TransportError, match=r"rank 1 has not computed the gradient of 'net_dense._"):
            trainer.step(ROWS)
        session.abort("as expected")

    def step_and_read(net: Any, *arguments: Any) -> None:
        step(net, *arguments)
        weights_of(net)

    failing, both = threading.Event(), threading.Barrier(2)
    on_ranks(run)


def test_a_late_look_for_failures_finds_none_in_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one round makes MXNet's engine do may be done when the next has begun."""
    look, require = QueuedGroup._look_for_failed, QueuedGroup._require_computed
    looks: list[Callable[[], None]] = []

    def look_late(self: QueuedGroup, places: Sequence[BufferPlace], number: int, operation: Operation) -> None:
        looks.append(partial(look, self, places, number, done))
        looks.append(lambda: [require(self, place, number, done) for place in places] and None)
        operation.complete()

    def run(session: Session) -> None:
        net = mlp(session.rank)
        trainer = trained(session, net, steps=3)
        (inputs, labels), *_ = batches(2)
        backward(net, inputs[share(session)], labels[share(session)])
        weights_of(net)
        monkeypatch.setattr(QueuedGroup, "submit", lambda self, gradients: queue(self))
        both.wait(60)
        trainer.allreduce_grads()
        for late in tuple(looks):
            late()
        session.core.check()
        both.wait(60)
        session.abort("as expected")

    def queue(group: QueuedGroup) -> None:
        for place in group.places:
            place.queued = group.round

    done, both = SimpleNamespace(complete=lambda: None), threading.Barrier(2)
    monkeypatch.setattr(QueuedGroup, "_look_for_failed", look_late)
    on_ranks(run)


def test_a_look_for_failures_leaves_alone_what_is_queued_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are not new are queued later than the others; the look at those may come while they are being queued."""
    submit, look = QueuedGroup.submit, QueuedGroup._look_for_failed
    looked = threading.Event()

    def submit_slowly(self: QueuedGroup, gradients: Mapping[int, Any]) -> None:
        for tensor in gradients:
            self.places[tensor].queued = self.round
        names = [self.places[tensor].name for tensor in gradients]  # their order is measured, so it varies under load
        if self.round == 2 and "net_dense0_weight" in names:
            assert looked.wait(60)
            nd.zeros(1).wait_to_read()  # behind what the look has queued; not by a thread of the engine, which may have but one
            self.session.core.check()
        submit(self, gradients)

    def look_and_tell(self: QueuedGroup, places: Sequence[BufferPlace], number: int, operation: Operation) -> None:
        look(self, places, number, operation)
        if number == 2:
            looked.set()

    def run(session: Session) -> None:
        net = mlp(session.rank)
        trainer = trained(session, net)
        with autograd.record():
            outputs = net[2](nd.ones((ROWS, 9), dtype="float64"))
        outputs.backward()
        with pytest.raises(UserWarning, match="has not been updated"):
            trainer.step(ROWS)  # the first two layers' are not new
        session.close()

    monkeypatch.setattr(QueuedGroup, "submit", submit_slowly)
    monkeypatch.setattr(QueuedGroup, "_look_for_failed", look_and_tell)
    on_ranks(run)


def test_the_naive_engine_is_refused() -> None:
    """In a process of its own: an engine is chosen when MXNet starts."""
    code = """
import mxnet as mx
from commsched.plugins.mxnet.operation import push
push(lambda operation: None, writes=[mx.nd.zeros(3)])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=clean_environ(MXNET_ENGINE_TYPE="NaiveEngine"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "UnsupportedError: MXNET_ENGINE_TYPE=NaiveEngine runs one operation after another" in done.stderr


def test_a_gradient_recorded_by_hand_is_found_stale() -> None:
    """Gluon's own check: no backward has come to the parameters."""

    def train(session: Session) -> None:
        net = mlp(session.rank)
        trainer = trained(session, net)
        with autograd.record():
            (net(nd.ones((1, 6), dtype="float64")) * 0).sum()  # no backward
        trainer.step(1)

    both_raise(UserWarning, "has not been updated by backward since last `step`", train)


def test_fills_differ_by_seed() -> None:
    """Or a missing broadcast would not be seen."""
    a, b = mlp(0), mlp(1)
    fill(a, 0)
    assert not np.array_equal(weights_of(a)["net_dense0_weight"], weights_of(b)["net_dense0_weight"])
