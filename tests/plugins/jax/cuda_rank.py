"""A rank that trains on the first GPU and saves its parameters: ``cuda_rank.py adamw out``."""

import sys

import jax
import numpy as np
import optax

import commsched

from .training import train

OPTIMIZERS = {"adamw": optax.adamw(0.01), "clip": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, 0.9))}
STEPS = 5


def main() -> None:
    name, out = sys.argv[1:]
    with commsched.init() as session:
        params = train(session, OPTIMIZERS[name], STEPS)
        np.savez(f"{out}.{session.rank}", *map(np.asarray, jax.tree.leaves(params)))


if __name__ == "__main__":
    main()
