"""Whoever reads parameters, gradients or states sees what plain training would show; and what is left of a trainer."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd

from commsched import Session
from commsched.plugins.mxnet import ScheduledTrainer
from commsched.session.local import local_sessions

from .training import ROWS, Weights, backward, batches, mlp, on_ranks, require_equal, share, step, weights_of

ADAM = ("adam", {"learning_rate": 0.01})
Read = Callable[[Any, gluon.Trainer, Path], Weights]


def saved_parameters(net: Any, trainer: gluon.Trainer, path: Path) -> Weights:
    net.save_parameters(str(path))
    return {name: array.asnumpy() for name, array in nd.load(str(path)).items()}


def saved_arrays(net: Any, trainer: gluon.Trainer, path: Path) -> Weights:
    nd.save(str(path), {name: parameter.data() for name, parameter in net.collect_params().items()})
    return {name: array.asnumpy() for name, array in nd.load(str(path)).items()}


def loaded_again(net: Any, trainer: gluon.Trainer, path: Path) -> Weights:
    net.save_parameters(str(path))
    other = mlp(99)
    other.load_parameters(str(path))
    return weights_of(other)


def evaluated(net: Any, trainer: gluon.Trainer, path: Path) -> Weights:
    return {"outputs": net(nd.ones((2, 6), dtype="float64")).asnumpy()}


def gradients(net: Any, trainer: gluon.Trainer, path: Path) -> Weights:
    """Of sums over a batch: an average of two ranks is half of the joint batch's."""
    return {name: parameter.grad().asnumpy() / ROWS for name, parameter in net.collect_params().items()}


def saved_states(net: Any, trainer: gluon.Trainer, path: Path) -> Weights:
    trainer.save_states(str(path))
    updater = mx.optimizer.get_updater(mx.optimizer.Adam())
    updater.set_states(path.read_bytes())
    return {f"{index}.{place}": each.asnumpy() for index, state in updater.states.items() for place, each in enumerate(state)}


@pytest.mark.parametrize("read", [saved_parameters, saved_arrays, loaded_again, evaluated, gradients, saved_states])
def test_what_is_read_right_after_step(read: Read, tmp_path: Path) -> None:
    def run(session: Session) -> Weights:
        net = mlp(session.rank)
        trainer = ScheduledTrainer(net.collect_params(), *ADAM, session=session)
        for inputs, labels in batches(2, steps=3):
            step(net, trainer, inputs[share(session)], labels[share(session)])
        return read(net, trainer, tmp_path / str(session.rank))

    net = mlp(0)
    trainer = gluon.Trainer(net.collect_params(), *ADAM)
    for inputs, labels in batches(2, steps=3):
        step(net, trainer, inputs, labels)
    expected = read(net, trainer, tmp_path / "alone")
    if read is gradients:
        expected = {name: gradient / 2 for name, gradient in expected.items()}
    require_equal(on_ranks(run, delay_seconds=0.01), expected)


def test_training_goes_on_from_saved_states(tmp_path: Path) -> None:
    """Each rank saves and loads a file of its own."""

    def train(net: Any, trainer: gluon.Trainer, part: list[Any]) -> None:
        for inputs, labels in part:
            step(net, trainer, inputs, labels)

    def run(session: Session) -> Weights:
        net, file = mlp(session.rank), str(tmp_path / str(session.rank))
        mine = [(inputs[share(session)], labels[share(session)]) for inputs, labels in batches(2)]
        first = ScheduledTrainer(net.collect_params(), *ADAM, session=session)
        train(net, first, mine[:4])
        first.save_states(file)
        first.detach()
        second = ScheduledTrainer(net.collect_params(), *ADAM, session=session)
        second.load_states(file)
        train(net, second, mine[4:])
        return weights_of(net)

    net = mlp(0)
    train(net, gluon.Trainer(net.collect_params(), *ADAM), batches(2))
    require_equal(on_ranks(run, delay_seconds=0.002), weights_of(net))


