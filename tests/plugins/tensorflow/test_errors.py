"""What cannot be is refused by name, on all ranks, and nobody hangs."""

from __future__ import annotations

import builtins
import gc
import importlib
import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from commsched import (
    ClosedError,
    CommschedError,
    ConfigError,
    ManifestMismatch,
    PeerLost,
    Session,
    TransportError,
    UnsupportedError,
)
from commsched.plugins.tensorflow import ScheduledOptimizer
from commsched.plugins.tensorflow.step import Step
from commsched.plugins.tensorflow.updater import Updater
from commsched.session.local import local_sessions
from commsched.testing.world import run_world

from .test_order import Holding
from .training import RANKS, made, mlp, numbers, on_ranks, one_layer, share, step_of, train

INPUTS, TARGETS = numbers(2)


def sgd() -> Any:
    return keras.optimizers.SGD(0.1)


def refused(
    error: type[BaseException] | tuple[type[BaseException], ...], match: str, body: Callable[[Session, Any], Any]
) -> None:
    """``body(session, model)`` raises on every rank."""
    models = [made(mlp, 0) for _ in range(RANKS)]

    def run(session: Session) -> None:
        with pytest.raises(error, match=match):
            body(session, models[session.rank])
        session.gather("all have seen it")
        session.abort("refused")

    on_ranks(run)


def gradients_of(model: Any) -> list[Any]:
    return [tf.ones_like(variable) for variable in model.trainable_variables]


def test_it_is_a_plain_optimizer_for_one_rank() -> None:
    (session,) = local_sessions(1)
    with session:
        plain, ours = made(mlp, 0), made(mlp, 0)
        optimizer = ScheduledOptimizer(keras.optimizers.Adam(0.01), ours, session=session)
        adam = keras.optimizers.Adam(0.01)
        expected = train(plain, adam, INPUTS, TARGETS, "eager")
        assert all((a == b).all() for a, b in zip(train(ours, optimizer, INPUTS, TARGETS, "eager"), expected))
        assert type(ours.weights[0]) is type(plain.weights[0])
        gradients = gradients_of(ours)
        assert all(average is gradient for average, gradient in zip(optimizer.average(gradients), gradients))
        optimizer.apply_averages(gradients)
        adam.apply(gradients, plain.trainable_variables)
        assert all((a == b).all() for a, b in zip(ours.get_weights(), plain.get_weights()))
        optimizer.synchronize()
        optimizer.detach()


def test_without_tensorflow_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("commsched.plugins.tensorflow")]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tensorflow":
            raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "commsched\[tensorflow\]"'):
        importlib.import_module("commsched.plugins.tensorflow")


def test_wrong_arguments() -> None:
    model = made(mlp, 0)
    (session,) = local_sessions(1)
    with session:
        with pytest.raises(ConfigError, match="'adam' is not an optimizer of Keras"):
            ScheduledOptimizer("adam", model, session=session)
        with pytest.raises(ConfigError, match="is not a model of Keras"):
            ScheduledOptimizer(sgd(), "model", session=session)
        with pytest.raises(ConfigError, match=r"the optimizer comes first: ScheduledOptimizer\(optimizer, model\)"):
            ScheduledOptimizer(model, sgd(), session=session)
        with pytest.raises(ConfigError, match="is a ScheduledOptimizer already"):
            ScheduledOptimizer(ScheduledOptimizer(sgd(), model, session=session), model, session=session)


def test_an_optimizer_that_changes_gradients_before_apply() -> None:
    class Clips(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any) -> None:
            super().apply_gradients([(tf.clip_by_norm(gradient, 1.0), variable) for gradient, variable in grads_and_vars])

    refused(
        UnsupportedError,
        "Clips has an apply_gradients of its own, which would see the gradients of one rank: override apply",
        lambda session, model: ScheduledOptimizer(Clips(0.1), model, session=session),
    )


def test_a_model_that_is_not_built() -> None:
    def body(session: Session, _: Any) -> None:
        optimizer = sgd()
        try:
            ScheduledOptimizer(optimizer, keras.Sequential([layers.Dense(2)]), session=session)
        finally:
            assert type(optimizer) is keras.optimizers.SGD

    refused(UnsupportedError, r"the model 'sequential.*' has no trainable variables yet.*call model\.build\(\)", body)


def test_different_models() -> None:
    def body(session: Session, _: Any) -> None:
        ScheduledOptimizer(sgd(), models[session.rank], session=session)

    models = [keras.Sequential([keras.Input((6,)), layers.Dense(2 + rank)]) for rank in range(2)]
    refused(
        ManifestMismatch,
        r"initial weights: '0 sequential/dense/kernel' float64\[6, 2\] on rank 0 but .*\[6, 3\] on rank 1",
        body,
    )


