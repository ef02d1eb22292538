"""When things happen: gradients are handed over while backward runs, and the next forward begins before all averages are in."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import mxnet as mx
import pytest
from mxnet import gluon, nd

from commsched import SchedulerConfig, Session
from commsched.core.interfaces import Completion, ForwardingTransport, Transport
from commsched.core.manifest import Manifest
from commsched.core.task import CommTask
from commsched.plugins.mxnet import ScheduledStore, ScheduledTrainer
from commsched.plugins.mxnet.operation import Operation
from commsched.plugins.mxnet.queued_group import QueuedGroup
from commsched.plugins.mxnet.timing import forward_order

from .probe import Call, Probe
from .training import CLASSES, FEATURES, batches, fill, mlp, on_ranks, require_equal, share, step, train_alone, weights_of

EACH_TENSOR_ALONE = SchedulerConfig(partition_bytes=1 << 20, fusion_bytes=0)
LAST = "net_dense2_weight"


def probed(seed: int, probes: list[Probe], hybridize: bool = False) -> Any:
    """``mlp``, with a probe behind each of its three layers."""
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for (inputs, outputs), probe in zip(((FEATURES, 12), (12, 9), (9, CLASSES)), probes):
            net.add(gluon.nn.Dense(outputs, "tanh" if outputs != CLASSES else None, in_units=inputs, dtype="float64"), probe)
    net.initialize()
    fill(net, seed)
    if hybridize:
        net.hybridize()
    return net


class Holding(ForwardingTransport):
    """A transport that keeps back the averages of the tensor ``name``, or of its key, of a group's second step until
    :meth:`let_go`."""

    def __init__(self, transport: Transport, name: str) -> None:
        super().__init__(transport)
        self._name = name
        self._manifests: dict[int, Manifest] = {}
        self._completions: dict[CommTask, Completion] = {}
        self._held: list[CommTask] | None = []
        self._lock = threading.Lock()

    def add_group(self, group: int, manifest: Manifest) -> None:
        self._manifests[group] = manifest
        super().add_group(group, manifest)

    def start(self, task: CommTask, completion: Completion) -> None:
        self._completions[task] = completion
        super().start(task, self)

    def on_sent(self, task: CommTask) -> None:
        self._completions[task].on_sent(task)

    def on_done(self, task: CommTask) -> None:
        names = [self._manifests[task.group].tensors[tensor].name for tensor in task.partition.tensors]
        with self._lock:
            if self._held is not None and any(self._name in name for name in names) and task.step == 1:
                self._held.append(task)
                return
        self._completions[task].on_done(task)

    def let_go(self) -> bool:
        """Whether it was kept back until now, or would have been."""
        with self._lock:
            held, self._held = self._held, None
        for task in held or ():
            self._completions[task].on_done(task)
        return held is not None


def scheduled_trainer(net: Any, session: Session) -> gluon.Trainer:
    return ScheduledTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, session=session)


def trainer_over_store(net: Any, session: Session) -> gluon.Trainer:
    """Gradients are added up, and not averaged."""
    optimizer = mx.optimizer.SGD(learning_rate=0.1, rescale_grad=0.5)
    return gluon.Trainer(net.collect_params(), optimizer, kvstore=ScheduledStore(session))


def forward_frees_the_last_average(
    hybridize: bool,
    after_step: Callable[[Any], object],
    patience_seconds: float,
    make_trainer: Callable[[Any, Session], gluon.Trainer] = scheduled_trainer,
    held: int = 2,
) -> list[bool]:
    """The average of the last layer's weight of the step ``held`` (which is the second of a group) is held until the next
    forward has run its first layer, or for ``patience_seconds``. Whether, on each rank, forward was first."""
    transports: dict[int, Holding] = {}

    def hold(transport: Transport) -> Transport:
        transports[transport.rank] = Holding(transport, LAST)
        return transports[transport.rank]

    def run(session: Session) -> bool:
        transport = transports[session.rank]
        forwards = itertools.count(1)
        freed: list[bool] = []

        def on_forward() -> None:
            if next(forwards) == held + 1:
                freed.append(transport.let_go())

        net = probed(0, [Probe(on_forward), Probe(), Probe()], hybridize)
        trainer = make_trainer(net, session)
        impatient = threading.Timer(patience_seconds, transport.let_go)
        for number, (inputs, labels) in enumerate(batches(2, steps=4), 1):
            step(net, trainer, inputs[share(session)], labels[share(session)])
            if number == held:
                impatient.start()
                after_step(net)
        by_rank[session.rank] = weights_of(net)
        impatient.cancel()
        impatient.join()
        return freed == [True]

    by_rank: dict[int, Any] = {}
    freed = on_ranks(run, config=EACH_TENSOR_ALONE, wrap_transport=hold)
    alone = mlp(0)
    plain = gluon.Trainer(alone.collect_params(), "sgd", {"learning_rate": 0.1})
    for inputs, labels in batches(2, steps=4):
        step(alone, plain, inputs, labels)
    require_equal([by_rank[0], by_rank[1]], weights_of(alone))
    return freed


@pytest.mark.parametrize("hybridize", [False, True])
def test_forward_begins_before_all_averages_are_in(hybridize: bool) -> None:
    assert forward_frees_the_last_average(hybridize, lambda net: None, patience_seconds=60) == [True, True]


def test_forward_begins_before_all_sums_of_a_kvstore_are_in() -> None:
    """Its first step is no group's."""
    freed = forward_frees_the_last_average(False, lambda net: None, 60, make_trainer=trainer_over_store, held=3)
    assert freed == [True, True]


