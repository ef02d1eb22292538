"""TensorFlow: through commsched's plugin, with its own synchronous ``MultiWorkerMirroredStrategy``, and with its own
asynchronous ``ParameterServerStrategy``.

The model of all three is the network of ``emulated.py`` as a Keras model. Its layers sleep in an operation of TensorFlow's own,
which needs no Python, so that other processes can run them.

``ParameterServerStrategy`` is asynchronous, so that it trains to other weights than the other systems. A worker and a parameter
server run on each rank's host, in processes of their own. Variables are spread over the servers. The coordinator is rank 0's
own process; it schedules work on the workers and transfers no tensor of the model. A worker fetches weights, computes, and has
its gradients applied, without waiting for any other worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commsched.plugins.tensorflow import ScheduledOptimizer

from .emulated import INITIAL, LEARNING_RATE, MOMENTUM, PHASE, Array, EmulatedLayer, batch_number, coefficients, make_layers
from .turn import Train, Turn, free_addresses


def make_model(layers: Sequence[EmulatedLayer]) -> Any:
    number = keras.Input(batch_shape=(), dtype="float32")
    output = number
    for layer in layers:
        output = _Layer(layer)(output)
    return keras.Model(number, output)


def make_optimizer() -> Any:
    return keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)


class _Layer(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """A layer of ``emulated.py`` as a Keras layer."""

    def __init__(self, layer: EmulatedLayer) -> None:
        super().__init__(dtype="float32")
        self._layer = layer

    def build(self, _: Any) -> None:
        self.own = [
            self.add_weight(shape=pattern.shape, initializer=partial(_initial, pattern), name=f"w{place}")
            for place, pattern in enumerate(self._layer.patterns)
        ]

    def call(self, number: tf.Tensor) -> tf.Tensor:
        return _run(self._layer, number, [tf.convert_to_tensor(variable) for variable in self.own])


def _initial(pattern: Array, *_: Any, **__: Any) -> tf.Tensor:
    return tf.constant(INITIAL * pattern)


def _run(layer: EmulatedLayer, number: tf.Tensor, weights: Sequence[tf.Tensor]) -> tf.Tensor:
    gain = tf.constant(1.0)
    if weights:
        found = [tf.reshape(weight, [-1])[0] / first - INITIAL for weight, first in zip(weights, layer.firsts)]
        gain = tf.exp(layer.feedback * tf.sin(PHASE * tf.add_n(found) / len(found)))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def emulated(number: tf.Tensor, *weights: tf.Tensor) -> Any:
        result = _slept(number * gain, layer.forward_seconds)

        def backward(upstream: tf.Tensor) -> list[tf.Tensor]:
            with tf.control_dependencies([result]):  # the last layer's upstream is a constant
                upstream = _slept(upstream, layer.backward_seconds)
            return [upstream * gain, *(upstream * number * tf.constant(pattern) for pattern in layer.patterns)]

        return result, backward

    return emulated(number, *weights)


def _slept(number: tf.Tensor, seconds: float) -> tf.Tensor:
    """Return ``number`` after ``seconds`` during which no Python thread is needed. The number passes through a data set that
    sleeps."""
    of_one = {"output_types": [number.dtype], "output_shapes": [number.shape]}
    source = tf.raw_ops.TensorDataset(components=[number], output_shapes=[number.shape])
    slow = tf.raw_ops.SleepDataset(input_dataset=source, sleep_microseconds=round(1e6 * seconds), **of_one)
    once = tf.raw_ops.TakeDataset(input_dataset=slow, count=1, **of_one)  # asking for a second element would sleep again
    return tf.raw_ops.DatasetToSingleElement(dataset=once, **of_one)[0]


_SERVE = """
import json, sys
import tensorflow as tf
cluster, job, index = json.loads(sys.argv[1])
server = tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc")
print("serves", flush=True)
server.join()
"""


def by_parameter_server_strategy(turn: Turn) -> None:
    """Train. A step is over when as many batches are trained as there are workers, by any workers."""
    session = turn.session
    cluster = {job: free_addresses(turn) for job in ("chief", "worker", "ps")}
    cluster["chief"] = cluster["chief"][:1]
    with _servers(turn, cluster):
        batches = _scheduled(turn, cluster) if session.rank == 0 else None
        for _ in range(turn.count):
            if batches is not None:
                for _ in range(session.world_size):
                    next(batches).fetch()
            session.gather(None)
            turn.steps.over()


def _scheduled(turn: Turn, cluster: dict[str, list[str]]) -> Iterator[Any]:
    """The result of each batch. All batches are scheduled at once; each runs on the next free worker."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = make_model(make_layers(turn.profile))
        optimizer = make_optimizer()
        optimizer.build(model.trainable_variables)

    def on_worker(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model(batch)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: tf.Tensor) -> Any:
        return strategy.run(on_worker, args=(batch,))

    numbers = [batch_number(index, rank) for index in range(turn.count) for rank in range(turn.session.world_size)]
    return iter([coordinator.schedule(step, args=(tf.constant(number, tf.float32),)) for number in numbers])


@contextmanager
def _servers(turn: Turn, cluster: dict[str, list[str]]) -> Iterator[None]:
    """Run a worker and a parameter server beside each rank. In the block all of them are serving; otherwise the coordinator
    would wait for them with Python's lock held."""
    given = [json.dumps([cluster, job, turn.session.rank]) for job in ("worker", "ps")]
    processes = [subprocess.Popen([sys.executable, "-c", _SERVE, each], stdout=subprocess.PIPE) for each in given]
    turn.steps.servers += [process.pid for process in processes]
    try:
        for process in processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("a server of ParameterServerStrategy ended before it served; see above")
        turn.session.gather("all serve")
        yield
        turn.session.gather("all have trained")
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def through_commsched(turn: Turn) -> Sequence[float]:
    layers = make_layers(turn.profile)
    model = make_model(layers)
    optimizer = ScheduledOptimizer(make_optimizer(), model, session=turn.session)

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model(batch)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    _train(turn, step)
    return coefficients(layers, model.get_weights())


def by_multi_worker_mirrored_strategy(turn: Turn) -> Sequence[float]:
    session, layers = turn.session, make_layers(turn.profile)
    workers = free_addresses(turn)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": session.rank}})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model(layers)
        optimizer = make_optimizer()
        optimizer.build(model.trainable_variables)

    def on_worker(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model(batch)
            share = loss / session.world_size  # Keras's optimizer sums the workers' gradients
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(share, variables), variables)
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: tf.Tensor) -> Any:
        return strategy.run(on_worker, args=(batch,))

    _train(turn, step)
    found = coefficients(layers, model.get_weights())
    session.gather("all have trained")  # before any of their servers ends
    return found


def _train(turn: Turn, step: Callable[[tf.Tensor], Any]) -> None:
    for index in range(turn.count):
        np.asarray(step(tf.constant(batch_number(index, turn.session.rank), tf.float32)))
        turn.steps.over()


SYSTEMS: Mapping[str, Train] = {
    "commsched": through_commsched,
    "multi_worker_mirrored": by_multi_worker_mirrored_strategy,
    "parameter_server": by_parameter_server_strategy,
}
