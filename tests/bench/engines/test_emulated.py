"""The truth against which ``bench engines`` compares weights, itself against training with arrays."""

import math
import time

import numpy as np
import pytest

from bench.engines.emulated import (
    INITIAL,
    LEARNING_RATE,
    MOMENTUM,
    batch_number,
    coefficients,
    difference,
    gain,
    make_layers,
    plain_averaging,
    sleep_until,
)
from bench.harness.measure import TOLERATED_DIFFERENCE
from bench.workloads import load_profile
from commsched.simulator.profile import LayerProfile, Profile

SMALL = Profile(
    "small",
    (
        LayerProfile("a", ((4, 3), (3,)), 0.001, 0.002),
        LayerProfile("b", (), 0.001, 0.002),
        LayerProfile("c", ((5,),), 0.001, 0.002),
    ),
    "test",
)


def train(profile, steps, ranks, dtype=np.float32, read=lambda step, layer, now, before: now):
    """SGD on all weights, as arrays. ``read`` says which ones a layer's forward sees in a step, those of now or before."""
    layers = make_layers(profile)
    weights = [[INITIAL * pattern.astype(dtype) for pattern in layer.patterns] for layer in layers]
    momenta = [[np.zeros_like(tensor) for tensor in own] for own in weights]
    before = weights
    for step in range(steps):
        seen = [read(step, index, weights[index], before[index]) for index in range(len(layers))]
        gradients = [[np.zeros_like(tensor) for tensor in own] for own in weights]
        for rank in range(ranks):
            gains = [
                gain(layer.feedback, float(np.mean([w.flat[0] / f for w, f in zip(own, layer.firsts)]))) if own else 1.0
                for layer, own in zip(layers, seen)
            ]
            came_in = [batch_number(step, rank) * math.prod(gains[:index]) for index in range(len(layers))]
            upstream = [math.prod(gains[index + 1 :]) for index in range(len(layers))]
            for index, layer in enumerate(layers):
                for gradient, pattern in zip(gradients[index], layer.patterns):
                    gradient += pattern.astype(dtype) * (came_in[index] * upstream[index] / ranks)
        momenta = [[MOMENTUM * m + g for m, g in zip(*each)] for each in zip(momenta, gradients)]
        before = weights
        weights = [[w - LEARNING_RATE * m for w, m in zip(*each)] for each in zip(weights, momenta)]
    return coefficients(layers, [tensor for own in weights for tensor in own])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_truth_is_that_of_training_with_arrays(ranks):
    wanted = plain_averaging(SMALL, 10, ranks)
    assert train(SMALL, 10, ranks, np.float64) == pytest.approx(wanted, rel=1e-12)
    assert len(wanted) == 4  # least and greatest of the two layers that have tensors
    assert wanted[0] == wanted[1] != wanted[2] == wanted[3]


def test_rounding_is_tolerated_over_more_steps_than_are_measured():
    uniform = load_profile("uniform").scaled(nbytes=1e-5)
    assert difference(train(uniform, 60, 2), plain_averaging(uniform, 60, 2)) < TOLERATED_DIFFERENCE / 10


@pytest.mark.parametrize("stale", [0, 7, 23])
def test_one_stale_layer_in_one_step_shows(stale):
    uniform = load_profile("uniform").scaled(nbytes=1e-4)
    wanted = plain_averaging(uniform, 12, 2)
    found = train(uniform, 12, 2, read=lambda step, layer, now, before: before if (step, layer) == (6, stale) else now)
    assert difference(train(uniform, 12, 2), wanted) < TOLERATED_DIFFERENCE / 10
    assert difference(found, wanted) > TOLERATED_DIFFERENCE * 10


def test_one_wrong_element_shows():
    layers = make_layers(SMALL)
    weights = [INITIAL * pattern for layer in layers for pattern in layer.patterns]
    assert coefficients(layers, weights) == pytest.approx([INITIAL] * 4)
    weights[1][2] *= 1.5
    assert coefficients(layers, weights) == pytest.approx([INITIAL, 1.5 * INITIAL, INITIAL, INITIAL])


def test_what_is_missing_or_no_number_differs_without_bounds():
    wanted = plain_averaging(SMALL, 3, 2)
    assert difference(wanted, wanted) == 0
    assert difference(wanted[:-1], wanted) == difference([*wanted[:-1], math.nan], wanted) == math.inf
    assert difference([INITIAL] * 4, [INITIAL] * 4) == math.inf  # nothing was to be trained
    assert difference([INITIAL] * 4, wanted) == pytest.approx(1, abs=0.01)  # nothing was trained


def test_sleeps_until_then_and_no_longer_if_it_is_past():
    ends = time.monotonic() + 0.01
    sleep_until(ends)
    assert time.monotonic() >= ends
    sleep_until(ends)
