"""JAX: through commsched's plugin, and with ``jax.lax.pmean`` over the processes of ``jax.distributed``, by gloo.

The layers of ``emulated.py`` are callbacks within the compiled program. They sleep for the layer's time; later operations of
the program depend on their results.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import PartitionSpec

import commsched.plugins.jax as cs

from .emulated import (
    INITIAL,
    LEARNING_RATE,
    MOMENTUM,
    PHASE,
    Array,
    EmulatedLayer,
    batch_number,
    coefficients,
    make_layers,
    sleep_until,
)
from .turn import Train, Turn, free_addresses

_CLONE_NEWUTS = 0x04000000  # of Linux's sched.h

Params = list[list[jax.Array]]  # by layer and place


def through_commsched(turn: Turn) -> Sequence[float]:
    layers = make_layers(turn.profile)
    state = cs.create(_params(layers), _optimizer(), session=turn.session)
    step = jax.jit(cs.value_and_update(partial(_loss, layers)), donate_argnums=0)
    for index in range(turn.count):
        loss, state = step(state, np.float32(batch_number(index, turn.session.rank)))
        loss.block_until_ready()
        turn.steps.over()
    return coefficients(layers, map(np.asarray, jax.tree.leaves(state.params)))


def by_pmean(turn: Turn) -> Sequence[float]:
    """Train in JAX's own way for several processes: one program on all their devices, which contains a ``pmean`` of the
    gradients."""
    session, layers, tx = turn.session, make_layers(turn.profile), _optimizer()
    _be_found_at(turn.hosts[session.rank])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(free_addresses(turn)[0], session.world_size, session.rank, local_device_ids=[0])
    try:
        mesh = jax.make_mesh((session.world_size,), ("ranks",), axis_types=(jax.sharding.AxisType.Auto,))
        everywhere, each = PartitionSpec(), PartitionSpec("ranks")

        def step(params: Params, opt_state: Any, batch: jax.Array) -> tuple[jax.Array, Params, Any]:
            loss, gradients = jax.value_and_grad(partial(_loss, layers))(params, batch[0])
            updates, opt_state = tx.update(jax.lax.pmean(gradients, "ranks"), opt_state, params)
            return loss[None], optax.apply_updates(params, updates), opt_state

        specs = {"in_specs": (everywhere, everywhere, each), "out_specs": (each, everywhere, everywhere)}
        program = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs), donate_argnums=(0, 1))
        params = jax.device_put(_params(layers), jax.NamedSharding(mesh, everywhere))
        opt_state = jax.jit(tx.init)(params)
        shards = jax.NamedSharding(mesh, each)
        for index in range(turn.count):
            batch = jax.make_array_from_process_local_data(shards, np.array([batch_number(index, session.rank)], np.float32))
            loss, params, opt_state = program(params, opt_state, batch)
            loss.block_until_ready()
            turn.steps.over()
        found = coefficients(layers, (np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(params)))
    finally:
        jax.distributed.shutdown()
    return found


SYSTEMS: Mapping[str, Train] = {"commsched": through_commsched, "pmean": by_pmean}


def _optimizer() -> optax.GradientTransformation:
    return optax.sgd(LEARNING_RATE, momentum=MOMENTUM)


def _params(layers: Sequence[EmulatedLayer]) -> Params:
    return [[jnp.array(INITIAL * pattern) for pattern in layer.patterns] for layer in layers]


def _loss(layers: Sequence[EmulatedLayer], params: Params, number: jax.Array) -> jax.Array:
    for layer, weights in zip(layers, params):
        number = _function_of(layer)(number, weights)
    return number


def _function_of(layer: EmulatedLayer) -> Callable[[jax.Array, list[jax.Array]], jax.Array]:
    def own_gain(weights: list[jax.Array]) -> jax.Array:
        if not weights:
            return jnp.float32(1)
        found = [weight.ravel()[0] / first - INITIAL for weight, first in zip(weights, layer.firsts)]
        return jnp.exp(layer.feedback * jnp.sin(PHASE * sum(found, jnp.float32(0)) / len(found)))

    def forward(number: jax.Array, weights: list[jax.Array]) -> tuple[jax.Array, Any]:
        own = own_gain(weights)
        (result,) = _emulate(layer.forward_seconds, (), number * own)
        return result, (number, own, result)

    def backward(kept: tuple[jax.Array, jax.Array, jax.Array], upstream: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        number, own, result = kept
        # The last layer's upstream is a constant. The operand ``result`` makes backward begin after forward.
        flowing, *gradients = _emulate(layer.backward_seconds, layer.patterns, upstream * own, upstream * number, result)
        return flowing, gradients

    emulated = jax.custom_vjp(lambda number, weights: forward(number, weights)[0])
    emulated.defvjp(forward, backward)
    result: Callable[[jax.Array, list[jax.Array]], jax.Array] = emulated
    return result


def _emulate(seconds: float, patterns: Sequence[Array], number: jax.Array, *operands: jax.Array) -> Sequence[jax.Array]:
    """Return ``number``, and the patterns times the first operand, ``seconds`` after all operands are ready. Results are
    computed first and returned when the time is over."""

    def run(_: Any, results: Sequence[Any], *operands: Any) -> None:
        ends = time.monotonic() + seconds
        passed_on, *gradients = map(np.asarray, results)
        number, *others = map(np.asarray, operands)
        passed_on[...] = number
        for gradient, pattern in zip(gradients, patterns):
            np.multiply(pattern, others[0], out=gradient)
        sleep_until(ends)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((), *(pattern.shape for pattern in patterns))]
    # io_callback would copy all operands and results.
    results: Sequence[jax.Array] = buffer_callback(run, shapes, has_side_effect=True)(number, *operands)
    return results


def _be_found_at(address: str) -> None:
    """Give this process a host name of its own that resolves to ``address``. JAX lets gloo listen at the address of the host
    name, which is the same for all emulated hosts.

    Raises:
        OSError: this process is not root.
    """
    if socket.gethostbyname(socket.gethostname()) == address:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "cannot give this process a host name of its own")
    socket.sethostname(address)
