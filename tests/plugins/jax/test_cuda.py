"""Training on CUDA devices over transports that average in the host's memory. Ranks share the first GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu" or find_spec("cupy") is None, reason="needs JAX for CUDA, and cupy"),
]


@pytest.mark.parametrize("name", ["adamw", "clip"])
def test_training_equals_training_alone(name: str) -> None:
    from commsched.plugins.jax.memory import place_of

    from .training import on_ranks, require_close, train, train_alone

    tx = {"adamw": optax.adamw(0.01), "clip": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, 0.9))}[name]
    assert place_of([]) == "cuda:0"
    require_close(on_ranks(2, lambda session: train(session, tx, 5), check_weights=1), train_alone(tx, 2, 5), 1e-6)
