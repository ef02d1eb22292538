"""Whoever reads variables, or writes them, finds the updates made; what a user reads between steps is as in plain Keras."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commsched import Session, UnsupportedError
from commsched.plugins.tensorflow import ScheduledOptimizer
from commsched.testing.check_plugin import Delayed

from .training import RANKS, STEPS, made, mlp, numbers, on_ranks, one_layer, share, step_of, train

INPUTS, TARGETS = numbers()

#: Keras gives this warning when it writes files, or the text of a variable.
keras_and_numpy_2 = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def after_each_step(
    read: Any, compiled: bool = True, make_optimizer: Any = adam, steps: int = STEPS
) -> tuple[list[Any], list[Any]]:
    """What ``read(model, optimizer)`` returns after each step: plain, and on rank 0 of two."""
    data = numbers(steps)

    def run(model: Any, optimizer: Any, inputs: Any, targets: Any) -> list[Any]:
        step = step_of(model, optimizer, compiled)
        values = []
        for batch, target in zip(inputs, targets):
            step(batch, target)
            values.append(read(model, optimizer))
        return values

    plain = run(made(mlp, 0), make_optimizer(), *data)
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> list[Any]:
        model = models[session.rank]
        optimizer = ScheduledOptimizer(make_optimizer(), model, session=session)
        return run(model, optimizer, *share(session, *data))

    return plain, on_ranks(body)[0]


def require_close(values: tuple[list[Any], list[Any]]) -> None:
    for plain, ours in zip(*values, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-9, atol=1e-12)


READERS: dict[str, Any] = {
    "numpy": lambda model, _: model.weights[0].numpy(),
    "the last layer first": lambda model, _: model.weights[-1].numpy(),
    "value": lambda model, _: model.weights[2].value.numpy(),
    "convert_to_tensor": lambda model, _: tf.convert_to_tensor(model.weights[0]).numpy(),
    "ops": lambda model, _: keras.ops.sum(model.weights[0] * 2).numpy(),
    "handle": lambda model, _: tf.raw_ops.ReadVariableOp(resource=model.weights[0].handle, dtype="float64").numpy(),
    "get_weights": lambda model, _: np.concatenate([weights.ravel() for weights in model.get_weights()]),
    "predict_on_batch": lambda model, _: model.predict_on_batch(INPUTS[0]),
    "call": lambda model, _: model(INPUTS[0]).numpy(),
    "deepcopy": lambda model, _: copy.deepcopy(model.weights[0]).numpy(),
    "iterations": lambda _, optimizer: optimizer.iterations.numpy(),
    "learning rate": lambda _, optimizer: float(optimizer.learning_rate),
    "optimizer state": lambda _, optimizer: np.concatenate([variable.numpy().ravel() for variable in optimizer.variables]),
}


def test_readers() -> None:
    """Each is the first reader after one of the steps."""
    turns: dict[int, Any] = {}  # by model

    def read(model: Any, optimizer: Any) -> Any:
        return next(turns.setdefault(id(model), iter(READERS.values())))(model, optimizer)

    plain, ours = after_each_step(read, compiled=False, steps=len(READERS))
    for name, expected, value in zip(READERS, plain, ours, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_finalizer_that_runs_in_a_thread_of_commsched_does_not_wait_there() -> None:
    """Updates are made by that thread. Python's garbage collector calls finalizers in whichever thread makes objects."""
    refused: list[str] = []

    def finalize(model: Any) -> None:
        try:
            model.weights[0].numpy()
        except UnsupportedError as error:
            refused.append(str(error))

    def body(session: Session) -> None:
        model = made(mlp, 0)
        optimizer = ScheduledOptimizer(adam(), model, session=session)
        step_of(model, optimizer, compiled=False)(INPUTS[0], TARGETS[0])
        thread = threading.Thread(target=finalize, args=(model,), name=f"commsched-update of rank {session.rank}")
        thread.start()
        thread.join()
        assert np.isfinite(model.weights[0].numpy()).all()

    on_ranks(body, wrap=lambda transport: Delayed(transport, transport.rank, 0.2))
    assert refused
    assert all("whose update is outstanding, is read in the thread commsched-update of rank" in text for text in refused)