def test_different_optimizers() -> None:
    refused(
        ManifestMismatch,
        r"the optimizer's 'momentum' is 0\.0 on rank 0 but 0\.1 on rank 1",
        lambda session, model: ScheduledOptimizer(
            keras.optimizers.SGD(0.1, momentum=session.rank / 10), model, session=session
        ),
    )


def test_weight_decay_of_other_variables() -> None:
    def body(session: Session, model: Any) -> None:
        optimizer = keras.optimizers.AdamW(0.1)
        optimizer.exclude_from_weight_decay(var_names=["bias"] if session.rank else ["kernel"])
        ScheduledOptimizer(optimizer, model, session=session)

    refused(ManifestMismatch, r"'variables excluded from weight decay' is \['0 .*kernel'.* on rank 0 but \['1 .*bias'", body)


def test_different_schedules() -> None:
    decay = keras.optimizers.schedules.ExponentialDecay
    refused(
        ManifestMismatch,
        r"the optimizer's 'learning_rate' is .* on rank 0 but .* on rank 1",
        lambda session, model: ScheduledOptimizer(
            keras.optimizers.SGD(decay(0.1, 1 + session.rank, 0.5)), model, session=session
        ),
    )


def test_a_variable_of_another_model() -> None:
    others = [made(mlp, 1) for _ in range(RANKS)]

    def built_for_another(session: Session, model: Any) -> None:
        optimizer = sgd()
        optimizer.build(others[session.rank].trainable_variables)
        ScheduledOptimizer(optimizer, model, session=session)

    def given_to_apply(session: Session, model: Any) -> None:
        optimizer = ScheduledOptimizer(sgd(), model, session=session)
        other = others[session.rank]
        optimizer.apply(gradients_of(other), other.trainable_variables)

    refused(ManifestMismatch, r"variable 'sequential.*/dense.*/kernel' of the optimizer is not in the model", built_for_another)
    refused(UnsupportedError, r"variable 'sequential.*/kernel' is not one of those that are averaged", given_to_apply)


def test_a_model_whose_part_another_has() -> None:
    def body(session: Session, model: Any) -> None:
        ScheduledOptimizer(sgd(), model, session=session)
        model.layers[0].trainable = False
        ScheduledOptimizer(sgd(), model, session=session)

    refused(ConfigError, r"belongs to another ScheduledOptimizer; call that one's detach\(\) first", body)


def test_ranks_that_freeze_other_layers_of_the_same_shape() -> None:
    """Their names, without the numbers that Keras gives them, are equal, and so are their shapes."""

    def body(session: Session, model: Any) -> None:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(6), layers.Dense(6)])
        model.layers[session.rank].trainable = False
        ScheduledOptimizer(sgd(), model, session=session)

    said = "the optimizer trains variable 2 .*dense/kernel of the model on rank 0 but variable 0 .*dense/kernel of the model on"
    refused(ManifestMismatch, said, body)


def test_ranks_that_freeze_another_number_of_layers() -> None:
    def body(session: Session, model: Any) -> None:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(6), layers.Dense(6)])
        model.layers[1].trainable = session.rank == 0
        ScheduledOptimizer(sgd(), model, session=session)

    refused(ManifestMismatch, "variable 2 .*dense/kernel of the model on rank 0 but no further variable on rank 1", body)