def test_that_test_can_fail() -> None:
    """With a barrier after step() forward finds nothing to free."""
    assert forward_frees_the_last_average(False, weights_of, patience_seconds=0.5) == [False, False]


class HandedOver:
    """The layers of what one rank has handed over in its second round, in that order."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self._changed = threading.Condition()

    def add(self, name: str) -> None:
        with self._changed:
            self.layers.append(int(name[len("net_dense")]))
            self._changed.notify_all()

    def wait_for(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.layers) >= count, 60)


def test_the_last_layer_is_handed_over_while_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward of each layer waits until the gradients of those behind it have been handed over."""
    begin = QueuedGroup._begin
    by_rank = [HandedOver(), HandedOver()]

    def begin_and_note(self: QueuedGroup, tensor: int, operation: Operation) -> None:
        second = self.round == 2  # and no other while this operation is not completed
        begin(self, tensor, operation)
        if second:
            by_rank[self.session.rank].add(self.places[tensor].name)

    def run(session: Session) -> list[bool]:
        in_time: list[bool] = []

        def behind_layer(layer: int) -> None:
            if second:
                in_time.append(by_rank[session.rank].wait_for(2 * (2 - layer)))

        net = probed(session.rank, [Probe(on_backward=partial(behind_layer, layer)) for layer in range(3)])
        trainer = ScheduledTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, session=session)
        second = False  # which the probes read
        for inputs, labels in batches(2, steps=2):
            step(net, trainer, inputs[share(session)], labels[share(session)])
            weights_of(net)  # what was queued is over
            second = True
        assert by_rank[session.rank].wait_for(6)
        return in_time

    monkeypatch.setattr(QueuedGroup, "_begin", begin_and_note)
    assert on_ranks(run, config=EACH_TENSOR_ALONE) == [[True] * 3] * 2
    assert [each.layers for each in by_rank] == [[2, 2, 1, 1, 0, 0]] * 2


def test_what_backward_produces_last_is_used_first() -> None:
    assert forward_order([(0.0, 2), (0.01, 0), (0.02, 1)]) == [1, 0, 2]


def test_what_comes_together_keeps_its_order() -> None:
    assert forward_order([(0.0, 3), (0.0001, 2), (0.01, 1), (0.0101, 0)]) == [0, 1, 2, 3]
    assert forward_order([]) == []


def test_the_first_backward_shows_the_order_of_layers_that_are_defined_in_another() -> None:
    """Each layer's backward takes long enough to be told from the next."""

    class Backwards(gluon.Block):
        def __init__(self) -> None:
            super().__init__(prefix="net_")
            with self.name_scope():
                self.last = gluon.nn.Dense(CLASSES, in_units=9, dtype="float64")
                self.middle = gluon.nn.Dense(9, in_units=12, dtype="float64")
                self.first = gluon.nn.Dense(12, in_units=FEATURES, dtype="float64")
                self.before = Probe(on_backward=lambda: pause.wait(0.1))
                self.behind = Probe(on_backward=lambda: pause.wait(0.1))

        def forward(self, x: nd.NDArray) -> nd.NDArray:
            return self.last(self.behind(self.middle(self.before(self.first(x)))))

    def run(session: Session) -> list[int]:
        net = Backwards()
        net.initialize()
        manifests: list[Manifest] = []
        session.on_register(lambda _, manifest: manifests.append(manifest))
        trainer = ScheduledTrainer(net.collect_params(), "sgd", session=session)
        (inputs, labels), *_ = batches(2)
        step(net, trainer, inputs[share(session)], labels[share(session)])
        tensors = max((manifest.tensors for manifest in manifests), key=len)
        return [int(spec.name[len("net_dense")]) for spec in tensors]

    pause = threading.Event()
    assert on_ranks(run) == [[2, 2, 1, 1, 0, 0]] * 2


def test_the_probes_change_nothing() -> None:
    def make_trainer(net: Any) -> gluon.Trainer:
        return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})

    nothing: Call = lambda: None  # noqa: E731
    probes = [Probe(nothing, nothing) for _ in range(3)]
    require_equal([train_alone(lambda: probed(0, probes), make_trainer, 2)], train_alone(mlp, make_trainer, 2), 0.0)
