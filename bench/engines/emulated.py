"""The EMULATED network that every engine trains, and its reference weights.

The input is a number that stands for a rank's batch. Each layer multiplies it by a gain near 1 that depends on the layer's
weights, and the last number is the loss. The gradient of a tensor is its *pattern* of fixed numbers, times the layer's input,
times the number that flows back. (This gradient is made up, and the same for all engines; the gain's true derivative is nonzero
only for the first element of the pattern.) Each weight is therefore always its pattern times one number, the layer's
*coefficient*. A step with a stale or wrong weight changes all later steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commsched.simulator.profile import Profile

#: Learning rate of SGD in every system.
LEARNING_RATE = 0.05
MOMENTUM = 0.9
#: The coefficient of all layers before training.
INITIAL = 0.1
#: All layers together change a number by at most a factor of exp(+-_FEEDBACK), so that training does not diverge.
_FEEDBACK = 1.5
#: Radians of a gain's phase for each unit of the coefficient, large enough that a single step has an effect.
PHASE = 16.0
#: Signs of the layers' feedback: two layers in three have one sign and the third the other, so that they do not cancel.
_SIGNS = (1, 1, -1)
_MULTIPLIER = np.uint32(2654435761)  # D. E. Knuth's, of multiplicative hashing

Array = NDArray[np.float32]


@dataclass(frozen=True)
class EmulatedLayer:
    """A layer. ``patterns`` are the patterns of its tensors, in [0.5, 1.5]. A layer without tensors has a gain of 1. With
    tensors, the gain is ``exp(feedback * sin(PHASE * (coefficient - INITIAL)))``. The coefficient is computed from first
    elements: the mean over tensors of the tensor's first element divided by the pattern's."""

    forward_seconds: float
    backward_seconds: float
    feedback: float
    patterns: tuple[Array, ...]

    @property
    def firsts(self) -> list[float]:
        """The first element of each pattern."""
        return [float(pattern.flat[0]) for pattern in self.patterns]


def make_layers(profile: Profile) -> list[EmulatedLayer]:
    """The layers of ``profile``, with its times and shapes."""
    return [
        EmulatedLayer(
            layer.forward_seconds,
            layer.backward_seconds,
            _feedback(index, len(profile.layers)),
            tuple(_pattern(shape, 13 * index + place) for place, shape in enumerate(layer.shapes)),
        )
        for index, layer in enumerate(profile.layers)
    ]


def batch_number(step: int, rank: int) -> float:
    """The number that stands for a rank's batch. It changes sign over steps, so that weights stay bounded. No rank's number
    equals the average."""
    return (1 + 0.5 * math.cos(2.9 * rank + 0.3 * step)) * math.cos(1.7 * step)


def gain(feedback: float, coefficient: float) -> float:
    return math.exp(feedback * math.sin(PHASE * (coefficient - INITIAL)))


def sleep_until(at: float) -> None:
    """Sleep until ``time.monotonic`` reaches ``at``."""
    time.sleep(max(0.0, at - time.monotonic()))


def coefficients(layers: Sequence[EmulatedLayer], weights: Iterable[Array]) -> list[float]:
    """The least and the greatest coefficient computed from any element, for each layer that has tensors; they are equal except
    for rounding. ``weights`` are all tensors, in the order of the layers."""
    found, rest = [], iter(weights)
    for layer in layers:
        ratios = [np.asarray(next(rest), np.float64) / pattern for pattern in layer.patterns]
        if ratios:
            found += [float(min(ratio.min() for ratio in ratios)), float(max(ratio.max() for ratio in ratios))]
    return found


def plain_averaging(profile: Profile, steps: int, ranks: int) -> list[float]:
    """The correct result of :func:`coefficients` after ``steps`` steps of SGD with the mean of all ranks' gradients."""
    count = len(profile.layers)
    trained = [bool(layer.shapes) for layer in profile.layers]
    found, momenta = [INITIAL] * count, [0.0] * count
    for step in range(steps):
        gains = [gain(_feedback(index, count), found[index]) if trained[index] else 1.0 for index in range(count)]
        gradients = [0.0] * count
        for rank in range(ranks):
            for index, gradient in enumerate(_gradients(gains, batch_number(step, rank))):
                gradients[index] += gradient / ranks
        momenta = [MOMENTUM * momentum + gradient for momentum, gradient in zip(momenta, gradients)]
        found = [each - LEARNING_RATE * momentum for each, momentum in zip(found, momenta)]
    return [each for each, has_tensors in zip(found, trained) if has_tensors for _ in range(2)]


def difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Largest difference of a result of :func:`coefficients` from ``wanted``, relative to the largest change that training
    should make. Infinite for NaN, or if numbers are missing."""
    change = max((abs(each - INITIAL) for each in wanted), default=0.0)
    if len(found) != len(wanted) or not all(map(math.isfinite, found)) or not 0 < change < math.inf:
        return math.inf
    return max(abs(ours - theirs) for ours, theirs in zip(found, wanted)) / change


def _gradients(gains: Sequence[float], number: float) -> Iterator[float]:
    """Gradients of one rank's batch by layer, as factors of the patterns."""
    came_in = [number]
    for each in gains:
        came_in.append(came_in[-1] * each)
    upstream, flowing = 1.0, []
    for index in reversed(range(len(gains))):
        flowing.append(upstream * came_in[index])
        upstream *= gains[index]
    return reversed(flowing)


def _feedback(index: int, layers: int) -> float:
    return _SIGNS[index % len(_SIGNS)] * _FEEDBACK / layers


def _pattern(shape: Sequence[int], seed: int) -> Array:
    places = np.arange(math.prod(shape), dtype=np.uint32) + np.uint32(997 * seed + 1)
    return ((places * _MULTIPLIER >> np.uint32(20)).astype(np.float32) / np.float32(4096) + np.float32(0.5)).reshape(shape)
