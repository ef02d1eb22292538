"""The emulated model: when its gradients appear, and what they are."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from bench.workloads import load_profile
from bench.workloads.compiled import CompiledWorkload
from bench.workloads.emulated import EmulatedModel, EmulatedWorkload, batch_value
from commsched.simulator.profile import LayerProfile, Profile

from .clock import FakeClock

PROFILE = Profile(
    "three",
    (
        LayerProfile("stem", ((3, 2), (3,)), 1.0, 2.0),
        LayerProfile("body.norm", ((4,),), 0.0, 0.0),
        LayerProfile("body.0", ((2, 2),), 4.0, 8.0),
        LayerProfile("head", (), 16.0, 32.0),
    ),
    "made up",
)


def test_a_compiled_model_trains_as_the_plain_one() -> None:
    plain = EmulatedWorkload(PROFILE).untimed()
    compiled = CompiledWorkload(plain)
    first, second = plain.make_model(), compiled.make_model()
    for step in range(3):
        losses = plain.loss(first, step, 0), compiled.loss(second, step, 0)
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for mine, its in zip(first.parameters(), second.parameters()):
            assert mine.grad is not None
            assert its.grad is not None
            assert torch.equal(mine.grad, its.grad)
            for each in (mine, its):
                each.data.add_(each.grad, alpha=-0.01)  # type: ignore[arg-type]
                each.grad = None


def gradient_times(model: EmulatedModel, clock: FakeClock) -> list[tuple[str, float]]:
    """Of one step, in the order in which they appear."""
    seen: list[tuple[str, float]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append((name, clock.now())))
    EmulatedWorkload(PROFILE).loss(model, 0, 0).backward()
    return seen


def test_gradients_appear_from_the_last_layer_to_the_first_each_after_its_own_time() -> None:
    clock = FakeClock()
    seen = gradient_times(EmulatedModel(PROFILE, clock), clock)
    assert dict(seen) == {
        "body.0.weight0": 21 + 32 + 8,
        "body.norm.weight0": 21 + 32 + 8,
        "stem.weight0": 21 + 32 + 8 + 2,
        "stem.weight1": 21 + 32 + 8 + 2,
    }
    assert [name.rpartition(".")[0] for name, _ in seen] == ["body.0", "body.norm", "stem", "stem"]


def test_layers_without_time_do_not_sleep() -> None:
    clock = FakeClock()
    gradient_times(EmulatedModel(PROFILE, clock), clock)
    assert clock.sleeps == [1, 4, 16, 32, 8, 2]


def test_a_host_that_oversleeps_does_not_slow_the_device_down() -> None:
    clock = FakeClock(overslept_seconds=0.25)
    gradient_times(EmulatedModel(PROFILE, clock), clock)
    assert clock.sleeps == [1, 3.75, 15.75, 31.75, 7.75, 1.75]
    assert clock.now() == 63.25


def test_what_was_overslept_before_a_wait_is_not_made_up_for() -> None:
    clock = FakeClock(overslept_seconds=0.25)
    model = EmulatedModel(PROFILE, clock)
    waiting = model.body.norm._parameters["weight0"]

    class Waits(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            clock.time += 3
            waiting.__class__ = torch.nn.Parameter
            return function(*args, **(kwargs or {}))

    waiting.__class__ = Waits
    EmulatedWorkload(PROFILE).loss(model, 0, 0)
    assert clock.sleeps == [1, 4, 15.75]


def test_nothing_is_made_up_for_from_step_to_step() -> None:
    clock = FakeClock(overslept_seconds=0.25)
    model = EmulatedModel(PROFILE, clock)
    gradient_times(model, clock)
    gradient_times(model, clock)
    assert clock.sleeps[6] == 1


def test_untimed_gives_the_same_numbers_without_sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = EmulatedWorkload(load_profile("uniform").scaled(nbytes=1e-3, seconds=1e-2))
    timed = workload.make_model()
    workload.loss(timed, 3, 1).backward()
    monkeypatch.setattr("bench.workloads.emulated.WallClock.sleep", lambda seconds: pytest.fail("slept"))
    untimed = workload.untimed().make_model()
    workload.untimed().loss(untimed, 3, 1).backward()
    for one, other in zip(timed.parameters(), untimed.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)


# --- numbers ---


def test_gradients_are_the_pattern_times_what_came_in_and_what_flows_back() -> None:
    model = EmulatedModel(PROFILE, FakeClock())
    for layer, moved in zip((model.stem, model.body.norm, model.body.get_submodule("0")), (0.01, 0.02, -0.03), strict=True):
        for parameter, pattern in zip(layer.parameters(recurse=False), layer.patterns, strict=True):
            parameter.data.add_(pattern, alpha=moved)
    loss = EmulatedWorkload(PROFILE).loss(model, step=5, rank=2)
    loss.backward()
    layers = [model.stem, model.body.norm, model.body.get_submodule("0")]
    # Four layers; each lets through exp(+-1.5 / 4 * the sine of 64 times how far its weights have moved along their patterns).
    gains = [math.exp(sign * 0.375 * math.sin(64 * moved)) for sign, moved in zip((1, 1, -1), (0.01, 0.02, -0.03))]
    assert loss.item() == pytest.approx(batch_value(5, 2) * math.prod(gains), rel=1e-5)
    scales = [batch_value(5, 2) * math.prod(gains) / gain for gain in gains]
    for layer, scale in zip(layers, scales, strict=True):
        for parameter, pattern in zip(layer.parameters(recurse=False), layer.patterns, strict=True):
            assert parameter.grad.dtype == torch.float32
            torch.testing.assert_close(parameter.grad, pattern * scale, rtol=1e-5, atol=0)


def test_gradients_differ_by_parameter_rank_and_step() -> None:
    def gradients(step: int, rank: int) -> list[torch.Tensor]:
        model = workload.make_model()
        workload.loss(model, step, rank).backward()
        return [parameter.grad for parameter in model.parameters()]

    workload = EmulatedWorkload(load_profile("uniform").scaled(nbytes=1e-3)).untimed()
    first = gradients(0, 0)
    assert all(map(torch.equal, first, gradients(0, 0)))
    for other in (gradients(1, 0), gradients(0, 1)):
        assert not any(map(torch.equal, first, other))
    assert len({tuple(gradient.tolist()) for gradient in first}) == len(first)


def test_no_rank_alone_has_the_average_of_all() -> None:
    for ranks in (2, 4, 8):
        batches = torch.tensor([[batch_value(step, rank) for rank in range(ranks)] for step in range(100)])
        average = batches.mean(1, keepdim=True)
        assert (average.abs() > 1e-4).all()
        assert (((batches - average).abs() > 0.01 * average.abs()).sum(0) > 90).all()


def test_who_reads_a_stale_weight_gets_other_numbers() -> None:
    model, stale = EmulatedModel(PROFILE, FakeClock()), EmulatedModel(PROFILE, FakeClock())
    for parameter in model.parameters():
        parameter.data.add_(1e-2)
    for layer in ("stem", "body.norm", "body.0"):
        partly = copy.deepcopy(model)
        partly.get_submodule(layer).load_state_dict(stale.get_submodule(layer).state_dict())
        for each in (model, partly):
            each.zero_grad()
            EmulatedWorkload(PROFILE).loss(each, 1, 0).backward()
        for parameter, other in zip(model.parameters(), partly.parameters(), strict=True):
            others = not any(parameter is own for own in model.get_submodule(layer).parameters(recurse=False))
            difference = ((parameter.grad - other.grad).abs().max() / parameter.grad.abs().max()).item()
            assert difference > 1e-4 if others else difference < 1e-6


def test_making_a_gradient_costs_one_multiplication(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the layer makes is what the parameter gets: autograd takes it over without a copy."""
    model = EmulatedModel(PROFILE, FakeClock())
    made = []
    multiply = torch.Tensor.__mul__
    monkeypatch.setattr(torch.Tensor, "__mul__", lambda a, b: made.append(multiply(a, b)) or made[-1].detach())
    EmulatedWorkload(PROFILE).loss(model, 0, 0).backward()
    addresses = {tensor.data_ptr() for tensor in made}
    assert all(parameter.grad.data_ptr() in addresses for parameter in model.parameters())


