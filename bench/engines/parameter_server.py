"""TensorFlow's ``ParameterServerStrategy``. It is asynchronous, so that it trains to other weights than the other systems.

A worker and a parameter server run on each rank's host, in processes of their own. Variables are spread over the servers. The
coordinator is rank 0's own process; it schedules work on the workers and transfers no tensor of the model. A worker fetches
weights, computes, and has its gradients applied, without waiting for any other worker.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from .emulated import batch_number, make_layers
from .tensorflow_model import make_model, make_optimizer
from .turn import Turn, free_addresses

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
