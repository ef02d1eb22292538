"""A small network on scikit-learn's handwritten digits, in numpy, data-parallel.

    commsched run -n 2 -- python examples/digits_numpy.py

The engine is that of ``commsched/plugins/numpy/engine.py``. The two lines of commsched are marked.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits

import commsched
from commsched.plugins.numpy import SGD, Linear, Network, ReLU, ScheduledOptimizer, softmax_cross_entropy  # line 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--save", metavar="FILE", help="write the trained parameters to FILE, an .npz")
    args = parser.parse_args()

    session = commsched.init()  # for the rank; the plugin would do it by itself
    digits = load_digits()
    images, labels = (digits.data / 16).astype(args.dtype), digits.target
    rng = np.random.default_rng(0)
    network = Network(
        [Linear(64, 128, rng, args.dtype), ReLU(), Linear(128, 64, rng, args.dtype), ReLU(), Linear(64, 10, rng, args.dtype)]
    )
    optimizer = ScheduledOptimizer(SGD(network, 0.1, momentum=0.9))  # line 2
    for _ in range(args.steps):
        mine = rng.integers(0, 1437, 64)[session.rank :: session.world_size]  # all draw the same; the last 360 are for testing
        _, gradient = softmax_cross_entropy(network.forward(images[mine]), labels[mine])
        network.backward(gradient)
        optimizer.step()
    right = float((network.forward(images[1437:]).argmax(1) == labels[1437:]).mean())
    if session.rank == 0:
        print(f"{session.world_size} ranks, {args.steps} steps, test accuracy {right:.1%}", flush=True)
        if args.save:
            layers = enumerate(network.layers)
            np.savez(args.save, **{f"{i}.{name}": value for i, layer in layers for name, value in layer.parameters.items()})


if __name__ == "__main__":
    main()