def test_states_of_a_plain_trainer_go_on_with_one_update_for_each_parameter(tmp_path: Path) -> None:
    """What is loaded is the optimizer that was saved too, which joins updates."""
    sgd = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
    file = str(tmp_path / "states")

    def go_on(net: Any, trainer: gluon.Trainer, rows: slice) -> Weights:
        trainer.load_states(file)
        for inputs, labels in batches(2):
            step(net, trainer, inputs[rows], labels[rows])
        return weights_of(net)

    def run(session: Session) -> Weights:
        net = mlp(session.rank)
        trainer = ScheduledTrainer(net.collect_params(), *sgd, session=session)
        weights = go_on(net, trainer, share(session))
        assert trainer.optimizer.aggregate_num == 1
        return weights

    before = mlp(1)
    saver = gluon.Trainer(before.collect_params(), *sgd)
    for inputs, labels in batches(2, steps=2):
        step(before, saver, inputs, labels)
    saver.save_states(file)
    net = mlp(0)
    alone = go_on(net, gluon.Trainer(net.collect_params(), *sgd), slice(None))
    require_equal(on_ranks(run, delay_seconds=0.002), alone)


def test_two_trainers_of_one_net_each_of_a_part() -> None:
    def parts(net: Any) -> list[Any]:
        return [net[0].collect_params(), {**net[1].collect_params(), **net[2].collect_params()}]

    def train(net: Any, trainers: list[gluon.Trainer], rows: slice) -> Weights:
        for inputs, labels in batches(2):
            backward(net, inputs[rows], labels[rows])
            for trainer in trainers:
                trainer.step(len(inputs[rows]))
        return weights_of(net)

    def run(session: Session) -> Weights:
        net = mlp(session.rank)
        return train(net, [ScheduledTrainer(part, *ADAM, session=session) for part in parts(net)], share(session))

    net = mlp(0)
    alone = train(net, [gluon.Trainer(part, *ADAM) for part in parts(net)], slice(None))
    require_equal(on_ranks(run, delay_seconds=0.002), alone)


def test_frozen_parameters_stay_and_may_be_frozen_later() -> None:
    def train(net: Any, trainer: gluon.Trainer, rows: slice) -> Weights:
        for number, (inputs, labels) in enumerate(batches(2)):
            if number == 4:
                net[1].collect_params().setattr("grad_req", "null")
            step(net, trainer, inputs[rows], labels[rows])
        return weights_of(net)

    def frozen(seed: int) -> Any:
        net = mlp(seed)
        net[0].bias.grad_req = "null"
        return net

    def run(session: Session) -> Weights:
        net = frozen(session.rank)
        return train(net, ScheduledTrainer(net.collect_params(), *ADAM, session=session), share(session))

    net = frozen(0)
    alone = train(net, gluon.Trainer(net.collect_params(), *ADAM), slice(None))
    require_equal(on_ranks(run, delay_seconds=0.002), alone)


def test_parameters_initialised_anew() -> None:
    """Gluon then makes other arrays for the gradients."""

    def train(net: Any, trainer: gluon.Trainer, rows: slice) -> Weights:
        for number, (inputs, labels) in enumerate(batches(2)):
            if number == 4:
                for parameter in net.collect_params().values():
                    parameter.initialize(mx.init.Constant(0.1), force_reinit=True)
            step(net, trainer, inputs[rows], labels[rows])
        return weights_of(net)

    def run(session: Session) -> Weights:
        net = mlp(session.rank)
        return train(net, ScheduledTrainer(net.collect_params(), *ADAM, session=session), share(session))

    net = mlp(0)
    alone = train(net, gluon.Trainer(net.collect_params(), *ADAM), slice(None))
    require_equal(on_ranks(run, delay_seconds=0.002), alone)


def test_a_list_of_parameters() -> None:
    def run(session: Session) -> Weights:
        net = mlp(session.rank)
        trainer = ScheduledTrainer(list(net.collect_params().values()), *ADAM, session=session)
        for inputs, labels in batches(2):
            step(net, trainer, inputs[share(session)], labels[share(session)])
        return weights_of(net)

    net = mlp(0)
    trainer = gluon.Trainer(list(net.collect_params().values()), *ADAM)
    for inputs, labels in batches(2):
        step(net, trainer, inputs, labels)
    require_equal(on_ranks(run), weights_of(net))


class Counting(mx.optimizer.SGD):
    """Its states are more than arrays."""

    def create_state(self, index: Any, weight: nd.NDArray) -> Any:
        return {"updates": 0, "momentum": nd.zeros_like(weight)}

    def update(self, index: Any, weight: nd.NDArray, grad: nd.NDArray, state: Any) -> None:
        self._update_count(index)
        state["updates"] += 1
        state["momentum"][:] = 0.9 * state["momentum"] + grad * self.rescale_grad
        weight[:] = weight - 0.1 * state["momentum"] / state["updates"]


