import jax
import numpy as np
import optax
import pytest

from commsched import Session
from commsched.core.group import DependencyProxy
from commsched.plugins.common.weights_check import WeightsCheck
from commsched.testing.check_plugin import Weights, check_plugin

from .training import joint_batch, loss, make_params, train


def weights_of(params: object) -> Weights:
    named = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in named}


class Adapter:
    def __init__(self, dtype: str, tolerance: float, tx: optax.GradientTransformation) -> None:
        self.dtype = dtype
        self.tolerance = tolerance
        self.tx = tx
        self.step = jax.jit(self.plain_step)

    def plain_step(self, params: object, state: object, *batch: object) -> tuple[object, object]:
        gradients = jax.grad(loss)(params, *batch)
        updates, state = self.tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        start = make_params(seed + rank, self.dtype)
        return weights_of(train(session, self.tx, steps, params=start, seed=seed, dtype=self.dtype))

    def train_alone(self, world_size: int, steps: int, seed: int) -> Weights:
        params = make_params(seed, self.dtype)
        state = self.tx.init(params)
        for index in range(steps):
            params, state = self.step(params, state, *joint_batch(world_size, index, seed, self.dtype))
        return weights_of(params)


def test_it_conforms() -> None:
    check_plugin(Adapter("float64", 1e-9, optax.sgd(0.1, momentum=0.9)), world_sizes=(1, 2, 4), steps=4)


def test_it_fails_without_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of this folder's checks: averages are read without waiting."""
    monkeypatch.setattr(DependencyProxy, "wait", lambda self: None)
    monkeypatch.setattr(WeightsCheck, "begin", lambda self, step: False)  # which may find it first
    with pytest.raises(AssertionError, match=r"is not finite; memory was read|is not bitwise equal on rank 0"):
        check_plugin(Adapter("float64", 1e-9, optax.sgd(0.1)), world_sizes=(2,), steps=5)
