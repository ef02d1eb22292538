"""MXNet: through commsched's plugin, and with its own parameter server (kvstore ``dist_sync``, a server beside each worker).

EMULATED layers: custom operators, which MXNet runs in threads of their own, sleep for the layer's time. Their gradients are
real float32 arrays: a pattern times a number that depends on the weights which forward read, so that a stale one changes
all that follows (as ``workloads/emulated.py``, in MXNet).
"""

from __future__ import annotations

import gc
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

import commsched.plugins.mxnet as cs
from commsched.simulator.profile import Layer, Profile

from .turn import Train, Trained, Turn

_INITIAL_SCALE = 0.1
#: All layers together change what passes through them by at most a factor of exp(+-_FEEDBACK): nothing runs away.
_FEEDBACK = 1.5
#: Radians of a gain's phase for each unit that weights have moved along their patterns: a single step counts.
_PHASE = 64.0
#: Two layers in three push one way and one the other, so that they do not make up for one another.
_SIGNS = (1, 1, -1)
_SGD = ("sgd", {"learning_rate": 0.05, "momentum": 0.9})
_SERVERS_END_WITHIN_SECONDS = 20.0


def through_commsched(turn: Turn) -> Trained:
    net = _Chain(turn.profile)
    return _train(turn, net, cs.ScheduledTrainer(net.collect_params(), *_SGD, session=turn.session), batch_size=1)


def by_dist_sync(turn: Turn) -> Trained:
    """Updates are made by the servers, as by default. The kvstore adds gradients up."""
    with _servers(turn):
        net = _Chain(turn.profile)
        trainer = gluon.Trainer(net.collect_params(), *_SGD, kvstore="dist_sync")
        trained = _train(turn, net, trainer, batch_size=turn.session.world_size)
        turn.session.gather(None)  # whoever leaves first ends the servers
        del trainer, net
        gc.collect()  # with the kvstore, which takes leave of its servers
    return trained


SYSTEMS: Mapping[str, Train] = {"commsched": through_commsched, "dist_sync": by_dist_sync}


def _train(turn: Turn, net: _Chain, trainer: gluon.Trainer, batch_size: int) -> Trained:
    ended = []
    for step in range(turn.steps):
        with autograd.record():
            loss = net(_batch(step, turn.session.rank))
        loss.backward()
        trainer.step(batch_size)
        loss.wait_to_read()
        ended.append(time.monotonic())
    return Trained(ended, net.means())


@contextmanager
def _servers(turn: Turn) -> Iterator[None]:
    """MXNet's scheduler beside rank 0 and a server beside each rank; the environment makes this process a worker."""
    session = turn.session
    port = session.gather(_free_port(turn.hosts[session.rank]))[0]
    job = {
        "DMLC_PS_ROOT_URI": turn.hosts[0],
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(session.world_size),
        "DMLC_NUM_SERVER": str(session.world_size),
        "DMLC_NODE_HOST": turn.hosts[session.rank],
    }
    roles = ["scheduler", "server"] if session.rank == 0 else ["server"]
    command = [sys.executable, "-W", "ignore", "-c", "import mxnet"]  # which then is what DMLC_ROLE says
    processes = [subprocess.Popen(command, env={**os.environ, **job, "DMLC_ROLE": role}) for role in roles]
    os.environ.update(job, DMLC_ROLE="worker")
    try:
        yield
        for process in processes:
            process.wait(_SERVERS_END_WITHIN_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _batch(step: int, rank: int) -> nd.NDArray:
    """The number that stands for a rank's batch; it changes sign over steps, so that weights stay bounded."""
    return nd.array([(1 + 0.5 * math.cos(2.9 * rank + 0.3 * step)) * math.cos(1.7 * step)])


class _Chain(gluon.Block):  # type: ignore[misc]
    """The profile's layers. A number goes in, and the loss comes out."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(prefix="emulated_")
        self._layers: list[tuple[str, list[gluon.Parameter]]] = []
        for index, layer in enumerate(profile.layers):
            patterns = [_pattern(shape, 13 * index + place) for place, shape in enumerate(layer.shapes)]
            feedback = _SIGNS[index % len(_SIGNS)] * _FEEDBACK / len(profile.layers)
            weights = []
            for place, pattern in enumerate(patterns):
                weight = self.params.get(f"{index:04}_{place}", shape=pattern.shape)
                weight.initialize(mx.init.Zero())
                weight.set_data(_INITIAL_SCALE * pattern)
                weights.append(weight)
            _emulated[f"{index}"] = (layer, patterns, feedback)
            self._layers.append((f"{index}", weights))

    def forward(self, number: nd.NDArray) -> nd.NDArray:
        for key, weights in self._layers:
            arguments = [weight.data() for weight in weights]
            number = nd.Custom(number, *arguments, op_type="commsched_emulated", key=key, weights=len(weights))
        return number

    def means(self) -> list[float]:
        return [
            float(np.mean([weight.data().asnumpy().mean(dtype=np.float64) for weight in weights]))
            for _, weights in self._layers
            if weights
        ]


def _pattern(shape: Sequence[int], seed: int) -> nd.NDArray:
    """Fixed numbers in [0.5, 1.5]."""
    places = np.arange(math.prod(shape), dtype=np.uint32) + np.uint32(997 * seed + 1)
    return nd.array(((places * np.uint32(2654435761)) >> 20).astype(np.float32).reshape(shape) / 4096 + 0.5)


#: Layers, patterns of their gradients and feedback, by the key that MXNet gives to their operators.
_emulated: dict[str, tuple[Layer, list[nd.NDArray], float]] = {}


class _Emulated(mx.operator.CustomOp):  # type: ignore[misc]
    """Multiplies the number by one near 1 that depends on the weights; each gradient is its pattern times both numbers, that
    which came in and that which flows back. Results are made first, and handed out when the layer's time is over."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._layer, self._patterns, self._feedback = _emulated[key]

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        ends = time.monotonic() + self._layer.forward_seconds
        out_data[0][:] = in_data[0] * self._gain(in_data[1:])
        out_data[0].wait_to_read()
        _sleep_until(ends)

    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        ends = time.monotonic() + self._layer.backward_seconds
        upstream = float(out_grad[0].asscalar())
        scale = upstream * float(in_data[0].asscalar())
        in_grad[0][:] = upstream * self._gain(in_data[1:])
        for gradient, pattern in zip(in_grad[1:], self._patterns):
            nd.elemwise_mul(pattern, nd.full(pattern.shape, scale), out=gradient)
        for gradient in in_grad:
            gradient.wait_to_read()
        _sleep_until(ends)

    def _gain(self, weights: Sequence[nd.NDArray]) -> float:
        """How far the first element of each weight has moved along its pattern, on the mean."""
        if not weights:
            return 1.0
        moved = [_first(weight) / _first(pattern) - _INITIAL_SCALE for weight, pattern in zip(weights, self._patterns)]
        return math.exp(self._feedback * math.sin(_PHASE * sum(moved) / len(moved)))


def _first(array: nd.NDArray) -> float:
    return float(array.reshape((-1,))[0:1].asscalar())


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


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

    def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> _Emulated:
        return _Emulated(self._key)