def test_readers_in_graphs() -> None:
    """Also where one graph trains and reads, in any order, with a step that was traced before."""
    read: dict[int, Any] = {}

    def run(model: Any, optimizer: Any) -> Any:
        step = step_of(model, optimizer, compiled=True)

        @tf.function
        def steps(batch: Any, target: Any) -> Any:
            before = tf.identity(model.weights[0])
            step(batch, target)
            between = tf.identity(model.weights[0])
            step(batch, target)
            return before, between, tf.identity(model.weights[0]), tf.identity(optimizer.variables[-1])

        read[id(model)] = steps
        return steps

    def both(model: Any, optimizer: Any) -> Any:
        steps = read.get(id(model)) or run(model, optimizer)
        half = slice(0, 3)
        return np.concatenate([tensor.numpy().ravel() for tensor in steps(INPUTS[0][half], TARGETS[0][half])])

    require_close(after_each_step(both))


def test_hyper_parameters_count_as_they_are_at_apply() -> None:
    def change(model: Any, optimizer: Any) -> Any:
        optimizer.learning_rate = 0.5 / (1 + int(optimizer.iterations))  # counts from the next step on
        optimizer.momentum = 0.5 + 0.1 * (int(optimizer.iterations) // 3)
        return model.weights[0].numpy()

    require_close(after_each_step(change, compiled=False, make_optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9)))


@keras_and_numpy_2
def test_the_text_of_a_variable_has_its_update() -> None:
    """Keras takes the value for it otherwise than for all else."""
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> None:
        model = models[session.rank]
        step = step_of(model, ScheduledOptimizer(adam(), model, session=session), False)
        for batch, target in zip(*share(session, INPUTS[:3], TARGETS[:3])):
            step(batch, target)
            texts = [repr(variable) for variable in model.weights]
            assert "value=" in texts[0]
            model.get_weights()
            assert texts == [repr(variable) for variable in model.weights]

    on_ranks(body, wrap=lambda transport: Delayed(transport, transport.rank, 0.2))


def test_a_constraint_counts_from_the_step_after_it_is_set() -> None:
    def change(model: Any, optimizer: Any) -> Any:
        kernel = model.weights[0]
        steps = int(optimizer.iterations)
        if steps == 2:
            kernel.constraint = keras.constraints.MaxNorm(0.1)
        elif steps == 3:
            kernel.constraint.max_value = 0.05
        elif steps == 4:
            kernel.constraint = None
        return kernel.numpy()

    plain, ours = after_each_step(change, compiled=False)
    assert np.linalg.norm(plain[3], axis=0).max() < 0.051 < np.linalg.norm(plain[4], axis=0).max() < 1, "no constraint"
    require_close((plain, ours))


def test_the_updates_of_former_hyper_parameters_are_freed() -> None:
    """Each step has others here."""
    made: list[Any] = []
    freed: list[bool] = []

    def change(model: Any, optimizer: Any) -> Any:
        optimizer.momentum = 0.5 + 0.01 * int(optimizer.iterations)
        if (schedule := getattr(optimizer, "_schedule", None)) is not None:
            value = model.weights[0].numpy()  # no update is outstanding
            made.extend(weakref.ref(each) for each in schedule._updates.values())
            gc.collect()
            freed.append(made[0]() is None)
            return value
        return model.weights[0].numpy()

    sgd = keras.optimizers.SGD
    require_close(after_each_step(change, compiled=False, make_optimizer=lambda: sgd(0.1, momentum=0.9), steps=12))
    assert freed[-1]


def test_assigning_between_steps() -> None:
    def halve(model: Any, optimizer: Any) -> Any:
        model.weights[0].assign(model.weights[0] / 2)
        model.weights[-1].assign(np.ones(3))  # without reading it before
        model.set_weights(model.get_weights())
        return model.weights[0].numpy()

    require_close(after_each_step(halve))


@keras_and_numpy_2
def test_saved_models_and_checkpoints_are_plain(tmp_path: Path) -> None:
    def save(model: Any, optimizer: Any) -> Any:
        directory = tmp_path / str(id(model))
        directory.mkdir(exist_ok=True)
        if getattr(model, "optimizer", None) is None:
            model.compile(optimizer, loss="mse")
        model.save(directory / "model.keras")
        loaded = keras.models.load_model(directory / "model.keras")
        assert type(loaded.optimizer) is keras.optimizers.Adam
        model.save_weights(directory / "model.weights.h5")
        path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(directory / "checkpoint"))
        restored, fresh = made(mlp, 9), adam()
        fresh.build(restored.trainable_variables)
        tf.train.Checkpoint(model=restored, optimizer=fresh).restore(path).assert_existing_objects_matched()
        by_name = made(mlp, 9)
        by_name.load_weights(directory / "model.weights.h5")
        variables = [*loaded.weights, *restored.weights, *by_name.weights, *loaded.optimizer.variables, *fresh.variables]
        return np.concatenate([np.ravel(variable.numpy()) for variable in variables])

    require_close(after_each_step(save, compiled=False, steps=2))


