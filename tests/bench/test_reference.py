import pytest
import torch

from bench.reference import LEARNING_RATE, largest_difference, plain_averaging, put_weights, weights_of
from bench.workloads.emulated import EmulatedWorkload
from bench.workloads.profile import Layer, Profile

WORKLOAD = EmulatedWorkload(Profile("tiny", (Layer("a", ((3, 2),), 9.0, 9.0), Layer("b", ((5,),), 9.0, 9.0)), "made up"))


def test_plain_averaging_is_sgd_with_the_mean_gradient_and_does_not_sleep():
    model = WORKLOAD.untimed().make_model()
    for step in range(3):
        gradients = []
        for rank in range(3):
            model.zero_grad()
            WORKLOAD.untimed().loss(model, step, rank).backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        with torch.no_grad():
            for parameter, *each in zip(model.parameters(), *gradients):
                parameter -= LEARNING_RATE * sum(each) / 3
    for found, wanted in zip(plain_averaging(WORKLOAD, 3, 3), model.parameters()):
        torch.testing.assert_close(found, wanted)


def test_the_difference_is_relative_to_what_training_changed():
    model = WORKLOAD.make_model()
    initial = weights_of(model)
    wanted = [weights + 0.5 for weights in initial]
    put_weights(model, wanted)
    assert largest_difference(model, wanted, initial) == 0
    with torch.no_grad():
        next(model.parameters())[0, 0] -= 0.05
    assert largest_difference(model, wanted, initial) == pytest.approx(0.1)


def test_what_cannot_be_compared_is_as_wrong_as_can_be():
    model = WORKLOAD.make_model()
    initial = weights_of(model)
    assert largest_difference(model, initial, initial) == float("inf")  # nothing was trained, so nothing is shown
    wanted = [weights + 0.5 for weights in initial]
    put_weights(model, [*wanted[:-1], torch.full((5,), float("nan"))])
    assert largest_difference(model, wanted, initial) == float("inf")
