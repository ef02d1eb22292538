"""Ranks whose optimizers or weights differ do not go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commsched import RanksDiverged, Session, TransportError
from commsched.plugins.tensorflow import ScheduledOptimizer
from commsched.plugins.tensorflow.agreement import numbers_of
from commsched.plugins.tensorflow.guard import own_value

from .training import RANKS, made, numbers, on_ranks, one_layer, share, step_of

INPUTS, TARGETS = numbers(1)


def diverge(make_optimizer: Callable[[], Any], part: Callable[[Any, Any], object], match: str, **settings: Any) -> None:
    """Rank 1 alone does ``part(optimizer, model)`` between two steps."""
    models = [made(one_layer, 0) for _ in range(RANKS)]

    def body(session: Session) -> None:
        model = models[session.rank]
        optimizer = ScheduledOptimizer(make_optimizer(), model, session=session)
        step = step_of(model, optimizer, compiled=False)
        (inputs,), (targets,) = share(session, INPUTS, TARGETS)
        step(inputs, targets)
        model.get_weights()
        if session.rank == 1:
            part(optimizer, model)
        for _ in range(4):
            step(inputs, targets)
        model.get_weights()

    with pytest.raises((RanksDiverged, TransportError), match=match):
        on_ranks(body, **settings)


def setting(name: str, value: Any) -> Callable[[Any, Any], object]:
    return lambda optimizer, _: setattr(optimizer, name, value)


@pytest.mark.parametrize(
    ("make", "part", "match"),
    [
        (keras.optimizers.SGD, setting("learning_rate", 0.2), "'learning_rate' is 0.01 on rank 0 but 0.2 on rank 1"),
        (keras.optimizers.SGD, setting("learning_rate", np.nan), "'learning_rate' is 0.01 on rank 0 but \"nan\" on rank 1"),
        (keras.optimizers.Nadam, setting("learning_rate", 0.2), "'learning_rate' is 0.001 on rank 0 but 0.2 on rank 1"),
        (keras.optimizers.AdamW, setting("weight_decay", 0.2), "'weight_decay' is 0.004 on rank 0 but 0.2 on rank 1"),
        (keras.optimizers.Nadam, setting("clipnorm", 0.5), "'clipnorm' is null on rank 0 but 0.5 on rank 1"),
        (
            keras.optimizers.Adam,
            lambda optimizer, _: optimizer.iterations.assign(9),
            "'iterations' is 1 on rank 0 but 9 on rank 1",
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
            lambda optimizer, _: setattr(optimizer.inner_optimizer, "clipvalue", 0.5),
            "'inner_optimizer.clipvalue' is null on rank 0 but 0.5 on rank 1",
        ),
    ],
)
def test_numbers_of_the_optimizer(make: Any, part: Any, match: str) -> None:
    diverge(make, part, "numbers of the optimizer of the model 'sequential' differ between ranks after step 1: " + match)


@pytest.mark.parametrize(
    ("make", "part", "match"),
    [
        (
            keras.optimizers.SGD,
            lambda _, model: model.set_weights([np.ones(each.shape) for each in model.weights]),
            r"'0 sequential/dense/kernel' is \"[0-9a-f]{8}\" on rank 0 but \"[0-9a-f]{8}\" on rank 1 \(1 more differ\)",
        ),
        (keras.optimizers.Nadam, lambda _, model: model.layers[0].bias.assign(np.ones(3)), "'1 sequential/dense/bias' is"),
        (
            keras.optimizers.Adam,
            lambda optimizer, _: optimizer.variables[-1].assign(np.ones(3)),
            "'5 adam/sequential_dense_bias_velocity' is",
        ),
    ],
)
def test_what_one_rank_assigns(make: Any, part: Any, match: str) -> None:
    """``load_weights``, and ``EarlyStopping(restore_best_weights=True)`` by a local loss, do it so."""
    prefix = "weights of the model 'sequential', which ranks have assigned differently, differ between ranks after step 1: "
    diverge(make, part, prefix + match)


@pytest.mark.parametrize("make", [keras.optimizers.SGD, keras.optimizers.Nadam])
def test_what_nobody_sees_assigned_is_found_in_time(make: Any) -> None:
    diverge(
        make,
        lambda _, model: own_value(model.layers[0].bias).assign(np.ones(3)),
        r"weights of the model 'sequential' differ between ranks after step 1: '1 sequential/dense/bias' is",
        check_weights=3,
    )


def test_one_rank_may_look_at_other_weights() -> None:
    """Those of an average, say: once they are as they were, ranks are equal. So they are after an assignment on all."""
    models = [made(one_layer, 0) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        model = models[session.rank]
        optimizer = ScheduledOptimizer(keras.optimizers.Adam(0.1), model, session=session)
        step = step_of(model, optimizer, compiled=True)
        (inputs,), (targets,) = share(session, INPUTS, TARGETS)
        for _ in range(3):
            step(inputs, targets)
            if session.rank == 1:
                kept = model.get_weights()
                model.set_weights([weights * 0.5 for weights in kept])
                model(inputs)
                model.set_weights(kept)
            model.layers[0].bias.assign(np.ones(3))
        return model.get_weights()

    ours, others = on_ranks(body)
    assert all((a == b).all() for a, b in zip(ours, others))


def test_numbers_of_an_optimizer() -> None:
    """What it was made with, and nothing else that is set on it."""
    optimizer = keras.optimizers.AdamW(0.5, beta_1=np.float32(0.5))
    optimizer.clipvalue = np.array([1.0, 2.0])
    optimizer.weight_decay = np.inf
    optimizer.epsilon = tf.Variable(1.0)
    optimizer.rank = 1
    found = numbers_of(keras.optimizers.LossScaleOptimizer(optimizer))
    assert (
        found.items()
        >= {
            "inner_optimizer.beta_1": 0.5,
            "inner_optimizer.clipvalue": "[1.0, 2.0]",
            "inner_optimizer.weight_decay": "inf",
            "inner_optimizer.amsgrad": False,
            "dynamic_growth_steps": 2000,
        }.items()
    )
    assert not any(name.endswith(("epsilon", "rank", "name")) for name in found)
