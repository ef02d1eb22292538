"""A small training in numpy, for what depends on the transport and not on the engine; ``bench.harness.job`` starts ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from commsched import Session
from commsched.plugins.numpy import SGD, Linear, Network, ReLU, ScheduledOptimizer, softmax_cross_entropy

STEPS = 6
ROWS = 3  # per rank and step
WIDTHS = (40, 48, 32, 4)

#: All weights in one row.
Weights = list[float]


def rank_main(session: Session, arguments: dict[str, Any]) -> Weights:
    """Ranks begin with different weights, of which those of rank 0 count. ``arguments`` may hold a number of ``steps``."""
    network = _network(session.rank)
    mine = slice(session.rank * ROWS, (session.rank + 1) * ROWS)
    optimizer = ScheduledOptimizer(SGD(network, 0.1, 0.9), session)
    _train(network, optimizer, session.world_size, mine, arguments.get("steps", STEPS))
    optimizer.synchronize()
    return _weights(network)


def train_alone(world_size: int, steps: int = STEPS) -> Weights:
    """What one process makes of the batches of all ranks."""
    network = _network(0)
    _train(network, SGD(network, 0.1, 0.9), world_size, slice(None), steps)
    return _weights(network)


def _weights(network: Network) -> Weights:
    return [float(x) for layer in network.layers for weights in layer.parameters.values() for x in weights.flat]


def _network(seed: int) -> Network:
    rng = np.random.default_rng(seed)
    layers = [layer for sizes in pairwise(WIDTHS) for layer in (Linear(*sizes, rng, np.float64), ReLU())]
    return Network(layers[:-1])


def _train(network: Network, optimizer: SGD | ScheduledOptimizer, world_size: int, mine: slice, steps: int) -> None:
    rng = np.random.default_rng(7)
    for _ in range(steps):
        inputs = rng.standard_normal((world_size * ROWS, WIDTHS[0]))
        labels = rng.integers(0, WIDTHS[-1], world_size * ROWS)
        _, gradient = softmax_cross_entropy(network.forward(inputs[mine]), labels[mine])
        network.backward(gradient)
        optimizer.step()
