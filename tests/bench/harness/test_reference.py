import pytest
import torch

from bench.harness.measure import TOLERATED_DIFFERENCE
from bench.harness.reference import LEARNING_RATE, largest_difference, plain_averaging, put_weights, weights_of
from bench.workloads import load_profile
from bench.workloads.emulated import EmulatedWorkload
from commsched.simulator.profile import LayerProfile, Profile

WORKLOAD = EmulatedWorkload(
    Profile("tiny", (LayerProfile("a", ((3, 2),), 9.0, 9.0), LayerProfile("b", ((5,),), 9.0, 9.0)), "made up")
)


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


def train_with_a_stale_layer(workload, stale, steps, ranks):
    """As ``plain_averaging``, but that the layer of this index reads weights that lack the last step."""
    model = workload.make_model()
    own = [*model._chain[stale].parameters(recurse=False)]
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    before = [parameter.detach().clone() for parameter in own]
    for step in range(steps):
        optimizer.zero_grad()
        fresh = [parameter.detach().clone() for parameter in own]
        put(own, before)
        for rank in range(ranks):
            (workload.loss(model, step, rank) / ranks).backward()
        put(own, fresh)
        before = fresh
        optimizer.step()
    return model


@torch.no_grad()
def put(parameters, values):
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@pytest.mark.parametrize("name", ["uniform", "vgg16", "resnet50", "bert-base", "gpt2-small"])
def test_one_stale_layer_is_seen_in_every_model(name):
    """In a turn of five steps and two before, with room to spare, while rounding is far from what is tolerated."""
    workload = EmulatedWorkload(load_profile(name).scaled(nbytes=1e-6)).untimed()
    initial = weights_of(workload.make_model())
    wanted = plain_averaging(workload, 7, 2)
    layers = [index for index, layer in enumerate(workload.profile.layers) if layer.shapes]
    for stale in (layers[0], layers[len(layers) // 2], layers[-1]):
        found = train_with_a_stale_layer(workload, stale, 7, 2)
        assert largest_difference(found, wanted, initial) > 10 * TOLERATED_DIFFERENCE


@pytest.mark.parametrize("name", ["uniform", "resnet50"])
def test_another_order_of_rounding_is_not_wrong(name):
    """Three ranks, whose gradients are divided before they are summed, in a turn of a hundred steps."""
    workload = EmulatedWorkload(load_profile(name).scaled(nbytes=1e-6)).untimed()
    model = workload.make_model()
    initial = weights_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(100):
        averages = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in reversed(range(3)):
            optimizer.zero_grad()
            workload.loss(model, step, rank).backward()
            for average, parameter in zip(averages, model.parameters()):
                average += parameter.grad / 3
        for average, parameter in zip(averages, model.parameters()):
            parameter.grad = average
        optimizer.step()
    assert largest_difference(model, plain_averaging(workload, 100, 3), initial) < TOLERATED_DIFFERENCE / 10


def test_what_cannot_be_compared_is_as_wrong_as_can_be():
    model = WORKLOAD.make_model()
    initial = weights_of(model)
    assert largest_difference(model, initial, initial) == float("inf")  # nothing was trained, so nothing is shown
    wanted = [weights + 0.5 for weights in initial]
    put_weights(model, [*wanted[:-1], torch.full((5,), float("nan"))])
    assert largest_difference(model, wanted, initial) == float("inf")