@pytest.mark.parametrize("differs", ["hyper-parameters", "owner"])
def test_a_second_optimizer_that_is_refused_leaves_the_first_as_it_is(differs: str) -> None:
    models, others = [made(mlp, 0) for _ in range(RANKS)], [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        model, mine = models[session.rank], share(session, INPUTS, TARGETS)
        first = ScheduledOptimizer(sgd(), model, session=session)
        if differs == "owner":  # the first has made no step, and so has told nobody of its end
            other = others[session.rank] if session.rank else model
            said = "the optimizer's variables belong to an earlier ScheduledOptimizer on rank 0 but no other one on rank 1"
            with pytest.raises(ConfigError, match=said):
                ScheduledOptimizer(sgd(), other, session=session)
        else:
            train(model, first, *mine, "eager")
            second = keras.optimizers.SGD(0.1, momentum=0.5 + 0.1 * session.rank)
            with pytest.raises(ManifestMismatch, match="the optimizer's 'momentum' is"):
                ScheduledOptimizer(second, model, session=session)
        return train(model, first, *mine, "eager")

    plain = made(mlp, 0)
    for _ in range(1 if differs == "owner" else 2):
        expected = train(plain, sgd(), INPUTS, TARGETS, "eager")
    for weights in on_ranks(body):
        for mine, values in zip(weights, expected):
            np.testing.assert_allclose(mine, values)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_second_optimizer_on_one_rank_while_others_train_on_with_the_first(steps: int) -> None:
    """Nobody waits for ever. Either rank may be the first to find it."""
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> str:
        model = models[session.rank]
        first = ScheduledOptimizer(sgd(), model, session=session)
        for _ in range(steps):
            first.apply(gradients_of(model))

        def go_on() -> None:
            if session.rank == 0:
                ScheduledOptimizer(sgd(), model, session=session)
            for _ in range(3):
                first.apply(gradients_of(model))

        with pytest.raises((CommschedError, tf.errors.OpError)) as raised:
            go_on()
        failure = str(session.failure or raised.value)
        session.abort(failure)
        return failure

    named = '"makes another ScheduledOptimizer" on rank 0 but "a step" on rank 1' if steps else "makes a ScheduledOptimizer"
    said = on_ranks(body)
    assert all(named in each for each in said), said


def test_a_model_that_was_detached_is_let_go_of() -> None:
    held: list[weakref.ref[Any]] = []

    def body(session: Session) -> None:
        model = made(one_layer, 0)
        optimizer = ScheduledOptimizer(sgd(), model, session=session)
        optimizer.apply(gradients_of(model))
        optimizer.detach()
        held.append(weakref.ref(model.trainable_variables[0].value))
        del model, optimizer
        session.gather("both have detached")
        keras.backend.clear_session()
        gc.collect()
        assert [each() for each in held] == [None] * RANKS

    on_ranks(body)


def test_a_second_optimizer_for_the_same_variables() -> None:
    """It takes over, as where a notebook's cell is run again; the first refuses to go on."""
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        model = models[session.rank]
        mine = share(session, INPUTS, TARGETS)
        ScheduledOptimizer(keras.optimizers.SGD(7.0), model, session=session)  # not used at all
        first = ScheduledOptimizer(sgd(), model, session=session)
        train(model, first, *mine, "graph")
        model.compile(first, loss="mse")
        second = ScheduledOptimizer(sgd(), model, session=session)
        with pytest.raises(UnsupportedError, match="another ScheduledOptimizer was made for the same variables: use that one"):
            first.apply(gradients_of(model))
        with pytest.raises(UnsupportedError, match="was compiled with another optimizer than the one"):
            model.train_on_batch(INPUTS[0], TARGETS[0])
        return train(model, second, *mine, "fit")

    ours, others = on_ranks(body)
    plain = made(mlp, 0)
    train(plain, sgd(), INPUTS, TARGETS, "eager")
    for mine, theirs, expected in zip(ours, others, train(plain, sgd(), INPUTS, TARGETS, "eager")):
        assert (mine == theirs).all()
        np.testing.assert_allclose(mine, expected)


def test_a_variable_that_was_frozen() -> None:
    def body(session: Session, model: Any) -> None:
        model.layers[0].trainable = False
        optimizer = ScheduledOptimizer(sgd(), model, session=session)
        train(model, optimizer, *share(session, INPUTS, TARGETS), "graph")
        model.layers[0].trainable = True
        train(model, optimizer, *share(session, INPUTS, TARGETS), "graph")

    refused(UnsupportedError, r"variable '.*kernel' is not one of those that are averaged, since it was not trainable", body)


def test_freezing_later_skips_the_variable() -> None:
    """All ranks alike; its slots and weights stay as they are."""
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        model = models[session.rank]
        optimizer = ScheduledOptimizer(keras.optimizers.Adam(0.1), model, session=session)
        train(model, optimizer, *share(session, INPUTS, TARGETS), "eager")
        model.layers[0].trainable = False
        before = model.layers[0].kernel.numpy()
        last = model.layers[1].kernel.numpy()
        train(model, optimizer, *share(session, INPUTS, TARGETS), "graph")
        assert (model.layers[0].kernel.numpy() == before).all()
        return np.abs(model.layers[1].kernel.numpy() - last).max()

    assert min(on_ranks(body)) > 0.01


class Partly(keras.Model):
    """Whose second branch only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = layers.Dense(3), layers.Dense(3)
        self.both = True

    def build(self, shape: Any) -> None:
        self.one.build(shape)
        self.two.build(shape)
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.one(inputs) + self.two(inputs) if self.both else self.one(inputs)


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize("compiled", [True, False])
def test_a_gradient_that_only_one_rank_has(compiled: bool) -> None:
    """The other contributes zeros, as on the joint batch; with an optimizer that needs all at once it is refused."""
    models = [Partly() for _ in range(RANKS)]
    for model in models:
        model.build((None, 6))
        model.set_weights([np.full(weights.shape, 0.1) for weights in model.get_weights()])
    models[1].both = False

    def apply(session: Session, optimizer: Any) -> None:
        variables = models[session.rank].trainable_variables[: 4 - 2 * session.rank]

        def step() -> None:
            optimizer.apply([tf.ones_like(variable) for variable in variables], variables)

        (tf.function(step) if compiled else step)()

    def body(session: Session) -> Any:
        model = models[session.rank]
        optimizer = ScheduledOptimizer(sgd(), model, session=session)
        apply(session, optimizer)
        apply(session, optimizer)  # zeros again, where the average of the step before lies
        optimizer.detach()
        return model.two.kernel.numpy()

    for weights in on_ranks(body):
        np.testing.assert_allclose(weights, 0.1 - 2 * 0.1 * 0.5, atol=1e-6)

    def at_once(session: Session, _: Any) -> None:
        apply(session, ScheduledOptimizer(keras.optimizers.Nadam(0.1), models[session.rank], session=session))

    refused(
        (UnsupportedError, tf.errors.UnknownError),
        r"only some ranks have a gradient of '.*kernel'.*updates all variables at once",
        at_once,
    )


def test_no_gradient_at_all() -> None:
    refused(
        ValueError,
        "No gradients provided for any variable",
        lambda session, model: ScheduledOptimizer(sgd(), model, session=session).apply([None] * 4),
    )


def test_a_gradient_of_another_shape() -> None:
    refused(
        UnsupportedError,
        r"the gradient of '.*bias' has shape \[1\], the variable \[3\]",
        lambda session, model: ScheduledOptimizer(sgd(), model, session=session).apply([*gradients_of(model)[:-1], tf.ones(1)]),
    )


def test_a_variable_twice() -> None:
    def body(session: Session, model: Any) -> None:
        twice = [*model.trainable_variables, model.trainable_variables[0]]
        ScheduledOptimizer(sgd(), model, session=session).apply([tf.ones_like(each) for each in twice], twice)

    refused(UnsupportedError, "each variable once", body)


def test_a_type_that_cannot_be_averaged() -> None:
    class Complex(layers.Layer):
        def build(self, shape: Any) -> None:
            self.phase = self.add_weight(shape=(2,), dtype="complex64", initializer="zeros", name="phase")

        def call(self, inputs: Any) -> Any:
            return inputs * tf.cast(tf.math.real(self.phase), inputs.dtype)

    models = [keras.Sequential([keras.Input((2,)), Complex()]) for _ in range(RANKS)]

    def body(session: Session, _: Any) -> None:
        model = models[session.rank]
        optimizer = ScheduledOptimizer(sgd(), model, session=session)
        optimizer.apply([tf.zeros(2, tf.complex64)])

    refused(UnsupportedError, r"variable '.*phase' is complex64; only gradients of float16, bfloat16, float32, float64", body)


def test_a_variable_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(variable: Any) -> Any:
        return SimpleNamespace(dtype=tf.float32, device="/job:localhost/replica:0/task:0/device:GPU:0")

    def body(session: Session, model: Any) -> None:
        ScheduledOptimizer(sgd(), model, session=session).apply(gradients_of(model))

    monkeypatch.setattr("commsched.plugins.tensorflow.exchange.own_value", moved)
    said = (
        r"variable '.*' is on /job:localhost/replica:0/task:0/device:GPU:0; the TensorFlow plugin trains on the CPU: begin the"
    )
    refused(UnsupportedError, said, body)


def test_xla() -> None:
    def fit(session: Session, model: Any) -> None:
        model.compile(ScheduledOptimizer(sgd(), model, session=session), loss="mse", jit_compile=True)
        model.fit(*(array.reshape(-1, array.shape[-1]) for array in share(session, INPUTS, TARGETS)), verbose=0)

    def own_step(session: Session, model: Any) -> None:
        step = step_of(model, ScheduledOptimizer(sgd(), model, session=session), compiled=False)
        tf.function(step, jit_compile=True)(INPUTS[0], TARGETS[0])

    def forward(session: Session, model: Any) -> None:
        optimizer = ScheduledOptimizer(sgd(), model, session=session)
        compiled = tf.function(lambda inputs: model(inputs), jit_compile=True)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(compiled(INPUTS[0]))
        optimizer.apply(tape.gradient(loss, model.trainable_variables))

    def update(session: Session, model: Any) -> None:
        optimizer = ScheduledOptimizer(sgd(), model, session=session)
        tf.function(optimizer.apply, jit_compile=True)(gradients_of(model))

    for compiled in (fit, own_step, forward):
        refused(UnsupportedError, r"kernel:0' is read in a function that XLA compiles.*commsched.*jit_compile=False", compiled)
    refused(UnsupportedError, r"apply\(\) is called in a function that XLA compiles.*commsched.*jit_compile=False", update)


def test_a_strategy_of_tensorflow() -> None:
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")

    def body(session: Session, model: Any) -> None:
        with strategy.scope():
            ScheduledOptimizer(sgd(), model, session=session)

    refused(UnsupportedError, "OneDeviceStrategy is active", body)


def test_a_loss_scale_around_it() -> None:
    def body(session: Session, model: Any) -> None:
        inner = ScheduledOptimizer(sgd(), model, session=session)
        model.compile(keras.optimizers.LossScaleOptimizer(inner), loss="mse")
        model.fit(*(array.reshape(-1, array.shape[-1]) for array in share(session, INPUTS, TARGETS)), verbose=0)

    refused(UnsupportedError, r"ScheduledOptimizer\(LossScaleOptimizer\(optimizer\), model\)", body)


@pytest.mark.parametrize(
    "clip",
    [
        lambda gradients: tf.clip_by_global_norm(gradients, 1.0)[0],
        lambda gradients: [tf.clip_by_norm(gradient, 1.0) for gradient in gradients],
        lambda gradients: [*gradients[:-1], keras.ops.clip(gradients[-1], -1.0, 1.0)],
        lambda gradients: [tf.clip_by_norm(tf.IndexedSlices(gradients[0], range(6), [6, 10]), 1.0), *gradients[1:]],
    ],
)
def test_gradients_that_were_clipped_before_apply(clip: Callable[[list[Any]], list[Any]]) -> None:
    def body(session: Session, model: Any) -> None:
        optimizer = ScheduledOptimizer(sgd(), model, session=session)
        with tf.name_scope("ours"):
            tf.function(lambda: optimizer.apply(clip(gradients_of(model))), autograph=False)()

    refused(UnsupportedError, r"was clipped by clip_by_\w+ before it is averaged: .*average\(\)", body)


def test_a_model_that_clips_within() -> None:
    """Is trained: the names of its operations say that they are in the tape."""
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> None:
        model = models[session.rank]
        optimizer = ScheduledOptimizer(sgd(), model, session=session)

        def step() -> None:
            with tf.GradientTape() as tape:
                outputs = model(INPUTS[0])
                loss = tf.reduce_sum(tf.clip_by_norm(outputs, 1.0) ** 2 + tf.clip_by_value(outputs, -1.0, 1.0))
            optimizer.apply(tape.gradient(loss, model.trainable_variables))

        tf.function(step)()

    on_ranks(body)


@pytest.mark.parametrize("call", ["average", "apply_averages"])
def test_averages_of_an_optimizer_that_updates_each_variable_by_itself(call: str) -> None:
    def body(session: Session, model: Any) -> None:
        getattr(ScheduledOptimizer(sgd(), model, session=session), call)(gradients_of(model))

    refused(UnsupportedError, rf"{call}\(\) is for all averages at once.*per_parameter=False\)", body)


def test_a_rank_that_says_so_clips_its_own() -> None:
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> None:
        optimizer = ScheduledOptimizer(sgd(), models[session.rank], session=session)
        tf.function(
            lambda: optimizer.apply([tf.identity(tf.clip_by_norm(each, 1.0)) for each in gradients_of(models[session.rank])]),
            autograph=False,
        )()

    on_ranks(body)


def test_global_clipping_that_is_set_later() -> None:
    def body(session: Session, model: Any) -> None:
        optimizer = ScheduledOptimizer(sgd(), model, session=session)
        optimizer.global_clipnorm = 1.0
        optimizer.apply(gradients_of(model))

    refused(UnsupportedError, "global_clipnorm needs the norm of all gradients, which must be set before", body)


@pytest.mark.parametrize("within_another", [False, True])
def test_a_step_that_was_traced_before(within_another: bool) -> None:
    def body(session: Session, model: Any) -> None:
        optimizer = sgd()
        step = step_of(model, optimizer, compiled=True)
        step(INPUTS[0], TARGETS[0])
        optimizer = ScheduledOptimizer(optimizer, model, session=session)
        before = model.get_weights()
        try:
            (tf.function(lambda *batch: step(*batch)) if within_another else step)(INPUTS[0], TARGETS[0])
        finally:
            assert all((a == b).all() for a, b in zip(before, model.get_weights()))

    refused(UnsupportedError, "was traced before ScheduledOptimizer was made, so it would train without averaging", body)


def test_exporting_needs_detach(tmp_path: Any) -> None:
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> None:
        model = models[session.rank]
        optimizer = ScheduledOptimizer(sgd(), model, session=session)
        train(model, optimizer, *share(session, INPUTS, TARGETS), "graph")
        weights = model.get_weights()
        with pytest.raises(UnsupportedError, match=r"to export a model, call optimizer\.detach\(\) before"):
            model.export(tmp_path / f"not{session.rank}", verbose=False)
        optimizer.detach()
        assert type(optimizer) is not keras.optimizers.SGD  # its class stays, and is plain
        model.export(tmp_path / str(session.rank), verbose=False)
        loaded = tf.saved_model.load(str(tmp_path / str(session.rank)))
        np.testing.assert_allclose(loaded.serve(INPUTS[0]), model(INPUTS[0]))
        train(model, optimizer, *share(session, INPUTS, TARGETS), "eager")  # alone
        assert any((a != b).any() for a, b in zip(weights, model.get_weights()))

    on_ranks(body)


def test_an_optimizer_that_was_detached_may_average_again() -> None:
    """And refuses again what was traced before the first time."""
    models = [made(one_layer, 0) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        model = models[session.rank]
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        earlier = step_of(model, optimizer, compiled=True)
        earlier(INPUTS[0], TARGETS[0])
        mine = share(session, INPUTS, TARGETS)
        for _ in range(2):
            optimizer = ScheduledOptimizer(optimizer, model, session=session)
            with pytest.raises(ConfigError, match="is a ScheduledOptimizer already"):
                ScheduledOptimizer(optimizer, model, session=session)
            with pytest.raises(UnsupportedError, match="was traced before ScheduledOptimizer was made"):
                earlier(INPUTS[0], TARGETS[0])
            weights = train(model, optimizer, *mine, "eager")
            optimizer.detach()
        earlier(INPUTS[0], TARGETS[0])
        return weights

    first, second = on_ranks(body)
    plain, optimizer = made(one_layer, 0), keras.optimizers.SGD(0.1, momentum=0.9)
    train(plain, optimizer, INPUTS[:1], TARGETS[:1], "eager")
    expected = [train(plain, optimizer, INPUTS, TARGETS, "eager") for _ in range(2)][1]
    for ours, others, alone in zip(first, second, expected):
        assert ours.tobytes() == others.tobytes()
        np.testing.assert_allclose(ours, alone, rtol=1e-9)


def test_after_the_end() -> None:
    models = [made(mlp, 0) for _ in range(RANKS)]
    optimizers: dict[int, Any] = {}

    def body(session: Session) -> None:
        optimizers[session.rank] = ScheduledOptimizer(sgd(), models[session.rank], session=session)
        train(models[session.rank], optimizers[session.rank], *share(session, INPUTS, TARGETS), "graph")

    on_ranks(body)
    assert np.isfinite(models[0].predict_on_batch(INPUTS[0])).all()
    with pytest.raises(ClosedError, match="was detached, or its session is closed"):
        optimizers[0].apply(gradients_of(models[0]))


@pytest.mark.parametrize("closes", [True, False])
def test_nothing_keeps_a_model_after_its_session(closes: bool) -> None:
    """Neither TensorFlow, which never forgets what an operation calls in Python, nor what guards variables."""

    def body(session: Session) -> Any:
        model = made(one_layer, 0)
        optimizer = ScheduledOptimizer(sgd(), model, session=session)
        train(model, optimizer, *share(session, INPUTS, TARGETS), "graph")
        if not closes:
            session.gather("trained")
            session.abort("it was enough")
        return weakref.ref(optimizer)

    optimizers = on_ranks(body)
    gc.collect()
    assert [known() for known in optimizers] == [None, None]


# --- ranks that end ---


@pytest.mark.parametrize(
    ("way", "optimizer"),
    [
        ("graph", keras.optimizers.SGD),
        ("graph", keras.optimizers.Nadam),
        ("fit", keras.optimizers.SGD),
        ("eager", keras.optimizers.Nadam),
    ],
)
def test_a_rank_that_leaves_is_named(way: str, optimizer: Any) -> None:
    """The user's thread of the other raises, in the step or at the next read, and does not wait for ever."""
    models = [made(mlp, 0) for _ in range(RANKS)]
    sessions = local_sessions(RANKS)

    def body(rank: int) -> None:
        model = models[rank]
        scheduled = ScheduledOptimizer(optimizer(0.1), model, session=sessions[rank])
        train(model, scheduled, *share(sessions[rank], INPUTS, TARGETS), way)
        sessions[rank].gather("trained")
        if rank == 1:
            sessions[rank].abort("it was enough")
            return
        errors = (TransportError, PeerLost, tf.errors.UnknownError, tf.errors.InvalidArgumentError)
        with pytest.raises(errors, match="it was enough"):
            train(model, scheduled, *share(sessions[rank], INPUTS, TARGETS), way)
        with pytest.raises(errors, match="it was enough"):
            scheduled.apply(gradients_of(model))

    try:
        run_world(RANKS, body, timeout_seconds=300)
    finally:
        for session in sessions:
            session.abort("the test is over")


def test_a_failure_opens_no_gate() -> None:
    """After a failure a variable whose update is outstanding can be read neither eagerly nor in a graph, and a graph that waits
    for it is told."""
    models = [made(mlp, 0) for _ in range(RANKS)]
    sessions = local_sessions(RANKS, wrap_transport=lambda transport: Holding(transport, "kernel"))  # type: ignore[arg-type, return-value]
    waits: list[Callable[[], bool]] = []

    def body(rank: int) -> None:
        model = models[rank]
        scheduled = ScheduledOptimizer(sgd(), model, session=sessions[rank])
        predict = tf.function(model)
        predict(INPUTS[0])
        scheduled.apply(gradients_of(model))
        if rank == 0:
            signals = scheduled._schedule._updater.signals
            waits.append(lambda: any(waiting.numpy() for waiting in signals._waiting))
        sessions[rank].gather("one step")
        if rank == 1:
            for _ in range(12_000):
                if waits[0]():
                    break
                time.sleep(0.005)
            sessions[1].abort("it was enough")
            return
        for _ in range(2):  # it waits when the failure comes; and it begins after that
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"it was enough; an update .* last checkpoint"):
                predict(INPUTS[0])
        for _ in range(2):  # as in an except handler, to save it
            with pytest.raises(TransportError, match="it was enough") as lost:
                model.get_weights()
            assert sum("go on from the last checkpoint" in note for note in lost.value.__notes__) == 1
        with pytest.raises(TransportError, match="it was enough"):
            train(model, scheduled, INPUTS, TARGETS, "eager")

    try:
        run_world(RANKS, body, timeout_seconds=300)
    finally:
        for session in sessions:
            session.abort("the test is over")


