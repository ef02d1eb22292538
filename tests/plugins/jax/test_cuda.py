"""Training on CUDA devices over transports that average in the host's memory. Ranks share the first GPU."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import optax
import pytest

import commsched.plugins.jax as cs

from .training import on_ranks, require_close, train, train_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu" or find_spec("cupy") is None, reason="needs JAX for CUDA, and cupy"),
]


@pytest.mark.parametrize("tx", [optax.adamw(0.01), optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, 0.9))])
def test_training_equals_training_alone(tx: optax.GradientTransformation) -> None:
    assert cs.memory.place_of([]) == "cuda:0"
    require_close(on_ranks(2, lambda session: train(session, tx, 5), check_weights=1), train_alone(tx, 2, 5), 1e-6)
