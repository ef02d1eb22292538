"""When gradients are handed over, and when the next forward begins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from commsched import SchedulerConfig, Session
from commsched.core.interfaces import Completion, ForwardingTransport, Observer, Transport
from commsched.core.manifest import Manifest
from commsched.core.task import CommTask
from commsched.plugins.tensorflow import ScheduledOptimizer
from commsched.plugins.tensorflow.gate import Gate

from .training import made, numbers, on_ranks, share, step_of, train

EACH_ALONE = SchedulerConfig(partition_bytes=1 << 20, fusion_bytes=0)


class Holding(ForwardingTransport):
    """A transport that holds back averages of the tensors whose names end in ``suffix``, in every step, until :meth:`let_go` is
    called once for each step."""

    def __init__(self, transport: Transport, suffix: str) -> None:
        super().__init__(transport)
        self._suffix = suffix
        self._tensors: dict[int, set[int]] = {}  # by group
        self._held: list[tuple[CommTask, Completion]] = []
        self._passes = 0
        self.count = 0  # of averages that were held
        self._lock = threading.Lock()

    def add_group(self, group: int, manifest: Manifest) -> None:
        self._tensors[group] = {index for index, spec in enumerate(manifest.tensors) if spec.name.endswith(self._suffix)}
        super().add_group(group, manifest)

    def start(self, task: CommTask, completion: Completion) -> None:
        super().start(task, _Held(self, completion) if self._tensors[task.group] & set(task.partition.tensors) else completion)

    def hold(self, task: CommTask, completion: Completion) -> None:
        with self._lock:
            self._held.append((task, completion))
            self.count += 1
        self._give()

    def let_go(self) -> None:
        with self._lock:
            self._passes += 1
        self._give()

    def _give(self) -> None:
        with self._lock:
            give = self._held[: self._passes]
            del self._held[: self._passes]
            self._passes -= len(give)
        for task, completion in give:
            completion.on_done(task)


class _Held:
    def __init__(self, holding: Holding, completion: Completion) -> None:
        self._holding, self._completion = holding, completion

    def on_sent(self, task: CommTask) -> None:
        self._completion.on_sent(task)

    def on_done(self, task: CommTask) -> None:
        self._holding.hold(task, self._completion)


class Probe(layers.Layer):
    """Calls ``forward`` when its input has been computed, and ``backward`` before the gradient of its input is."""

    def __init__(self, forward: Callable[[], None] = lambda: None, backward: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._calls = forward, backward

    def call(self, inputs: Any) -> Any:
        forward, backward = self._calls

        def seen(array: Any, call: Callable[[], None]) -> Any:
            call()
            return array

        @tf.custom_gradient
        def probe(tensor: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                return _on_host(lambda array: seen(array, backward), upstream)

            return _on_host(lambda array: seen(array, forward), tensor), gradient

        return probe(inputs)


def _on_host(function: Callable[[Any], Any], tensor: Any) -> Any:
    return tf.ensure_shape(tf.numpy_function(function, [tensor], tensor.dtype), tensor.shape)


def network(probe: Probe) -> Any:
    first, last = layers.Dense(5, name="first", use_bias=False), layers.Dense(3, name="last", use_bias=False)
    return keras.Sequential([keras.Input((6,)), first, probe, last])


def train_holding_the_last_average(
    way: str, steps: int, prepare: Callable[[Session], None] = lambda session: None
) -> list[list[Any]]:
    """Each rank's weights. The average of the last layer is held back until the next forward has run the first layer: this ends
    only if that does not wait for it. Each rank calls ``prepare`` first."""
    inputs, targets = numbers(steps)
    transports: dict[int, Holding] = {}

    def hold(transport: Transport) -> Transport:
        transports[transport.rank] = Holding(transport, "last/kernel")
        return transports[transport.rank]  # type: ignore[return-value]

    seen = [0, 0]

    def forward(rank: int) -> None:
        seen[rank] += 1
        if seen[rank] > 1:
            transports[rank].let_go()  # of the step before

    probes = [Probe(lambda rank=rank: forward(rank)) for rank in range(2)]  # type: ignore[misc]
    models = [made(lambda probe=probe: network(probe), 0) for probe in probes]  # type: ignore[misc]

    def body(session: Session) -> list[Any]:
        prepare(session)
        model = models[session.rank]
        seen[session.rank] = 0
        optimizer = ScheduledOptimizer(keras.optimizers.SGD(0.1), model, session=session)
        mine = share(session, inputs, targets)
        if way == "fit":
            model.compile(optimizer, loss="mse")
            model.fit(tf.data.Dataset.from_tensor_slices(tuple(mine)), shuffle=False, verbose=0)
        else:
            step = step_of(model, optimizer, way == "graph")
            for batch, target in zip(*mine):
                step(batch, target)
        transports[session.rank].let_go()  # of the last step, which no forward follows
        return [weights.copy() for weights in model.get_weights()]

    by_rank = on_ranks(body, wrap=hold, config=EACH_ALONE)
    assert [transport.count for transport in transports.values()] == [steps, steps]
    return by_rank


@pytest.mark.parametrize("way", ["graph", "fit", "eager"])
def test_the_next_forward_begins_before_all_averages_are_there(way: str) -> None:
    steps = 4
    by_rank = train_holding_the_last_average(way, steps)
    expected = train(made(lambda: network(Probe()), 0), keras.optimizers.SGD(0.1), *numbers(steps), "eager")
    for ours, plain in zip(by_rank[0], expected):
        assert abs(ours - plain).max() < 1e-12


def test_without_gates_the_held_average_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above shows something: a forward that does not wait reads what is not there yet."""
    monkeypatch.setattr(Gate, "settle", lambda self: None)
    with pytest.raises(AssertionError):
        test_the_next_forward_begins_before_all_averages_are_there("graph")


