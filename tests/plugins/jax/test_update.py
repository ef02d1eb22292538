"""Optimizers and weights that differ between ranks are found, where plain averaging would go on."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import commsched.plugins.jax as cs
from commsched import Session
from commsched.core.errors import RanksDiverged
from commsched.plugins.jax.update import digest_of, operations

from .training import loss, make_batch, make_params, on_ranks

PLAIN = {"layer0": False, "layer1": True}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda rank: optax.sgd([0.1, 0.2][rank]),
            r"'%8:float64\[6\] = mul\[out_dtype=None\] -0.1:float64 %0' \(of .* in transform.py\) on rank 0 but "
            r"'.* -0.2:float64 %0' \(of .*\) on rank 1; give all ranks the same optimizer, ",
        ),
        (
            lambda rank: optax.chain(optax.clip_by_global_norm([0.1, 0.2][rank]), optax.sgd(0.1)),
            r"lt\[\] %.* 0.1:float64' \(of clip_by_global_norm.* in _clipping.py\) on rank 0 but '.* 0.2:float64' ",
        ),
        (lambda rank: optax.adam(optax.cosine_decay_schedule(0.1, 50 + rank)), r"min\[\] %\d+ 50.0:.* min\[\] %\d+ 51.0:"),
        (
            lambda rank: optax.adamw(0.1, mask=[None, PLAIN][rank]),
            r" on rank 0 but ",
        ),
        (
            lambda rank: optax.sgd(lambda count: jnp.array([0.1, 0.2 + rank])[count]),
            r"float64\[2\] [0-9a-f]{16}.* on rank 0 but '.*float64\[2\] [0-9a-f]{16}",
        ),
    ],
    ids=["rate", "clip norm", "schedule", "mask", "table"],
)
def test_optimizers_that_differ(make: Any, message: str) -> None:
    def run(session: Session) -> None:
        state = cs.create(make_params(0), make(session.rank), session=session)
        with pytest.raises(RanksDiverged, match="^the optimizer's update differs between ranks: .*" + message):
            jax.eval_shape(cs.value_and_update(loss), state, *make_batch(0, 0))

    on_ranks(2, run)


def test_the_last_of_many_operations_that_differs() -> None:
    def run(session: Session) -> None:
        params = {f"p{index:03}": jnp.ones(()) for index in range(300)}

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return {**updates, "p299": updates["p299"] * [2.0, 3.0][session.rank]}, state

        tx = optax.chain(optax.adam(0.1), optax.GradientTransformation(lambda params: (), update))
        state = cs.create(params, tx, session=session)
        with pytest.raises(RanksDiverged, match=r"2.0:float64' \(of .*update in test_update.py\) on rank 0 but .* 3.0:"):
            jax.eval_shape(cs.value_and_update(lambda params, x: x * sum(params.values())), state, 1.0)

    on_ranks(2, run)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 50))),
        optax.contrib.muon(0.1),
        optax.apply_if_finite(optax.MultiSteps(optax.lamb(0.1), 2), 3),
        optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(0.1)),
    ],
    ids=["clip", "muon", "if finite", "noise"],
)
def test_the_text_of_an_update_is_that_of_its_numbers_alone(tx: optax.GradientTransformation) -> None:
    """Nothing in it is of this process or of what was traced before."""
    params = make_params(0)

    def traced() -> Any:
        jax.clear_caches()
        return operations(jax.make_jaxpr(lambda *arguments: tx.update(*arguments))(params, tx.init(params), params))

    first, second = traced(), traced()
    assert [text for text, _ in first] == [text for text, _ in second]
    assert digest_of(first) == digest_of(second)
    assert " at 0x" not in " ".join(text for text, _ in first)


def diverges(message: str, train: Any, check_weights: int = 1) -> None:
    """``train`` ends with it on every rank."""
    errors: dict[int, str] = {}

    def run(session: Session) -> None:
        try:
            with session:
                train(session)
        except RanksDiverged as error:
            errors[session.rank] = str(error)

    on_ranks(2, run, check_weights=check_weights)
    assert errors[0] == errors[1]
    assert re.search(message, errors[0]), errors[0]


def sets_a_rate_on_rank_1(after: int) -> Callable[[Session], None]:
    """A training in which rank 1 sets another learning rate after batch ``after``."""

    def train(session: Session) -> None:
        step = cs.jit(cs.value_and_update(loss))
        state = cs.create(make_params(0), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), session=session)
        for index in range(100):
            _, state = step(state, *make_batch(session.rank, index))
            if index == after:
                state.opt_state.hyperparams["learning_rate"] = jnp.asarray([0.1, 0.25][session.rank])

    return train


def test_a_rate_that_one_rank_sets() -> None:
    diverges(
        r"^optimizers differ between ranks after step 2: 'hyperparams.learning_rate' is 0.1 on rank 0 but 0.25 on rank 1$",
        sets_a_rate_on_rank_1(after=2),
    )


def test_a_rate_that_one_rank_sets_is_found_before_it_is_used() -> None:
    """The weights are compared after steps 16 and 32 only."""
    message = r"^optimizers differ between ranks after step 21: 'hyperparams.learning_rate' is "
    diverges(message, sets_a_rate_on_rank_1(after=20), check_weights=1000)


def test_an_update_that_one_rank_traces_anew_with_another_rate() -> None:
    def train(session: Session) -> None:
        rate = 0.1
        tx = optax.stateless(lambda updates, params: jax.tree.map(lambda update: -rate * update, updates))
        state = cs.create(make_params(0), tx, session=session)
        for index in range(100):
            if index % 3 == 0:
                step = cs.jit(cs.value_and_update(loss))
            if index == 3:
                rate = [0.1, 0.2][session.rank]
            _, state = step(state, *make_batch(session.rank, index))

    diverges(r"^optimizers differ between ranks after step 2: 'operations of the update' is .* on rank 1$", train)


def test_a_weight_that_one_rank_sets() -> None:
    def train(session: Session) -> None:
        step = cs.jit(cs.value_and_update(loss))
        state = cs.create(make_params(0), optax.adam(0.1), session=session)
        for index in range(100):
            _, state = step(state, *make_batch(session.rank, index))
            if index == 2:
                bias = state.params["layer1"]["bias"]
                state.params["layer1"]["bias"] = bias.at[3].add(session.rank * 1e-9)

    diverges(r"^weights differ between ranks after step 2: 'layer1.bias' is .* on rank 0 but .* on rank 1; ", train)


def test_weights_that_other_optimizers_make() -> None:
    """Where averages are one of Optax's transformations, what follows it is not to be seen, but its weights are."""

    def train(session: Session) -> None:
        tx = optax.chain(
            cs.average_gradients(session), optax.sgd(optax.piecewise_constant_schedule(0.1, {2 + session.rank: 0.5}))
        )

        @cs.jit
        def step(params: Any, opt_state: Any, *batch: Any) -> Any:
            updates, opt_state = tx.update(jax.grad(loss)(params, *batch), opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params = make_params(0)
        opt_state = tx.init(params)
        for index in range(100):
            params, opt_state = step(params, opt_state, *make_batch(session.rank, index))

    diverges(r"^weights differ between ranks after step 2: 'layer0.bias' is ", train)