@keras_and_numpy_2
def test_evaluation_and_callbacks_of_fit(tmp_path: Path) -> None:
    def fit(model: Any, optimizer: Any, inputs: Any, targets: Any) -> Any:
        model.compile(optimizer, loss="mse")
        best = keras.callbacks.ModelCheckpoint(tmp_path / f"{id(model)}.keras", monitor="val_loss")
        stop = keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True, monitor="val_loss")
        slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        history = model.fit(
            tf.data.Dataset.from_tensor_slices((inputs, targets)),
            shuffle=False,
            verbose=0,
            epochs=3,
            validation_data=(INPUTS[0], TARGETS[0]),
            callbacks=[best, stop, slower],
        )
        return np.concatenate([history.history["val_loss"], model.predict(INPUTS[0], verbose=0).ravel()])

    plain = fit(made(mlp, 0), adam(), INPUTS, TARGETS)
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        model = models[session.rank]
        model.compile(loss="mse")
        model.predict(INPUTS[0], verbose=0)  # a function that was traced before
        optimizer = ScheduledOptimizer(adam(), model, session=session)
        return fit(model, optimizer, *share(session, INPUTS, TARGETS))

    np.testing.assert_allclose(on_ranks(body)[0], plain, rtol=1e-9)


@pytest.mark.thaws
@pytest.mark.parametrize("compiled", [True, False])
def test_functions_that_were_traced_before(compiled: bool) -> None:
    """Which read what they captured then, and no Keras variable: called by themselves, by a step, and by a layer's model."""

    def make_model() -> Any:
        encoder = keras.Sequential([keras.Input((6,)), keras.layers.Dense(10)])
        return keras.Sequential([keras.Input((6,)), encoder, keras.layers.Dense(3)])

    def run(model: Any, wrap: Any, inputs: Any, targets: Any) -> Any:
        forward = tf.function(model)
        forward(inputs[0])
        encoder = model.layers[0]
        encoder.predict(INPUTS[0], verbose=0)
        optimizer = wrap(adam(), model)

        def step(batch: Any, target: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((forward(batch) - target) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        step = tf.function(step) if compiled else step
        values = []
        for batch, target in zip(inputs, targets):
            step(batch, target)
            values += [forward(INPUTS[0][:3]).numpy(), encoder.predict(INPUTS[0], verbose=0)]
        return np.concatenate([value.ravel() for value in values])

    plain = run(made(make_model, 0), lambda optimizer, _: optimizer, INPUTS, TARGETS)
    models = [made(make_model, 0) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        def wrap(optimizer: Any, model: Any) -> Any:
            session.gather("traced")
            if session.rank == 0:
                gc.freeze()  # as before a fork
            session.gather("frozen")
            return ScheduledOptimizer(optimizer, model, session=session)

        return run(models[session.rank], wrap, *share(session, INPUTS, TARGETS))

    for ours in on_ranks(body):
        np.testing.assert_allclose(ours, plain, rtol=1e-9)


def test_synchronize_in_a_graph() -> None:
    """Before it reads variables that no Keras variable was asked for."""

    def run(model: Any, wrap: Any, inputs: Any, targets: Any) -> Any:
        kernel, bias = raw = [variable.value for variable in model.trainable_variables]
        optimizer = wrap(keras.optimizers.SGD(0.1), model)

        @tf.function
        def step(batch: Any, target: Any) -> None:
            if isinstance(optimizer, ScheduledOptimizer):
                optimizer.synchronize()
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.tanh(tf.matmul(batch, kernel) + bias) - target) ** 2)
            optimizer.apply(tape.gradient(loss, raw), model.trainable_variables)

        for batch, target in zip(inputs, targets):
            step(batch, target)
        return np.concatenate([weights.ravel() for weights in model.get_weights()])

    plain = run(made(one_layer, 0), lambda optimizer, _: optimizer, INPUTS, TARGETS)
    models = [made(one_layer, 0) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        return run(
            models[session.rank],
            lambda optimizer, model: ScheduledOptimizer(optimizer, model, session=session),
            *share(session, INPUTS, TARGETS),
        )

    for ours in on_ranks(body):
        np.testing.assert_allclose(ours, plain, rtol=1e-9)


def test_new_shapes_trace_again() -> None:
    models = [made(mlp, 0) for _ in range(RANKS)]
    alone = made(mlp, 0)
    optimizer = keras.optimizers.SGD(0.1)
    for rows in (2, 4, 2):
        train(alone, optimizer, INPUTS[:2, :rows], TARGETS[:2, :rows], "graph")

    def body(session: Session) -> Any:
        model = models[session.rank]
        optimizer = ScheduledOptimizer(keras.optimizers.SGD(0.1), model, session=session)
        step = step_of(model, optimizer, compiled=True)
        for rows in (2, 4, 2):
            mine = slice(session.rank * rows // 2, (session.rank + 1) * rows // 2)
            for index in range(2):
                step(INPUTS[index, :rows][mine], TARGETS[index, :rows][mine])
        return model.get_weights()

    for ours, plain in zip(on_ranks(body)[1], alone.get_weights()):
        np.testing.assert_allclose(ours, plain, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_input_that_ends_or_a_step_that_fails_leaves_no_gate_locked() -> None:
    """Data that comes to its end stops a graph whose gates are just being passed."""
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> float:
        model = models[session.rank]
        model.compile(ScheduledOptimizer(adam(), model, session=session), loss="mse")
        endless = tf.data.Dataset.from_generator(
            lambda: iter([(INPUTS[0, :3], TARGETS[0, :3])]),
            output_signature=(tf.TensorSpec((3, 6), tf.float64), tf.TensorSpec((3, 3), tf.float64)),
        )
        for _ in range(10):  # epochs of a length that Keras does not know: each ends by an error within the graph
            model.fit(endless, verbose=0, shuffle=False)
            with pytest.raises(Exception, match=r"[Ii]ncompatible|[Mm]atri"):
                model.predict_on_batch(np.ones((2, 5)))
        return float(np.sum(model.predict_on_batch(INPUTS[0])))

    first, second = on_ranks(body)
    assert first == second


def test_two_optimizers_take_turns() -> None:
    """A generator and its critic, as a GAN has them: each step reads the other's variables."""

    def run(first: Any, second: Any, wrap: Any, inputs: Any, targets: Any) -> Any:
        optimizers = [wrap(keras.optimizers.SGD(0.1), first), wrap(keras.optimizers.Adam(0.01), second)]

        def step(batch: Any, target: Any) -> None:
            for model, optimizer in zip((first, second), optimizers):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((second(keras.ops.tile(first(batch), (1, 2))) - target) ** 2)
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        compiled = tf.function(step)
        for batch, target in zip(inputs, targets):
            compiled(batch, target)
        return np.concatenate([weights.ravel() for weights in [*first.get_weights(), *second.get_weights()]])

    plain = run(made(mlp, 0), made(mlp, 1), lambda optimizer, _: optimizer, INPUTS, TARGETS)
    pairs = [(made(mlp, 0), made(mlp, 1)) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        return run(
            *pairs[session.rank],
            lambda optimizer, model: ScheduledOptimizer(optimizer, model, session=session),
            *share(session, INPUTS, TARGETS),
        )

    for ours in on_ranks(body):
        np.testing.assert_allclose(ours, plain, rtol=1e-9)


def test_a_second_optimizer_while_updates_of_the_first_are_outstanding() -> None:
    """Of the same model, for a layer that is trained from then on: it begins with updated weights."""

    def run(model: Any, wrap: Any, inputs: Any, targets: Any) -> Any:
        model.layers[1].trainable = False
        optimizers = [wrap(keras.optimizers.SGD(0.1), model)]

        def step(batch: Any, target: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(batch) - target) ** 2)
            variables = [layer.trainable_variables for layer in model.layers[: len(optimizers)]]
            gradients = tape.gradient(loss, variables)
            for optimizer, mine, theirs in zip(optimizers, gradients, variables):
                optimizer.apply(mine, theirs)

        step(inputs[0], targets[0])
        model.layers[1].trainable = True
        second = keras.optimizers.SGD(0.1)
        second.build(model.layers[1].trainable_variables)
        optimizers.append(wrap(second, model))
        for batch, target in zip(inputs[1:], targets[1:]):
            step(batch, target)
        return np.concatenate([weights.ravel() for weights in model.get_weights()])

    plain = run(made(mlp, 0), lambda optimizer, _: optimizer, INPUTS, TARGETS)
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        return run(
            models[session.rank],
            lambda optimizer, model: ScheduledOptimizer(optimizer, model, session=session),
            *share(session, INPUTS, TARGETS),
        )

    for ours in on_ranks(body, wrap=lambda transport: Delayed(transport, transport.rank, 0.05)):
        np.testing.assert_allclose(ours, plain, rtol=1e-9)
