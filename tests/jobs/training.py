"""A rank of the tests' jobs: trains a small numpy network, so that there is something to tune, and prints what became of it.

training.py STEPS [--width N ...] [--settle]: a network of each width after the other, STEPS steps each; with --settle, each
network so many times STEPS until partition and credit are chosen
"""

from __future__ import annotations

import argparse
import hashlib
import os
from itertools import count, pairwise

import numpy as np

import commsched
from commsched.plugins.numpy import SGD, Linear, Network, ReLU, ScheduledOptimizer, softmax_cross_entropy
from tests.jobs.rank import run, say


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--width", type=int, nargs="+", default=[160])
    parser.add_argument("--settle", action="store_true")
    args = parser.parse_args()

    session = commsched.init()
    say(1, f"rank {session.rank} of {session.world_size} pid {os.getpid()}")
    for width in args.width:
        train(session, width, args.steps, args.settle)


def train(session: commsched.Session, width: int, steps: int, settles: bool) -> None:
    rng = np.random.default_rng(0)
    widths = [64, width, width, 10]
    layers = [layer for pair in pairwise(widths) for layer in (Linear(*pair, rng, np.float32), ReLU())]
    network = Network(layers[:-1])
    optimizer = ScheduledOptimizer(SGD(network, learning_rate=0.001, momentum=0.9))
    data = np.random.default_rng(1 + session.rank)
    for step in count():
        if step % steps == 0 and step > 0 and (not settles or session.gather(session.is_settled)[0]):
            say(1, f"rank {session.rank} steps {step}")
            break
        labels = data.integers(0, 10, 8)
        inputs = data.standard_normal((8, 64), np.float32)
        _, gradient = softmax_cross_entropy(network.forward(inputs), labels)
        network.backward(gradient)
        optimizer.step()
    optimizer.synchronize()
    weights = b"".join(value.tobytes() for layer in network.layers for value in layer.parameters.values())
    assert np.isfinite(np.frombuffer(weights, np.float32)).all()
    say(1, f"rank {session.rank} weights {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    run(main)