def test_training_stays_finite() -> None:
    workload = EmulatedWorkload(load_profile("vgg16").scaled(nbytes=1e-5)).untimed()
    model = workload.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(500):
        optimizer.zero_grad()
        workload.loss(model, step, 0).backward()
        optimizer.step()
    assert all(parameter.abs().max() < 100 for parameter in model.parameters())


# --- the model ---


@pytest.mark.parametrize("name", ["uniform", "vgg16", "resnet50", "bert-base", "gpt2-small"])
def test_modules_and_parameters_are_those_of_the_profile(name: str) -> None:
    profile = load_profile(name).scaled(nbytes=1e-4)
    model = EmulatedModel(profile, FakeClock())
    modules = dict(model.named_modules())
    for layer in profile.layers:
        assert tuple(tuple(p.shape) for p in modules[layer.name].parameters(recurse=False)) == layer.shapes
    assert sum(p.numel() * p.element_size() for p in model.parameters()) == profile.nbytes


def test_patterns_are_held_once() -> None:
    model = EmulatedModel(load_profile("uniform"), FakeClock())
    storages = {p.untyped_storage().data_ptr() for layer in model.children() for p in layer.patterns}
    assert len(storages) == 1
    assert not list(model.buffers())


def named(*names: str) -> Profile:
    return Profile("named", tuple(LayerProfile(name, ((2,),), 0.0, 0.0) for name in names), "made up")


def test_a_layer_may_lie_within_another() -> None:
    for names in (("outer", "outer.inner"), ("outer.inner", "outer")):
        model = EmulatedModel(named(*names), FakeClock())
        assert {name for name, _ in model.named_parameters()} == {"outer.weight0", "outer.inner.weight0"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a", "a"), "two layers are called 'a'"),
        (("a.b", "a.b"), "two layers are called 'a.b'"),
        (("",), "a layer cannot be called ''"),
        (("a..b",), "a layer cannot be called 'a..b'"),
        (("forward",), "a layer cannot be called 'forward'"),
    ],
)
def test_names_that_cannot_be(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmulatedModel(named(*names), FakeClock())
