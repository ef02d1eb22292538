"""JAX: through commsched's plugin, and with ``jax.lax.pmean`` over the processes of ``jax.distributed``, by gloo.

EMULATED layers: a callback sleeps for the layer's time, and what comes after it in the program depends on it. Their gradients
are real float32 arrays, made as fast as memory allows: a pattern times a number that depends on the weights which forward read,
so that a stale one changes all that follows (as ``workloads/emulated.py``, in JAX).
"""

from __future__ import annotations

import ctypes
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec

import commsched.plugins.jax as cs
from commsched.simulator.profile import Layer, Profile

from .turn import Train, Trained, Turn

_INITIAL_SCALE = 0.1
#: All layers together change what passes through them by at most a factor of exp(+-_FEEDBACK): nothing runs away.
_FEEDBACK = 1.5
#: Radians of a gain's phase for each unit that weights have moved along their patterns: a single step counts.
_PHASE = 64.0
#: Two layers in three push one way and one the other, so that they do not make up for one another.
_SIGNS = (1, 1, -1)
_CLONE_NEWUTS = 0x04000000  # of Linux's sched.h

Params = list[list[jax.Array]]  # by layer and place


def through_commsched(turn: Turn) -> Trained:
    state = cs.create(_params(turn.profile), _optimizer(), session=turn.session)
    step = jax.jit(cs.value_and_update(partial(_loss, turn.profile)), donate_argnums=0)
    ended = []
    for index in range(turn.steps):
        loss, state = step(state, _batch(index, turn.session.rank))
        loss.block_until_ready()
        ended.append(time.monotonic())
    return Trained(ended, _means(state.params))


def by_pmean(turn: Turn) -> Trained:
    """What JAX has for several processes: one program on all their devices, with a ``pmean`` of the gradients within."""
    session, tx = turn.session, _optimizer()
    _be_found_at(turn.hosts[session.rank])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{turn.hosts[0]}:{session.gather(_free_port(turn.hosts[session.rank]))[0]}"
    jax.distributed.initialize(address, session.world_size, session.rank, local_device_ids=[0])
    try:
        mesh = jax.make_mesh((session.world_size,), ("ranks",), axis_types=(jax.sharding.AxisType.Auto,))
        everywhere, each = PartitionSpec(), PartitionSpec("ranks")

        def step(params: Params, opt_state: Any, batch: jax.Array) -> tuple[jax.Array, Params, Any]:
            loss, gradients = jax.value_and_grad(partial(_loss, turn.profile))(params, batch[0])
            updates, opt_state = tx.update(jax.lax.pmean(gradients, "ranks"), opt_state, params)
            return loss[None], optax.apply_updates(params, updates), opt_state

        specs = {"in_specs": (everywhere, everywhere, each), "out_specs": (each, everywhere, everywhere)}
        program = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs), donate_argnums=(0, 1))
        params = jax.device_put(_params(turn.profile), jax.NamedSharding(mesh, everywhere))
        opt_state = jax.jit(tx.init)(params)
        shards = jax.NamedSharding(mesh, each)
        ended = []
        for index in range(turn.steps):
            batch = jax.make_array_from_process_local_data(shards, np.array([_batch(index, session.rank)]))
            loss, params, opt_state = program(params, opt_state, batch)
            loss.block_until_ready()
            ended.append(time.monotonic())
        means = _means([[leaf.addressable_data(0) for leaf in layer] for layer in params])
    finally:
        jax.distributed.shutdown()
    return Trained(ended, means)


SYSTEMS: Mapping[str, Train] = {"commsched": through_commsched, "pmean": by_pmean}


def _optimizer() -> optax.GradientTransformation:
    return optax.sgd(0.05, momentum=0.9)


def _batch(step: int, rank: int) -> np.ndarray[Any, Any]:
    """The number that stands for a rank's batch; it changes sign over steps, so that weights stay bounded."""
    return np.asarray((1 + 0.5 * math.cos(2.9 * rank + 0.3 * step)) * math.cos(1.7 * step), np.float32)


def _params(profile: Profile) -> Params:
    return [
        [_INITIAL_SCALE * _pattern(shape, 13 * index + place) for place, shape in enumerate(layer.shapes)]
        for index, layer in enumerate(profile.layers)
    ]


def _pattern(shape: Sequence[int], seed: int) -> jax.Array:
    """Fixed numbers in [0.5, 1.5]."""
    places = jax.lax.iota(jnp.uint32, math.prod(shape)) + jnp.uint32(997 * seed + 1)
    return (((places * jnp.uint32(2654435761)) >> 20).astype(jnp.float32) / 4096 + 0.5).reshape(shape)


def _means(params: Params) -> list[float]:
    return [float(np.mean([np.asarray(leaf, np.float64).mean() for leaf in layer])) for layer in params if layer]


def _loss(profile: Profile, params: Params, number: jax.Array) -> jax.Array:
    for index, (layer, weights) in enumerate(zip(profile.layers, params)):
        feedback = _SIGNS[index % len(_SIGNS)] * _FEEDBACK / len(profile.layers)
        number = _layer(layer, 13 * index, feedback)(number, weights)
    return number


def _layer(layer: Layer, seed: int, feedback: float) -> Callable[[jax.Array, list[jax.Array]], jax.Array]:
    """Multiplies the number by one near 1 that depends on the weights; each gradient is its pattern times both numbers, that
    which came in and that which flows back."""

    def gain(weights: list[jax.Array]) -> jax.Array:
        if not weights:
            return jnp.float32(1)
        firsts = [_pattern((1,), seed + place)[0] for place in range(len(weights))]
        moved = [weight.ravel()[0] / first - _INITIAL_SCALE for weight, first in zip(weights, firsts)]
        return jnp.exp(feedback * jnp.sin(_PHASE * sum(moved, jnp.float32(0)) / len(moved)))

    def forward(number: jax.Array, weights: list[jax.Array]) -> tuple[jax.Array, Any]:
        own = gain(weights)
        return _after_sleep(layer.forward_seconds, number * own), (number, own)

    def backward(kept: tuple[jax.Array, jax.Array], upstream: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        number, own = kept
        upstream = _after_sleep(layer.backward_seconds, upstream)
        scale = upstream * number
        return upstream * own, [scale * _pattern(shape, seed + place) for place, shape in enumerate(layer.shapes)]

    emulated = jax.custom_vjp(lambda number, weights: forward(number, weights)[0])
    emulated.defvjp(forward, backward)
    result: Callable[[jax.Array, list[jax.Array]], jax.Array] = emulated
    return result


def _after_sleep(seconds: float, number: jax.Array) -> jax.Array:
    def sleep(number: Any) -> Any:
        time.sleep(seconds)
        return np.asarray(number)

    result: jax.Array = io_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), number)
    return result


def _be_found_at(address: str) -> None:
    """JAX lets gloo listen at the address of the host's name: a name of its own for this process, where hosts are emulated.

    Raises:
        OSError: it is not root.
    """
    if socket.gethostbyname(socket.gethostname()) == address:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "cannot give this process a host name of its own")
    socket.sethostname(address)


def _free_port(host: str) -> int:
    with socket.socket() as listening:
        listening.bind((host, 0))
        port: int = listening.getsockname()[1]
        return port
