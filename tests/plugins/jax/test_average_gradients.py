"""Optax's form: averages within the step."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

import commsched.plugins.jax as cs
from commsched import Session
from commsched.core.errors import ManifestMismatch, UnsupportedError
from commsched.plugins.jax.average_gradients import AveragingState

from .training import joint_batch, loss, make_batch, make_params, on_ranks, plain_step, require_close, train_alone


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


def saved_by_one_rank(tx: optax.GradientTransformation) -> bytes:
    """After a step of plain training."""
    (saved,) = on_ranks(1, lambda session: pickle.dumps(make_step(session, tx)(make_params(0), None, 0)))
    return saved


def make_step(session: Session, tx: optax.GradientTransformation) -> Callable[[Any, Any, int], Any]:
    tx = optax.chain(cs.average_gradients(session), tx)

    @jax.jit
    def update(params: Any, opt_state: Any, *batch: Any) -> Any:
        updates, opt_state = tx.update(jax.grad(loss)(params, *batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return lambda params, opt_state, index: update(
        params, tx.init(params) if opt_state is None else opt_state, *make_batch(session.rank, index)
    )


def test_a_state_that_one_rank_saved_is_averaged_by_two() -> None:
    saved = saved_by_one_rank(optax.adam(0.01))

    def run(session: Session) -> Any:
        step = make_step(session, optax.adam(0.01))
        params, opt_state = pickle.loads(saved)
        for index in (1, 2):
            params, opt_state = step(params, opt_state, index)
        return params, opt_state[1][0].count

    params, (_, opt_state) = pickle.loads(saved)
    for index in (1, 2):
        params, opt_state = plain_step(optax.adam(0.01), loss)(params, opt_state, *joint_batch(2, index))
    by_rank = on_ranks(2, run)
    require_close([params for params, _ in by_rank], params)
    assert [int(count) for _, count in by_rank] == [3, 3]


def test_a_state_that_init_has_not_made_is_refused() -> None:
    """Local gradients would be applied otherwise."""

    def run(session: Session) -> None:
        tx = cs.average_gradients(session)
        message = r"^average_gradients\(\) was given a EmptyState as its state, .* would not be averaged. Restore into a state "
        with pytest.raises(UnsupportedError, match=message):
            tx.update(make_params(0), optax.EmptyState())

    on_ranks(2, run)


def test_a_state_is_copied_saved_and_restored_as_any_other() -> None:
    tx = optax.adam(0.01)

    def run(session: Session) -> Any:
        step, params = make_step(session, tx), make_params(0)
        first = optax.chain(cs.average_gradients(session), tx).init(params)
        params, opt_state = step(params, None, 0)
        for keep in (
            lambda: pickle.loads(pickle.dumps(opt_state)),
            lambda: copy.deepcopy(opt_state),
            lambda: serialization.from_bytes(first, serialization.to_bytes(opt_state)),
            lambda: jax.tree.map(lambda one, _: one, opt_state, first),
        ):
            kept = keep()
            assert jax.tree.structure(kept) == jax.tree.structure(opt_state)
            again, _ = step(params, kept, 1)
        return again

    require_close(on_ranks(2, run), train_alone(tx, 2, 2))


def test_two_trainings_with_one_transformation_stay_apart() -> None:
    """The program knows of one when it is made; states say whose gradients they are."""

    def run(session: Session) -> list[Any]:
        tx = cs.average_gradients(session)
        states = [tx.init({"a": jnp.zeros(2)})]
        update = cs.jit(lambda *both: tx.update(*both)[0]["a"][0])
        own = 1.0 + session.rank
        seen = [update({"a": jnp.full(2, own)}, states[0])]
        states.append(tx.init({"a": jnp.zeros(2)}))
        both = [
            threading.Thread(
                target=lambda place=place: seen.append(update({"a": jnp.full(2, 10.0**place * own)}, states[place]))
            )
            for place in ((0, 1) if session.rank else (1, 0))
        ]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join(60)
        with pytest.raises(UnsupportedError, match=r"cannot say .* \(number 7; here there are 1, 2\): call tx.init"):
            update({"a": jnp.zeros(2)}, states[0]._replace(number=jnp.int32(7)))
        return sorted(map(float, seen))

    assert on_ranks(2, run) == [[1.5, 1.5, 15.0]] * 2


def test_flax_s_own_loop() -> None:
    """Its optimizer's ``init`` gets variables, ``update`` arrays."""
    inputs = [make_batch(rank, 0)[0] for rank in range(2)]

    def train(tx: optax.GradientTransformation, x: Any) -> Any:
        model = nnx.Linear(6, 2, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model: nnx.Module, optimizer: nnx.Optimizer, x: Any) -> None:
            optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model))

        for _ in range(2):
            step(model, optimizer, x)
        return nnx.to_pure_dict(nnx.state(model))

    by_rank = on_ranks(
        2, lambda session: train(optax.chain(cs.average_gradients(session), optax.adam(0.01)), inputs[session.rank])
    )
    require_close(by_rank, train(optax.adam(0.01), np.concatenate(inputs)))


def test_a_transformation_that_is_made_anew_goes_on() -> None:
    """For another rate, say; also within the step, where each trace makes one."""

    def run(session: Session) -> Any:
        def make(rate: Any) -> optax.GradientTransformation:
            return optax.chain(cs.average_gradients(session), optax.sgd(rate))

        @jax.jit
        def step(params: Any, opt_state: Any, rate: Any, *batch: Any) -> Any:
            updates, opt_state = make(rate).update(jax.grad(loss)(params, *batch), opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params = make_params(0)
        opt_state = make(0.1).init(params)
        groups = session.core.group_count
        for index in range(2):
            params, opt_state = step(params, opt_state, 0.1, *make_batch(session.rank, index))
        updates, _ = make(0.1).update(jax.grad(loss)(params, *make_batch(session.rank, 2)), opt_state, params)
        assert session.core.group_count == groups
        return optax.apply_updates(params, updates)

    require_close(on_ranks(2, run), train_alone(optax.sgd(0.1), 2, 3))


def test_two_restored_states_need_a_training_each() -> None:
    """Their gradients could be averaged with each other's otherwise."""

    def run(session: Session) -> None:
        tx, gradients = cs.average_gradients(session), {"a": jnp.ones(2)}
        first, second = (AveragingState(jnp.int32(number)) for number in (4, 5))
        tx.update(gradients, first)
        with pytest.raises(UnsupportedError, match=r"^average_gradients\(\) cannot say .* \(number 5; here there are 0\)"):
            tx.update(gradients, second)
        own = tx.init(gradients)
        for state in (first, own):
            tx.update(gradients, state)

    on_ranks(2, run)