def test_states_that_are_more_than_arrays_and_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    def train(net: Any, trainer: gluon.Trainer, rows: slice, file: Path) -> Weights:
        for number, (inputs, labels) in enumerate(batches(2)):
            if number == 4:
                trainer.save_states(str(file))
                trainer.load_states(str(file))
            step(net, trainer, inputs[rows], labels[rows])
        return weights_of(net)

    def run(session: Session) -> Weights:
        net = mlp(session.rank)
        trainer = ScheduledTrainer(net.collect_params(), Counting(), session=session)
        return train(net, trainer, share(session), tmp_path / str(session.rank))

    net = mlp(0)
    alone = train(net, gluon.Trainer(net.collect_params(), Counting()), slice(None), tmp_path / "alone")
    require_equal(on_ranks(run, delay_seconds=0.002), alone)


def test_detach_leaves_no_buffers_behind() -> None:
    """As long as the session lasts."""

    def run(session: Session) -> list[object]:
        net = mlp(session.rank)
        trainer = ScheduledTrainer(net.collect_params(), *ADAM, session=session)
        (inputs, labels), *_ = batches(2)
        step(net, trainer, inputs[share(session)], labels[share(session)])
        assert trainer._exchange is not None
        kept = [weakref.ref(trainer._exchange), *(weakref.ref(slot.place) for slot in trainer._exchange._slots)]
        trainer.detach()
        weights_of(net)
        both.wait(60)
        if session.rank == 0:
            gc.collect()  # in two threads at once, one would do nothing
        both.wait(60)
        return [ref() for ref in kept]

    both = threading.Barrier(2)
    assert on_ranks(run) == [[None] * 7] * 2


def test_after_detach_it_is_a_trainer_on_this_rank_alone() -> None:
    def run(session: Session) -> None:
        net = mlp(session.rank)
        trainer = ScheduledTrainer(net.collect_params(), *ADAM, session=session)
        for inputs, labels in batches(2, steps=2):
            step(net, trainer, inputs[share(session)], labels[share(session)])
        trainer.detach()
        together.append(weights_of(net))
        (inputs, labels), *_ = batches(2)
        step(net, trainer, inputs[share(session)], labels[share(session)])
        apart.append(weights_of(net))

    together: list[Weights] = []
    apart: list[Weights] = []
    on_ranks(run)
    require_equal(together, together[0], 0.0)
    assert not np.array_equal(apart[0]["net_dense0_weight"], apart[1]["net_dense0_weight"])


def test_the_parameters_of_a_closed_session_are_free() -> None:
    """Though its trainer is still there."""

    def run(session: Session) -> Weights:
        net = nets[session.rank]
        trainer = ScheduledTrainer(net.collect_params(), *ADAM, session=session)
        trainers.append(trainer)
        for inputs, labels in batches(2, steps=2):
            step(net, trainer, inputs[share(session)], labels[share(session)])
        session.close()
        trainer.detach()
        return weights_of(net)

    nets, trainers = [mlp(0), mlp(1)], []
    on_ranks(run)
    ours = on_ranks(run)
    net = mlp(0)
    for _ in range(2):
        trainer = gluon.Trainer(net.collect_params(), *ADAM)
        for inputs, labels in batches(2, steps=2):
            step(net, trainer, inputs, labels)
    require_equal(ours, weights_of(net))
    assert len(trainers) == 4


def test_alone_it_is_gluons_trainer_to_the_bit() -> None:
    before = set(threading.enumerate())
    (session,) = local_sessions(1)
    with session:
        ours, plain = mlp(0), mlp(0)
        trainers = [
            ScheduledTrainer(ours.collect_params(), *ADAM, session=session),
            gluon.Trainer(plain.collect_params(), *ADAM),
        ]
        for inputs, labels in batches(1):
            step(ours, trainers[0], inputs, labels)
            backward(plain, inputs, labels)
            trainers[1].allreduce_grads()
            trainers[1].update(len(inputs))
        trainers[0].detach()
        require_equal([weights_of(ours)], weights_of(plain), 0.0)
        assert session.core.group_count == 0
    assert set(threading.enumerate()) <= before  # what an earlier test has begun may end meanwhile
