import pytest
import torch

from bench.harness.loop import Loop
from bench.harness.measure import TOLERATED_DIFFERENCE
from bench.harness.reference import clipping_norm, largest_difference, plain_averaging, weights_of
from bench.workloads import load_profile
from bench.workloads.emulated import EmulatedWorkload

WORKLOAD = EmulatedWorkload(load_profile("uniform").scaled(nbytes=0.001)).untimed()


def norms(steps, ranks):
    """The norm of the averages of each step of plain training."""
    found = []

    class Noting(Loop):
        def step(self, model, optimizer):
            found.append(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]).item())
            super().step(model, optimizer)

    plain_averaging(WORKLOAD, steps, ranks, Noting())
    return found


def trained(loop, ranks=2):
    return plain_averaging(WORKLOAD, 8, ranks, loop)


def test_some_steps_are_clipped_and_some_are_not():
    limit = clipping_norm(WORKLOAD, 2)
    found = norms(8, 2)
    assert limit == pytest.approx(found[0] / 2)
    assert min(found) < limit < sorted(found)[4]


def test_a_loop_that_does_not_clip_or_clips_by_another_norm_is_seen():
    limit = clipping_norm(WORKLOAD, 2)
    wanted = trained(Loop("norm", limit))
    model = WORKLOAD.make_model()
    initial = weights_of(model)
    for other in (Loop(), Loop("norm", 1.01 * limit)):
        for parameter, values in zip(model.parameters(), trained(other)):
            parameter.data = values
        assert largest_difference(model, wanted, initial) > TOLERATED_DIFFERENCE


def test_scaling_the_loss_changes_no_bit():
    assert all(map(torch.equal, trained(Loop("scaler")), trained(Loop())))


def test_a_step_with_an_overflow_is_skipped():
    loop, model = Loop("scaler"), torch.nn.Linear(2, 1, bias=False)
    before = weights_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loop.backward(model(torch.tensor([float("inf"), 1.0])).sum())
    loop.step(model, optimizer)
    assert torch.equal(model.weight, before[0])
    optimizer.zero_grad()
    loop.backward(model(torch.ones(2)).sum())
    loop.step(model, optimizer)
    torch.testing.assert_close(model.weight.detach(), before[0] - 1)
