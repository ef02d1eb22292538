"""Optax's form: averages within the step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import commsched.plugins.jax as cs
from commsched import Session
from commsched.core.errors import ManifestMismatch, UnsupportedError

from .training import loss, make_batch, make_params, on_ranks, require_close, train_alone


def train(session: Session, tx: optax.GradientTransformation, steps: int) -> Any:
    """A loop as it was, with the joint batch's gradients."""

    @jax.jit
    def step(params: Any, opt_state: Any, *batch: Any) -> Any:
        gradients = jax.grad(loss)(params, *batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = cs.broadcast(make_params(session.rank), session)
    opt_state = tx.init(params)
    for index in range(steps):
        params, opt_state = step(params, opt_state, *make_batch(session.rank, index))
    return params


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_trains_as_the_joint_batch(world_size: int) -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.01))
    by_rank = on_ranks(world_size, lambda session: train(session, optax.chain(cs.average_gradients(session), tx), 4))
    require_close(by_rank, train_alone(tx, world_size, 4))


def test_accumulation_around_it() -> None:
    def own(session: Session) -> Any:
        return train(session, optax.MultiSteps(optax.chain(cs.average_gradients(session), optax.adam(0.01)), 2), 4)

    # It accumulates in float32, here before the average, there after it.
    require_close(on_ranks(2, own), train_alone(optax.MultiSteps(optax.adam(0.01), 2), 2, 4), 1e-5)


def test_parameters_that_differ_are_refused() -> None:
    def run(session: Session) -> None:
        with pytest.raises(ManifestMismatch, match=r"^'layer0.bias' differs between rank 0 and rank 1; begin with "):
            cs.average_gradients(session).init(make_params(session.rank))

    on_ranks(2, run)


def test_gradients_unlike_the_parameters_are_refused() -> None:
    def run(session: Session) -> None:
        tx = cs.average_gradients(session)
        state = tx.init({"a": jnp.zeros(3), "b": jnp.zeros(2)})
        message = r"^the gradients have 'b' float32\[2\] where the parameters have 'b' float64\[2\]$"
        with pytest.raises(UnsupportedError, match=message):
            tx.update({"a": jnp.zeros(3), "b": jnp.zeros(2, np.float32)}, state)
        with pytest.raises(UnsupportedError, match=r"^the gradients have nothing more where the parameters have 'b' float64"):
            tx.update({"a": jnp.zeros(3)}, state)
        with pytest.raises(UnsupportedError, match=r"^a step within jax.vmap: "):
            jax.vmap(tx.update, (0, None))({"a": jnp.zeros((1, 3)), "b": jnp.zeros((1, 2))}, state)

    on_ranks(2, run)


def test_updates_of_one_program_follow_each_other() -> None:
    def run(session: Session) -> Any:
        tx = cs.average_gradients(session)

        @jax.jit
        def twice(state: Any, first: Any, second: Any) -> Any:
            one, state = tx.update(first, state)
            two, state = tx.update(second, state)
            return one, two

        own = 1.0 + session.rank
        return twice(tx.init({"a": jnp.zeros(3)}), {"a": jnp.full(3, own)}, {"a": jnp.full(3, 10 * own)})

    for one, two in on_ranks(2, run):
        np.testing.assert_array_equal(one["a"], [1.5] * 3)
        np.testing.assert_array_equal(two["a"], [15] * 3)
