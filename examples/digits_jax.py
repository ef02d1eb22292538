"""scikit-learn's handwritten digits with JAX, Flax and Optax. The lines marked "commsched" are all that it takes.

    python examples/digits_jax.py                              # alone
    commsched run -n 2 -- python examples/digits_jax.py        # the same training by two ranks, each with half of every batch

In float64 the weights are those of one process to 1e-9 of the largest, in float32 to 1e-5.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import commsched
import commsched.plugins.jax as cs  # commsched, line 1

BATCH = 64  # of all ranks together


class Network(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        for width in (96, 64):
            images = nn.relu(nn.Dense(width, dtype=self.dtype, param_dtype=self.dtype)(images))
        return nn.Dense(10, dtype=self.dtype, param_dtype=self.dtype)(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--save", type=Path, metavar="FILE.npz", help="where rank 0 writes the final parameters, by name")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    session = commsched.init()

    digits = load_digits()
    images, labels = (digits.data / 16).astype(args.dtype), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]

    model = Network(args.dtype)
    tx = optax.adam(optax.cosine_decay_schedule(3e-3, args.steps))

    def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def train_step(state: cs.TrainState, images: jax.Array, labels: jax.Array) -> tuple[cs.TrainState, jax.Array]:
        # Was: loss, gradients = jax.value_and_grad(loss_fn)(params, images, labels)
        #      updates, opt_state = tx.update(gradients, opt_state, params); params = optax.apply_updates(params, updates)
        loss, state = cs.value_and_update(loss_fn)(state, images, labels)  # commsched, line 3
        return state, loss

    params = model.init(jax.random.key(0), images[:1])["params"]
    state = cs.create(params, tx)  # commsched, line 2; was: opt_state = tx.init(params)
    draw = np.random.default_rng(1)
    for _ in range(args.steps):
        joint = draw.choice(train, BATCH, replace=False)  # the same on every rank
        mine = joint[session.rank :: session.world_size]
        state, _ = train_step(state, images[mine], labels[mine])

    params = state.params  # waits for the last averages
    if session.rank == 0:
        right = jnp.argmax(model.apply({"params": params}, images[test]), 1) == labels[test]
        print(f"{session.world_size} ranks, {args.steps} steps, test accuracy {float(right.mean()):.1%}", flush=True)
        if args.save is not None:
            named = jax.tree_util.tree_leaves_with_path(params)
            np.savez(args.save, **{jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in named})


if __name__ == "__main__":
    main()
