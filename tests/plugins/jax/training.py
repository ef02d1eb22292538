"""The same small training with and without commsched, to be compared. Ranks are threads, with delays at every gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import commsched.plugins.jax as cs
from commsched import SchedulerConfig, Session
from commsched.core.interfaces import Transport
from commsched.session.local import local_sessions
from commsched.testing.check_plugin import Delayed
from commsched.testing.world import run_world
from tests.holding_transport import HoldingTransport

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)

FEATURES, ROWS, LAYERS = 6, 3, 2  # few: compiling is most of what these tests do
SMALL = SchedulerConfig(partition_bytes=100, credit_bytes=200)  # so that tensors are split, merged and queued

Params = Any
Batch = tuple[Any, Any]


def make_params(seed: int, dtype: Any = np.float64) -> Params:
    rng = np.random.default_rng(seed)
    return {
        f"layer{index}": {
            "bias": jnp.asarray(rng.standard_normal(FEATURES) / 9, dtype),
            "kernel": jnp.asarray(rng.standard_normal((FEATURES, FEATURES)) / 2, dtype),
        }
        for index in range(LAYERS)
    }


def forward(params: Params, inputs: Any) -> Any:
    for index in range(LAYERS):
        layer = params[f"layer{index}"]
        inputs = jnp.tanh(inputs @ layer["kernel"] + layer["bias"])
    return inputs


def loss(params: Params, inputs: Any, targets: Any) -> Any:
    return jnp.mean((forward(params, inputs) - targets) ** 2)


def make_batch(rank: int, step: int, seed: int = 0, dtype: Any = np.float64) -> Batch:
    inputs = np.random.default_rng([seed, rank, step]).standard_normal((ROWS, FEATURES))
    return inputs.astype(dtype), np.sin(3 * inputs).astype(dtype)


def joint_batch(world_size: int, step: int, seed: int = 0, dtype: Any = np.float64) -> Batch:
    inputs, targets = zip(*(make_batch(rank, step, seed, dtype) for rank in range(world_size)))
    return np.concatenate(inputs), np.concatenate(targets)


@cache
def plain_step(tx: optax.GradientTransformation, loss: Callable[..., Any]) -> Callable[..., tuple[Params, Any]]:
    @jax.jit
    def step(params: Params, state: Any, *batch: Any) -> tuple[Params, Any]:
        gradients = jax.grad(loss)(params, *batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def train_alone(
    tx: optax.GradientTransformation,
    world_size: int,
    steps: int,
    *,
    loss: Callable[..., Any] = loss,
    params: Params = None,
    seed: int = 0,
    dtype: Any = np.float64,
) -> Params:
    """Plain JAX and Optax, with the joint batch."""

    step = plain_step(tx, loss)
    params = make_params(0, dtype) if params is None else params
    state = tx.init(params)
    for index in range(steps):
        params, state = step(params, state, *joint_batch(world_size, index, seed, dtype))
    return params


def train(
    session: Session,
    tx: optax.GradientTransformation,
    steps: int,
    *,
    loss: Callable[..., Any] = loss,
    params: Params = None,
    seed: int = 0,
    dtype: Any = np.float64,
) -> Params:
    """One rank's training through the plugin."""
    state = cs.create(make_params(session.rank, dtype) if params is None else params, tx, session=session)
    step = jax.jit(cs.value_and_update(loss), donate_argnums=0)
    for index in range(steps):
        _, state = step(state, *make_batch(session.rank, index, seed, dtype))
    return state.params


def on_ranks(
    world_size: int,
    rank: Callable[[Session], Any],
    *,
    delay_seconds: float = 0.002,
    config: SchedulerConfig = SMALL,
    wrap_transport: Callable[[Transport], Transport] | None = None,
    check_weights: int = 0,
) -> list[Any]:
    """``rank`` on every rank, in a session of its own."""

    def delayed(transport: Transport) -> Transport:
        return Delayed(transport, transport.rank, delay_seconds)

    sessions = local_sessions(world_size, config, wrap_transport=wrap_transport or delayed, check_weights=check_weights)

    def run(index: int) -> Any:
        with sessions[index] as session:
            return rank(session)

    try:
        return run_world(world_size, run, timeout_seconds=300)
    finally:
        for session in sessions:
            session.abort("the test is over")


def on_one_rank_of_two(run: Callable[[Session], Any], **options: Any) -> list[Any]:
    """``run`` with a session that has several ranks, whose averages are its own: one that is alone would train plainly.

    For what averages are no matter of. ``options`` are those of ``on_ranks``.
    """

    def alone(session: Session) -> Any:
        session.world_size = 2
        return run(session)

    return on_ranks(1, alone, **options)


def require_close(by_rank: list[Params], alone: Params, tolerance: float = 1e-9) -> None:
    """Bitwise equal on all ranks, and within ``tolerance`` of ``alone``, relative to each leaf's largest number."""
    for params in by_rank:
        assert jax.tree.structure(params) == jax.tree.structure(alone)
        for leaf, first, expected in zip(*map(jax.tree.leaves, (params, by_rank[0], alone))):
            assert np.asarray(leaf).tobytes() == np.asarray(first).tobytes()
            expected = np.asarray(expected, np.float64)
            difference = np.abs(np.asarray(leaf, np.float64) - expected).max()
            assert difference <= tolerance * max(np.abs(expected).max(), 1e-30)


def hold_back(transport: Transport, tensors: set[int]) -> HoldingTransport:
    """``transport``, whose averages of ``tensors`` (indices in the manifest) in step 0 arrive only when the test says so."""
    return HoldingTransport(
        transport,
        lambda task: task.partition.dtype != "uint8" and task.step == 0 and not tensors.isdisjoint(task.partition.tensors),
    )
