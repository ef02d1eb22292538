"""MXNet: through commsched's plugin, and with its own parameter server (kvstore ``dist_sync``, a server beside each worker).

The layers of ``emulated.py`` are custom operators. MXNet runs them in threads of their own, where they sleep for the layer's
time.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon, nd

import commsched.plugins.mxnet as cs

from .emulated import (
    INITIAL,
    LEARNING_RATE,
    MOMENTUM,
    EmulatedLayer,
    batch_number,
    coefficients,
    gain,
    make_layers,
    sleep_until,
)
from .turn import Train, Turn, free_addresses

_SGD = ("sgd", {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM})
_SERVERS_END_WITHIN_SECONDS = 20.0


def through_commsched(turn: Turn) -> Sequence[float]:
    net = _Chain(make_layers(turn.profile))
    return _train(turn, net, cs.ScheduledTrainer(net.collect_params(), *_SGD, session=turn.session), batch_size=1)


def by_dist_sync(turn: Turn) -> Sequence[float]:
    """Train with the kvstore. It sums gradients, and the servers make the updates, which is the default."""
    with _servers(turn):
        net = _Chain(make_layers(turn.profile))
        trainer = gluon.Trainer(net.collect_params(), *_SGD, kvstore="dist_sync")
        trained = _train(turn, net, trainer, batch_size=turn.session.world_size)
        turn.session.gather(None)  # the first rank that leaves ends the servers
        del trainer, net
        gc.collect()  # collects the kvstore, which then disconnects from its servers
    return trained


SYSTEMS: Mapping[str, Train] = {"commsched": through_commsched, "dist_sync": by_dist_sync}


def _train(turn: Turn, net: _Chain, trainer: gluon.Trainer, batch_size: int) -> Sequence[float]:
    for step in range(turn.count):
        with autograd.record():
            loss = net(nd.array([batch_number(step, turn.session.rank)]))
        loss.backward()
        trainer.step(batch_size)
        loss.wait_to_read()
        turn.steps.over()
    return net.coefficients()


@contextmanager
def _servers(turn: Turn) -> Iterator[None]:
    """MXNet's scheduler beside rank 0 and a server beside each rank; the environment makes this process a worker."""
    session = turn.session
    host, port = free_addresses(turn)[0].split(":")
    job = {
        "DMLC_PS_ROOT_URI": host,
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NUM_WORKER": str(session.world_size),
        "DMLC_NUM_SERVER": str(session.world_size),
        "DMLC_NODE_HOST": turn.hosts[session.rank],
    }
    roles = ["scheduler", "server"] if session.rank == 0 else ["server"]
    command = [sys.executable, "-W", "ignore", "-c", "import mxnet"]  # its role is that of DMLC_ROLE
    processes = [subprocess.Popen(command, env={**os.environ, **job, "DMLC_ROLE": role}) for role in roles]
    os.environ.update(job, DMLC_ROLE="worker")
    turn.steps.servers += [process.pid for process in processes]
    try:
        yield
        for process in processes:
            process.wait(_SERVERS_END_WITHIN_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()


class _Chain(gluon.Block):  # type: ignore[misc]
    """The network: its input is a number, its output the loss."""

    def __init__(self, layers: Sequence[EmulatedLayer]) -> None:
        super().__init__(prefix="emulated_")
        self._layers = layers
        self._weights: list[list[gluon.Parameter]] = []  # by layer
        for index, layer in enumerate(layers):
            _emulated[f"{index}"] = layer, [nd.array(pattern) for pattern in layer.patterns]
            self._weights.append([])
            for place, pattern in enumerate(layer.patterns):
                weight = self.params.get(f"{index:04}_{place}", shape=pattern.shape)
                weight.initialize(mx.init.Zero())
                weight.set_data(nd.array(INITIAL * pattern))
                self._weights[-1].append(weight)

    def forward(self, number: nd.NDArray) -> nd.NDArray:
        for index, weights in enumerate(self._weights):
            arguments = [weight.data() for weight in weights]
            number = nd.Custom(number, *arguments, op_type="commsched_emulated", key=f"{index}", weights=len(weights))
        return number

    def coefficients(self) -> list[float]:
        return coefficients(self._layers, [weight.data().asnumpy() for weights in self._weights for weight in weights])


#: Layers, and their patterns as MXNet's arrays, by the key that MXNet gives to their operators.
_emulated: dict[str, tuple[EmulatedLayer, list[nd.NDArray]]] = {}


class _Operator(mx.operator.CustomOp):  # type: ignore[misc]
    """The operator of a layer. Results are computed first and returned when the layer's time is over."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._layer, self._patterns = _emulated[key]

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        ends = time.monotonic() + self._layer.forward_seconds
        out_data[0][:] = in_data[0] * self._gain(in_data[1:])
        out_data[0].wait_to_read()
        sleep_until(ends)

    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        ends = time.monotonic() + self._layer.backward_seconds
        upstream = float(out_grad[0].asscalar())
        scale = upstream * float(in_data[0].asscalar())
        in_grad[0][:] = upstream * self._gain(in_data[1:])
        for gradient, pattern in zip(in_grad[1:], self._patterns):
            nd.elemwise_mul(pattern, nd.full(pattern.shape, scale), out=gradient)
        for gradient in in_grad:
            gradient.wait_to_read()
        sleep_until(ends)

    def _gain(self, weights: Sequence[nd.NDArray]) -> float:
        if not weights:
            return 1.0
        found = [float(weight.reshape((-1,))[0:1].asscalar()) / first for weight, first in zip(weights, self._layer.firsts)]
        return gain(self._layer.feedback, sum(found) / len(found))


@mx.operator.register("commsched_emulated")
class _Properties(mx.operator.CustomOpProp):  # type: ignore[misc]
    def __init__(self, key: str, weights: str) -> None:
        super().__init__(need_top_grad=True)
        self._key = key
        self._weights = int(weights)

    def list_arguments(self) -> list[str]:
        return ["number", *(f"weight{place}" for place in range(self._weights))]

    def infer_shape(self, in_shape: Any) -> tuple[Any, Any, Any]:
        return in_shape, [in_shape[0]], []

    def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> _Operator:
        return _Operator(self._key)