def test_who_catches_a_failure_is_told_it_again_at_the_end_and_nothing_else() -> None:
    """The step that it broke off is no second cause."""

    class Failing(Holding):
        def hold(self, task: Any, completion: Any) -> None:
            super().hold(task, completion)
            sessions[self.rank].report(TransportError("it was enough"))

    models = [made(mlp, 0) for _ in range(RANKS)]
    sessions = local_sessions(RANKS, wrap_transport=lambda transport: Failing(transport, "kernel"))  # type: ignore[arg-type, return-value]

    def body(rank: int) -> None:
        scheduled = ScheduledOptimizer(keras.optimizers.Nadam(0.1), models[rank], session=sessions[rank])
        for end in (lambda: scheduled.apply(gradients_of(models[rank])), scheduled.detach, sessions[rank].close):
            with pytest.raises(TransportError, match="it was enough"):
                end()

    run_world(RANKS, body, timeout_seconds=300)


def test_an_update_that_raises_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Updater._update

    def broken(self: Any, *rest: Any) -> None:
        if self._session.rank == 1:
            raise ArithmeticError("a bad number")
        real(self, *rest)

    monkeypatch.setattr(Updater, "_update", broken)
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> None:
        model = models[session.rank]
        ScheduledOptimizer(sgd(), model, session=session).apply(gradients_of(model))
        with pytest.raises(TransportError, match=r"rank 1: the update of 'sequential.*' raised ArithmeticError: a bad number"):
            model.get_weights()
        session.abort("it was seen")

    on_ranks(body)


