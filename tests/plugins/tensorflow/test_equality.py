"""Two ranks train what plain Keras trains with the joint batch; every send and reply is delayed."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

from commsched import Session
from commsched.plugins.tensorflow import ScheduledOptimizer
from commsched.transports.wire import WireTransport

from .training import (
    RANKS,
    ROWS,
    STEPS,
    MakeOptimizer,
    made,
    mlp,
    numbers,
    on_ranks,
    one_layer,
    require_same_as_alone,
    share,
    train,
)

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda: optimizers.SGD(0.1),
    "momentum, clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.2),
    "AdamW, clipvalue": lambda: optimizers.AdamW(0.01, weight_decay=0.1, clipvalue=0.05),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "RMSprop": lambda: optimizers.RMSprop(0.01, centered=True),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "Lion": lambda: optimizers.Lion(0.01),
    "Lamb": lambda: optimizers.Lamb(0.01),
    "schedule": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.05, 1, 0.7)),
    "loss scale factor": lambda: optimizers.SGD(0.1, loss_scale_factor=64.0),
}
#: These need all gradients at once.
BARRIERS: dict[str, MakeOptimizer] = {
    "Nadam": lambda: optimizers.Nadam(0.01),
    "global clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.3),
    "EMA": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
    "accumulation": lambda: optimizers.Adam(0.05, gradient_accumulation_steps=2),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    require_same_as_alone(one_layer, OPTIMIZERS[name], "eager")


@pytest.mark.parametrize("name", BARRIERS)
def test_optimizers_that_need_all_gradients(name: str) -> None:
    require_same_as_alone(one_layer, BARRIERS[name], "graph" if name == "LossScaleOptimizer" else "eager")


@pytest.mark.parametrize("make", [OPTIMIZERS["schedule"], BARRIERS["Nadam"]])
def test_steps_in_a_graph(make: MakeOptimizer) -> None:
    require_same_as_alone(mlp, make, "graph")


@pytest.mark.parametrize(("name", "steps_per_execution"), [("AdamW, clipvalue", 3), ("global clipnorm", 3)])
def test_fit(name: str, steps_per_execution: int) -> None:
    make = {**OPTIMIZERS, **BARRIERS}[name]
    require_same_as_alone(mlp, make, "fit", steps_per_execution=steps_per_execution)


def test_fit_eagerly() -> None:
    require_same_as_alone(mlp, OPTIMIZERS["amsgrad"], "fit", run_eagerly=True)


@pytest.mark.parametrize("compiled", [True, False])
def test_no_update_is_lost_where_nobody_reads_between_steps(compiled: bool) -> None:
    """A step that began before the updates of the last are made would take their place."""

    def run(model: Any, optimizer: Any, scale: float) -> Any:
        gradients = [tf.fill(variable.shape, tf.constant(scale, tf.float64)) for variable in model.trainable_variables]

        def steps() -> None:
            for step in range(3):
                optimizer.apply([gradient * (step + 1.0) for gradient in gradients], model.trainable_variables)

        (tf.function(steps) if compiled else steps)()
        return np.concatenate([weights.ravel() for weights in model.get_weights()])

    plain = run(made(mlp, 0), optimizers.SGD(0.1, momentum=0.9), 0.5)
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        optimizer = ScheduledOptimizer(optimizers.SGD(0.1, momentum=0.9), models[session.rank], session=session)
        return run(models[session.rank], optimizer, float(session.rank))

    for ours in on_ranks(body):
        np.testing.assert_allclose(ours, plain, rtol=1e-9)


@pytest.mark.parametrize("compiled", [True, False])
def test_averages_that_the_loop_clips(compiled: bool) -> None:
    """And throws away where their norm is large, in some steps."""
    inputs, targets = numbers()

    def run(model: Any, optimizer: Any, *data: Any) -> tuple[list[bool], Any]:
        averaged = isinstance(optimizer, ScheduledOptimizer)
        variables = model.trainable_variables[1:]

        def step(batch: Any, target: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(batch, training=True) - target) ** 2)
            gradients = tape.gradient(loss, variables)
            if averaged:
                gradients = optimizer.average(gradients, variables)
            clipped, norm = tf.clip_by_global_norm(gradients, 0.5)
            is_used = norm < 1.2
            if is_used:
                (optimizer.apply_averages if averaged else optimizer.apply)(clipped, variables)
            return is_used

        step = tf.function(step) if compiled else step
        used = [bool(step(*each)) for each in zip(*data)]
        return used, np.concatenate([weights.ravel() for weights in model.get_weights()])

    alone = made(mlp, 0)
    adam = optimizers.Adam(0.05)
    adam.build(alone.trainable_variables)
    used, plain = run(alone, adam, inputs, targets)
    assert {True, False} == set(used)
    models = [made(mlp, rank) for rank in range(RANKS)]

    def body(session: Session) -> Any:
        optimizer = ScheduledOptimizer(optimizers.Adam(0.05), models[session.rank], session=session, per_parameter=False)
        return run(models[session.rank], optimizer, *share(session, inputs, targets))

    for ours in on_ranks(body):
        assert ours[0] == used
        np.testing.assert_allclose(ours[1], plain, rtol=1e-9)


def test_an_optimizer_of_ones_own() -> None:
    """Of which nothing is known: it is called once per step."""

    class Ours(optimizers.SGD):
        pass

    require_same_as_alone(one_layer, lambda: Ours(0.1), "eager")


def test_a_learning_rate_that_is_a_function() -> None:
    def rate() -> float:
        return 0.1

    require_same_as_alone(one_layer, lambda: optimizers.SGD(rate), "eager")


def test_hyper_parameters_of_numpy() -> None:
    """Which are no numbers of Python, count when they change too; so do those in lists and arrays."""

    class Ours(optimizers.SGD):
        factors = (1.0, np.ones(2))

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            super().update_step(gradient * self.factors[0] * self.factors[1].sum(), variable, learning_rate)

    class Warming(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.momentum = np.float32(0.5 + 0.1 * batch)
            self.model.optimizer.factors = [0.5, np.full(2, 0.1 * batch)]

    def run(model: Any, optimizer: Any, inputs: Any, targets: Any) -> Any:
        model.compile(optimizer, loss="mse", run_eagerly=True)
        data = tf.data.Dataset.from_tensor_slices((inputs, targets))
        model.fit(data, shuffle=False, verbose=0, callbacks=[Warming()])
        return model.get_weights()

    inputs, targets = numbers()
    plain = run(made(one_layer, 0), Ours(0.1, momentum=0.9), inputs, targets)
    models = [made(one_layer, 0) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        ours = Ours(0.1, momentum=0.9)
        optimizer = ScheduledOptimizer(ours, models[session.rank], session=session, per_parameter=True)
        return run(models[session.rank], optimizer, *share(session, inputs, targets))

    for ours, expected in zip(on_ranks(body)[0], plain):
        np.testing.assert_allclose(ours, expected, rtol=1e-9)


def test_constraints_and_regularizers() -> None:
    def make_model() -> Any:
        constrained = layers.Dense(8, kernel_constraint=keras.constraints.UnitNorm(), kernel_regularizer="l2")
        return keras.Sequential([keras.Input((6,)), constrained, layers.LayerNormalization(), layers.Dense(3)])

    require_same_as_alone(make_model, lambda: optimizers.Adam(0.01), "fit", run_eagerly=True)


def words(seed: int = 3) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 7, (STEPS, RANKS * ROWS, 5)), numbers()[1]


def recurrent() -> Any:
    return keras.Sequential([keras.Input((5,), dtype="int32"), layers.Embedding(7, 4), layers.LSTM(6), layers.Dense(3)])


def embedding() -> Any:
    return keras.Sequential([keras.Input((5,), dtype="int32"), layers.Embedding(7, 4), layers.Flatten(), layers.Dense(3)])


def test_recurrent_layers_and_sparse_gradients() -> None:
    inputs, targets = words()
    require_same_as_alone(recurrent, lambda: optimizers.SGD(0.1, momentum=0.9), "graph", data=(inputs[:3], targets[:3]))


def test_sparse_gradients_are_dense_to_the_optimizer() -> None:
    """Plain Keras takes the squares that Adam needs for each occurrence of a row, so it is given dense gradients here."""

    class Densified(optimizers.Adam):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply([tf.convert_to_tensor(gradient) for gradient in grads], trainable_variables)

    require_same_as_alone(embedding, lambda: optimizers.Adam(0.01), "eager", data=words(), alone=lambda: Densified(0.01))


def test_tied_variables_and_a_layer_called_twice() -> None:
    def make_model() -> Any:
        inputs = keras.Input((6,))
        twice = layers.Dense(6, activation="tanh")
        return keras.Model(inputs, layers.Dense(3)(twice(layers.Dropout(0.0)(twice(inputs)))))

    require_same_as_alone(make_model, lambda: optimizers.Adam(0.01), "graph")


def test_a_wire_type_rounds_gradients_and_nothing_else() -> None:
    """Not the learning rate, by which ranks see that they have the same."""
    inputs, targets = (array.astype("float32") for array in numbers())
    keras.config.set_floatx("float32")
    models = [made(one_layer, 0) for _ in range(RANKS + 1)]
    plain = train(models.pop(), optimizers.SGD(0.3), inputs, targets, "eager")

    def body(session: Session) -> Any:
        optimizer = ScheduledOptimizer(optimizers.SGD(0.3), models[session.rank], session=session)
        return train(models[session.rank], optimizer, *share(session, inputs, targets), "eager")

    first, second = on_ranks(body, wrap=lambda transport: WireTransport(transport, "bfloat16"))
    for ours, others, expected in zip(first, second, plain):
        assert ours.tobytes() == others.tobytes()
        assert 0 < np.abs(ours - expected).max() < 0.02


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "float16", "float32"])
def test_other_types(dtype: str) -> None:
    """Within what they round; 16 bits with the same inputs everywhere, so that both round alike."""

    def make_model() -> Any:
        keras.config.set_dtype_policy(dtype)
        try:
            return mlp()
        finally:
            keras.config.set_dtype_policy("float64")

    def make() -> Any:
        sgd = optimizers.SGD(0.1)
        return optimizers.LossScaleOptimizer(sgd, initial_scale=1024) if dtype == "float16" else sgd

    inputs, targets = numbers()
    if dtype != "float32":
        inputs[:, ROWS:], targets[:, ROWS:] = inputs[:, :ROWS], targets[:, :ROWS]
    tolerance = 1e-5 if dtype == "float32" else 0.05
    data = inputs.astype("float32"), targets.astype("float32")
    require_same_as_alone(make_model, make, "fit", data=data, tolerance=tolerance)