def test_gradients_are_handed_over_while_backward_runs() -> None:
    """Backward of the first layer does not begin, on rank 0, before the gradient of the last has been handed over."""
    handed_over = threading.Event()
    inputs, targets = numbers(2)
    order: list[int] = []

    class Seen(Observer):
        def on_ready(self, group: int, tensor: int, at: float) -> None:
            if group == gradients[0]:
                order.append(tensor)
                if tensor == 1:
                    handed_over.set()

    gradients: list[int] = []

    def backward() -> None:
        assert handed_over.wait(60), "the last layer's gradient was not handed over while backward ran"
        handed_over.clear()

    models = [made(lambda probe=probe: network(probe), 0) for probe in (Probe(backward=backward), Probe())]  # type: ignore[misc]

    def body(session: Session) -> None:
        model = models[session.rank]
        optimizer = ScheduledOptimizer(keras.optimizers.SGD(0.1), model, session=session)
        if session.rank == 0:
            session.on_register(
                lambda group, manifest: gradients.extend([group] * any("kernel" in spec.name for spec in manifest.tensors))
            )
            session.observe(Seen())
        train(model, optimizer, *share(session, inputs, targets), "graph")

    on_ranks(body, config=EACH_ALONE)
    assert order == [1, 0] * len(inputs)  # last layer first; tensor 0 is what the first layer needs


def test_places_are_in_the_order_of_the_forward() -> None:
    """Measured, whatever the order in which layers were made."""

    class Backwards(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.last = layers.Dense(3)
            self.first = layers.Dense(5)

        def build(self, shape: Any) -> None:
            self.last.build((None, 5))
            self.first.build((None, 6))
            self.built = True

        def call(self, inputs: Any) -> Any:
            return self.last(self.first(inputs))

    models = [Backwards() for _ in range(2)]
    for model in models:
        model.build((None, 6))
    shapes: list[list[tuple[int, ...]]] = []
    inputs, targets = numbers(1)

    def body(session: Session) -> None:
        optimizer = ScheduledOptimizer(keras.optimizers.SGD(0.1), models[session.rank], session=session)
        session.on_register(lambda _, manifest: shapes.append([spec.shape for spec in manifest.tensors]))
        train(models[session.rank], optimizer, *share(session, inputs, targets), "graph")

    on_ranks(body)
    assert shapes[0] == [(6, 5), (5,), (5, 3), (3,)]