@pytest.mark.parametrize("make_optimizer", [sgd, lambda: keras.optimizers.Nadam(0.1)])
def test_who_waits_for_long_in_a_graph_is_told_for_whom(
    make_optimizer: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 comes late. A graph waits without Python, so the thread that updates says it. The time before the step, in which a
    loop may evaluate, is no wait."""

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if re.search("rank 0 has waited [0-9] s .*rank 1 has not begun step 1", record.getMessage()):
                warned.set()

    def body(session: Session) -> None:
        session.core.warn_after_seconds = 0.05
        model = models[session.rank]
        optimizer = ScheduledOptimizer(make_optimizer(), model, session=session)
        first, second = ([part[:1] for part in data], [part[1:2] for part in data])
        train(model, optimizer, *first, "graph")
        optimizer.synchronize()
        both.wait(60)
        if session.rank == 1:
            assert warned.wait(60)
        else:
            monkeypatch.setattr("commsched.plugins.tensorflow.updater.monotonic", lambda: time.monotonic() + 1000)
        train(model, optimizer, *second, "graph")

    models, data = [made(mlp, 0) for _ in range(RANKS)], numbers()
    warned, both, note = threading.Event(), threading.Barrier(RANKS), Note()
    logging.getLogger("commsched").addHandler(note)
    try:
        on_ranks(body)
    finally:
        logging.getLogger("commsched").removeHandler(note)


def test_the_backward_of_this_rank_is_no_wait_for_averages() -> None:
    """Where all averages are needed at once, the wait begins before the last gradients are computed."""
    stalled: list[float] = []
    waits: list[float] = []
    updater: Any = object.__new__(Updater)
    updater.exchange = SimpleNamespace(
        is_submitted=False, stalled=lambda _, seconds: stalled.append(seconds), forward_order=[0]
    )
    updater._due, updater._awaiting, updater._since, updater._warned = {}, True, time.monotonic() - 1000, 0.0
    updater._was_submitted, updater._changed = False, SimpleNamespace(wait=waits.append)
    updater._session = SimpleNamespace(core=SimpleNamespace(next_warning=lambda warned: warned + 60))
    updater._wait_for_change()
    assert not stalled
    assert 0 < waits[0] <= 60
    updater.exchange.is_submitted = True
    updater._since -= 1000
    updater._wait_for_change()
    assert not stalled  # it begins now
    updater._since -= 1000
    updater._wait_for_change()
    assert stalled[0] > 900


def test_a_step_that_is_broken_off() -> None:
    """All ranks fail in backward, catch it and go on: others may wait for what was never handed over, so it is refused."""

    def body(session: Session, model: Any) -> None:
        optimizer = ScheduledOptimizer(sgd(), model, session=session)

        @tf.function(input_signature=[tf.TensorSpec(None, tf.float64)])
        def step(gradient: Any) -> None:
            optimizer.apply([gradient, *gradients_of(model)[1:]])

        step(tf.ones((6, 10), tf.float64))
        with pytest.raises(tf.errors.UnknownError, match=r"the gradient of '.*kernel' has shape \[2\], the variable \[6, 10\]"):
            step(tf.ones(2, tf.float64))
        step(tf.ones((6, 10), tf.float64))

    refused(
        tf.errors.UnknownError,
        r"step 1 was broken off: this rank has no gradient of '.*kernel'.*, for which other ranks wait",
        body,
    )


@pytest.mark.parametrize("at_once", [False, True])
def test_a_step_that_is_broken_off_before_its_update(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its gradients travelled, so no rank waits; but one that goes on would have lost an update."""
    real = Step._commit_on_host
    broken: set[int] = set()

    def break_once(rank: int) -> None:
        if rank not in broken:
            broken.add(rank)
            raise ArithmeticError("a bad number")

    def commit(self: Any, *rest: Any) -> None:
        break_once(self._updater._session.rank)
        real(self, *rest)

    monkeypatch.setattr(Step, "_commit_on_host", commit)

    def body(session: Session, model: Any) -> None:
        class Ours(keras.optimizers.SGD):
            def apply(self, grads: Any, trainable_variables: Any = None) -> None:
                def seen(gradient: Any) -> Any:
                    break_once(session.rank)
                    return gradient

                passed = [tf.ensure_shape(tf.numpy_function(seen, [each], each.dtype), each.shape) for each in grads]
                super().apply(passed, trainable_variables)

        optimizer = ScheduledOptimizer(Ours(0.1) if at_once else sgd(), model, session=session)
        step = tf.function(lambda: optimizer.apply(gradients_of(model)))
        with pytest.raises(tf.errors.OpError, match="a bad number"):
            step()
        with pytest.raises(UnsupportedError, match="step 0 was broken off"):
            optimizer.detach()
        step()

    refused(tf.errors.UnknownError, "step 0 was broken off: this rank has not made its update, or not all of it", body)


def test_the_learning_rate_of_rank_0_counts() -> None:
    models = [made(mlp, 0) for _ in range(RANKS)]

    def body(session: Session) -> float:
        optimizer = ScheduledOptimizer(keras.optimizers.SGD(0.1 + session.rank), models[session.rank], session=session)
        return float(optimizer.learning_rate)

    assert on_ranks(body) == [0.1, 0.1]
