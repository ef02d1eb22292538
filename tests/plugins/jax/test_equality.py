"""Two ranks, each with data of its own and delays at every gate, against plain JAX with the joint batch."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import commsched.plugins.jax as cs
from commsched import Session

from .training import (
    FEATURES,
    forward,
    joint_batch,
    loss,
    make_batch,
    make_params,
    on_one_rank_of_two,
    on_ranks,
    plain_step,
    require_close,
    train,
    train_alone,
)

STEPS = 3
PERIODS = 5  # steps of optimizers that do not do the same in each


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(optax.exponential_decay(0.01, 2, 0.7), weight_decay=0.01),
        optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.9, nesterov=True)),
        optax.MultiSteps(optax.adam(0.01), 2),
        optax.apply_if_finite(optax.lamb(0.01), 3),
        optax.multi_transform(
            {"train": optax.rmsprop(0.01), "freeze": optax.set_to_zero()},
            lambda params: {name: "freeze" if name == "layer1" else "train" for name in params},
        ),
    ],
    ids=["adamw with a schedule", "clip by global norm", "accumulation", "lamb, if finite", "frozen layer"],
)
def test_optimizers(tx: optax.GradientTransformation) -> None:
    require_close(on_ranks(2, lambda session: train(session, tx, PERIODS)), train_alone(tx, 2, PERIODS))


def loss_of(forward: Any) -> Any:
    return lambda params, inputs, targets: jnp.mean((forward(params, inputs) - targets) ** 2)


def checkpointed_with_a_penalty(params: Any, inputs: Any) -> Any:
    for name in ("layer0", "layer1"):
        layer = jax.checkpoint(lambda layer, inputs: jnp.tanh(inputs @ layer["kernel"] + layer["bias"]))
        inputs = layer(params[name], inputs)
    return inputs + 0.1 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


def tied_and_unused(params: Any, inputs: Any) -> Any:
    kernel = params["layer0"]["kernel"]
    return jnp.tanh(inputs @ kernel + params["layer1"]["bias"]) @ kernel.T


def linear(params: Any, inputs: Any) -> Any:
    """Gradients that depend on no parameter: nothing but commsched orders them after the waits of their step."""
    return jnp.sum(inputs @ params["layer1"]["kernel"] + params["layer0"]["bias"])


def cast_first(params: Any, inputs: Any) -> Any:
    return forward(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), inputs)


@pytest.mark.parametrize("forward", [checkpointed_with_a_penalty, tied_and_unused, cast_first])
def test_models(forward: Any) -> None:
    own, tx = loss_of(forward), optax.adam(0.01)
    tolerance = 1e-5 if forward is cast_first else 1e-9
    require_close(
        on_ranks(2, lambda session: train(session, tx, STEPS, loss=own)), train_alone(tx, 2, STEPS, loss=own), tolerance
    )


def test_a_loss_whose_gradients_do_not_depend_on_parameters() -> None:
    def own(params: Any, inputs: Any, targets: Any) -> Any:
        return linear(params, inputs) / len(inputs)

    tx = optax.sgd(0.1)
    require_close(on_ranks(2, lambda session: train(session, tx, STEPS, loss=own)), train_alone(tx, 2, STEPS, loss=own))


def test_16_bit_parameters() -> None:
    def start(seed: int) -> Any:
        params = make_params(seed)
        params["layer1"] = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params["layer1"])
        return params

    tx = optax.sgd(0.1)
    by_rank = on_ranks(2, lambda session: train(session, tx, STEPS, params=start(session.rank)))
    require_close(by_rank, train_alone(tx, 2, STEPS, params=start(0)), 2e-2)
    assert by_rank[0]["layer1"]["kernel"].dtype == jnp.bfloat16


def test_layers_under_scan() -> None:
    def stacked(seed: int) -> Any:
        params = make_params(seed)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *params.values())

    def own(params: Any, inputs: Any, targets: Any) -> Any:
        def layer(inputs: Any, layer: Any) -> Any:
            return jnp.tanh(inputs @ layer["kernel"] + layer["bias"]), None

        outputs, _ = jax.lax.scan(layer, inputs, params)
        return jnp.mean((outputs - targets) ** 2)

    tx = optax.adam(0.01)
    by_rank = on_ranks(2, lambda session: train(session, tx, STEPS, loss=own, params=stacked(session.rank)))
    require_close(by_rank, train_alone(tx, 2, STEPS, loss=own, params=stacked(0)))


class Network(nn.Module):
    @nn.compact
    def __call__(self, inputs: Any, train: bool) -> Any:
        inputs = nn.relu(nn.remat(nn.Dense)(4, param_dtype=jnp.float64)(inputs))
        inputs = nn.BatchNorm(use_running_average=not train, param_dtype=jnp.float64)(inputs)
        return nn.Dense(FEATURES, param_dtype=jnp.float64)(nn.Dropout(0.0, deterministic=False)(inputs))


def test_flax_linen_with_batch_statistics() -> None:
    """Each rank has its own, of its own batches."""
    model, tx = Network(), optax.sgd(0.1, momentum=0.9)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    start = jax.jit(partial(model.init, train=False))(keys, make_batch(0, 0)[0])

    def own(params: Any, statistics: Any, key: Any, inputs: Any, targets: Any) -> Any:
        variables = {"params": params, "batch_stats": statistics}
        outputs, updated = model.apply(variables, inputs, train=True, rngs={"dropout": key}, mutable=["batch_stats"])
        return jnp.mean((outputs - targets) ** 2), updated["batch_stats"]

    def through_the_plugin(session: Session) -> Any:
        state, statistics = cs.create(start["params"], tx, session=session), start["batch_stats"]
        step = jax.jit(cs.value_and_update(own, has_aux=True))
        values = []
        for index in range(STEPS):
            batch = make_batch(session.rank, index)
            (value, statistics), state = step(state, statistics, jax.random.key(index), *batch)
            values.append(value)
        return state.params, statistics, values

    @jax.jit
    def plain(params: Any, opt_state: Any, both: Any, key: Any, *batches: Any) -> Any:
        value_and_grad = jax.value_and_grad(own, has_aux=True)
        of_ranks = [value_and_grad(params, statistics, key, *batch) for statistics, batch in zip(both, batches)]
        average = jax.tree.map(lambda one, two: (one + two) / 2, *(gradients for _, gradients in of_ranks))
        updates, opt_state = tx.update(average, opt_state, params)
        values, both = zip(*(value for value, _ in of_ranks))
        return optax.apply_updates(params, updates), opt_state, both, values

    by_rank = on_ranks(2, through_the_plugin)
    params, opt_state, both = start["params"], tx.init(start["params"]), [start["batch_stats"]] * 2
    for index in range(STEPS):
        batches = [make_batch(rank, index) for rank in range(2)]
        params, opt_state, both, values = plain(params, opt_state, both, jax.random.key(index), *batches)
        for rank in range(2):
            assert by_rank[rank][2][index] == pytest.approx(float(values[rank]), rel=1e-9)
    require_close([trained for trained, _, _ in by_rank], params)
    for rank in range(2):
        require_close([by_rank[rank][1]], both[rank])


def test_auxiliary_data_that_is_no_array() -> None:
    """A step may branch on it, as within plain ``jit``."""

    def own(params: Any, inputs: Any, targets: Any) -> Any:
        value = loss(params, inputs, targets)
        return value, {
            "name": "mean",
            "layers": len(params),
            "table": np.arange(3),
            "rows": inputs.shape[0],
            "twice": 2 * value,
        }

    def run(session: Session) -> None:
        @jax.jit
        def step(state: cs.TrainState, *batch: Any) -> Any:
            (value, aux), state = cs.value_and_update(own, has_aux=True)(state, *batch)
            assert (aux["name"], aux["layers"], aux["rows"]) == ("mean", 2, 3)
            assert type(aux["table"]) is np.ndarray
            return (value if aux["layers"] > 1 else 0), aux["twice"], state

        state = cs.create(make_params(0), optax.sgd(0.1), session=session)
        value, twice, state = step(state, *make_batch(0, 0))
        assert twice == 2 * value == pytest.approx(2 * float(loss(make_params(0), *make_batch(0, 0))))

    on_one_rank_of_two(run)


def test_side_effects_of_the_loss_that_use_no_data() -> None:
    seen: list[float] = []

    def own(params: Any, inputs: Any, targets: Any) -> Any:
        jax.debug.callback(lambda bias: seen.append(float(bias[0])), params["layer1"]["bias"])
        return loss(params, inputs, targets)

    def run(session: Session) -> list[float]:
        state, step = cs.create(make_params(0), optax.sgd(0.1), session=session), jax.jit(cs.value_and_update(own))
        biases = []
        for index in range(3):
            biases.append(float(state.params["layer1"]["bias"][0]))
            _, state = step(state, *make_batch(0, index))
        state.params  # noqa: B018
        jax.effects_barrier()
        return biases

    assert on_one_rank_of_two(run) == [seen]
    assert len(set(seen)) == 3


def test_flax_nnx() -> None:
    def make(seed: int) -> Any:
        dense = partial(nnx.Linear, FEATURES, FEATURES, param_dtype=jnp.float64, rngs=nnx.Rngs(seed))
        return nnx.split(nnx.Sequential(dense(), jnp.tanh, dense()), nnx.Param)

    graph, _ = make(0)
    tx = optax.adam(0.01)

    def own(params: Any, inputs: Any, targets: Any) -> Any:
        return jnp.mean((nnx.merge(graph, params)(inputs) - targets) ** 2)

    by_rank = on_ranks(2, lambda session: train(session, tx, STEPS, loss=own, params=make(session.rank)[1]))
    require_close(by_rank, train_alone(tx, 2, STEPS, loss=own, params=make(0)[1]))


def test_a_loss_that_closes_over_its_batch() -> None:
    tx = optax.adam(0.01)

    def through_the_plugin(session: Session) -> Any:
        @jax.jit
        def step(state: Any, batch: Any) -> Any:
            value, state = cs.value_and_update(lambda params: loss(params, *batch))(state)
            return state, value

        state = cs.create(make_params(session.rank), tx, session=session)
        for index in range(STEPS):
            state, _ = step(state, make_batch(session.rank, index))
        return state.params

    require_close(on_ranks(2, through_the_plugin), train_alone(tx, 2, STEPS))


def test_many_steps_in_one_program() -> None:
    tx = optax.adam(0.01)

    def through_the_plugin(session: Session) -> Any:
        @jax.jit
        def run(state: Any, batches: Any) -> Any:
            return jax.lax.scan(lambda state, batch: cs.value_and_update(loss)(state, *batch)[::-1], state, batches)

        batches = [make_batch(session.rank, index) for index in range(STEPS)]
        state, values = run(
            cs.create(make_params(session.rank), tx, session=session), jax.tree.map(lambda *x: np.stack(x), *batches)
        )
        assert values.shape == (STEPS,)
        return state.params

    require_close(on_ranks(2, through_the_plugin), train_alone(tx, 2, STEPS))


def test_without_jit() -> None:
    tx = optax.sgd(0.1, momentum=0.9)
    own = loss_of(lambda kernel, inputs: jnp.tanh(inputs @ kernel))
    kernel = make_params(0)["layer0"]["kernel"]

    def through_the_plugin(session: Session) -> Any:
        state = cs.create(kernel, tx, session=session)
        step = cs.value_and_update(own)
        for index in range(2):
            with jax.disable_jit(index == 1):
                _, state = step(state, *make_batch(session.rank, index))
        return state.params

    require_close(on_ranks(2, through_the_plugin), train_alone(tx, 2, 2, loss=own, params=kernel))


def test_other_shapes_from_step_to_step() -> None:
    """Traced anew in between, and with another loss."""
    tx = optax.adam(0.01)

    def rows(step: int) -> Any:
        return slice(0, 3 if step % 2 else 2)

    def through_the_plugin(session: Session) -> Any:
        state = cs.create(make_params(session.rank), tx, session=session)
        step = jax.jit(cs.value_and_update(loss))
        for index in range(4):
            _, state = step(state, *(array[rows(index)] for array in make_batch(session.rank, index)))
        return state.params

    plain, params = plain_step(tx, loss), make_params(0)
    opt_state = tx.init(params)
    for index in range(4):
        batches = zip(*(make_batch(rank, index) for rank in range(2)))
        joint = [np.concatenate([array[rows(index)] for array in arrays]) for arrays in batches]
        params, opt_state = plain(params, opt_state, *joint)
    require_close(on_ranks(2, through_the_plugin), params)


def test_numbers_that_are_not_finite_stay_where_they_are() -> None:
    """One rank's are in the averages, and in the parameters that they reach, as on the joint batch; no others."""

    def own(params: Any, inputs: Any, targets: Any) -> Any:
        return jnp.mean(inputs @ params["layer0"]["kernel"] + params["layer0"]["bias"])

    def spoiled(inputs: Any, targets: Any) -> Any:
        inputs[0, 2], inputs[1, 4] = np.nan, np.inf
        return inputs, targets

    tx = optax.sgd(0.1)

    def run(session: Session) -> Any:
        batch = make_batch(session.rank, 0)
        state = cs.create(make_params(session.rank), tx, session=session)
        value, state = jax.jit(cs.value_and_update(own))(state, *(spoiled(*batch) if session.rank else batch))
        return value, state.params

    (first, params), (second, others) = on_ranks(2, run)
    assert np.isfinite(first)
    assert np.isnan(second)
    gradients = jax.grad(own)(make_params(0), *spoiled(*joint_batch(2, 0)))
    expected = jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, make_params(0), gradients)
    for leaf, other, wanted in zip(*map(jax.tree.leaves, (params, others, expected))):
        np.testing.assert_array_equal(leaf, other)
        np.testing.assert_allclose(leaf, wanted, rtol=1e-12)
    assert [int(np.isfinite(leaf).sum()) for leaf in jax.tree.leaves(params)] == [6, 4 * 6, 6, 36]
