from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bench.harness.layer_times import LayerTimer, clock_of
from bench.workloads import load_profile
from bench.workloads.emulated import EmulatedModel, EmulatedWorkload
from commsched.simulator.profile import LayerProfile, Profile
from tests.bench.workloads.clock import FakeClock


def timed(profile: Profile, steps: int = 1, update_seconds: float = 0.0):
    """The layers of an emulated model as they are timed, on a clock on which only layers and updates take time."""
    clock = FakeClock()
    model = EmulatedModel(profile, clock)
    timer = LayerTimer(model, clock)
    for step in range(steps):
        loss = EmulatedWorkload(profile).loss(model, step, 0)
        forward_ended = clock.now()
        loss.backward()
        backward_ended = clock.now()
        clock.time += update_seconds
        timer.step(forward_ended, backward_ended, clock.now())
    return timer.result(steps - 1)


@pytest.mark.parametrize("name", ["uniform", "vgg16", "resnet50", "bert-base", "gpt2-small"])
def test_what_is_measured_is_the_profile(name: str) -> None:
    profile = load_profile(name).scaled(nbytes=1e-4)
    times = timed(profile, steps=2)
    layers = [layer for layer in profile.layers if layer.shapes]
    head = sum(layer.forward_seconds for layer in profile.layers if not layer.shapes)
    assert times.names == [layer.name for layer in layers]
    assert times.nbytes == [layer.nbytes for layer in layers]
    assert times.tensors == [[4 * math.prod(shape) for shape in layer.shapes] for layer in layers]
    forward = [layer.forward_seconds for layer in layers]
    backward = [layer.backward_seconds for layer in layers]
    forward[-1] += head  # what has no gradient is counted to the layer in front
    backward[-1] += 2 * head
    assert times.forward_seconds == pytest.approx(forward, abs=1e-8)
    assert times.backward_seconds == pytest.approx(backward, abs=1e-8)


def test_the_update_is_shared_out_by_bytes() -> None:
    profile = Profile("two", (LayerProfile("a", ((3,),), 1.0, 2.0), LayerProfile("b", ((1,),), 4.0, 8.0)), "made up")
    assert timed(profile, update_seconds=0.5).forward_seconds == [1.375, 4.125]


class Ticks:
    """A clock that goes on by one second each time it is asked."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1
        return self.time

    def seconds(self, moments):
        return list(moments)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)  # made before, used after
        self.table = nn.Embedding(5, 4)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens) * self.scale)


def step(timer: LayerTimer, clock: Ticks, loss: torch.Tensor) -> None:
    forward_ended = clock.now()
    loss.backward()
    backward_ended = clock.now()
    timer.step(forward_ended, backward_ended, backward_ended)


def test_a_tied_weight_counts_where_it_is_used_first_and_the_model_itself_is_a_layer() -> None:
    clock, model = Ticks(), Tied()
    timer = LayerTimer(model, clock)
    step(timer, clock, model(torch.tensor([1, 2])).sum())
    times = timer.result(0)
    assert times.names == ["model", "table", "head"]
    assert times.nbytes == [4 * 4, 5 * 4 * 4, 5 * 4]
    assert [layer.name for layer in timer.layers] == times.names
    # Moments: model 1, table 2, head 3, forward's end 4, bias 5, then scale and the table in some order: 6 and 7.
    assert times.forward_seconds == [1, 1, 1]
    assert times.backward_seconds[2] == 1
    assert sum(times.backward_seconds) == 3


def test_a_gradient_that_comes_early_takes_no_time() -> None:
    class Crossed(nn.Module):
        """The layer used first is not between the others and the loss, and its gradient comes first."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(2, 2, bias=False) for _ in range(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.a(inputs)
            return self.a(self.c(self.b(inputs)))

    clock, model = Ticks(), Crossed()
    timer = LayerTimer(model, clock)
    step(timer, clock, model(torch.ones(1, 2)).sum())
    times = timer.result(0)
    assert times.names == ["a", "b", "c"]  # moments 1 to 3; forward's end 4; gradients of a, c, b at 5, 6, 7
    assert times.backward_seconds == [0, 1, 2]


def test_noise_that_hits_another_layer_in_each_step_counts() -> None:
    class Noisy(Ticks):
        """One layer of each step takes 10 s and not 1, in forward and in backward."""

        calls = 0

        def now(self) -> float:
            step, place = divmod(self.calls, 8)  # three layers, forward's end, three gradients, backward's end
            self.calls += 1
            self.time += 9 * (place in (1 + step, 4 + step))
            return super().now()

    clock, model = Noisy(), nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    timer = LayerTimer(model, clock)
    for _ in range(3):
        step(timer, clock, model(torch.ones(1, 2)).sum())
    times = timer.result(0)
    assert times.forward_seconds == pytest.approx([4, 4, 4])  # the sums are 12, each layer's median is 1
    assert times.backward_seconds == pytest.approx([4, 4, 4])


def test_frozen_parameters_make_no_layer() -> None:
    clock, model = Ticks(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    timer = LayerTimer(model, clock)
    step(timer, clock, model(torch.ones(1, 2)).sum())
    assert timer.result(0).names == ["0"]


def test_errors() -> None:
    clock, model = Ticks(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    timer = LayerTimer(model, clock)
    with pytest.raises(ValueError, match="no layer with parameters was used in this step"):
        timer.step(1.0, 1.0, 1.0)
    model(torch.ones(1, 2))
    with pytest.raises(ValueError, match="layer '0' has a parameter that got no gradient in this step"):
        timer.step(1.0, 1.0, 1.0)
    step(timer, clock, model(torch.ones(1, 2)).sum())
    model.add_module("2", model[0])
    del model._modules["0"]
    with pytest.raises(ValueError, match=r"used in the order \['1', '0'\], and in the first step in \['0', '1'\]"):
        step(timer, clock, model(torch.ones(1, 2)).sum())
    with pytest.raises(ValueError, match="1 steps were timed, and 1 of them are for warming up"):
        timer.result(1)


class DeviceEvents:
    """Stands in for ``torch.cuda``: the device reaches an event a second after the one before, when somebody waits for it."""

    def __init__(self) -> None:
        self.recorded: list[DeviceEvents.Event] = []

    class Event:
        reached: float | None = None

    def make(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        made = self.Event()
        made.record = lambda: self.recorded.append(made)
        made.elapsed_time = lambda end: 1000 * (end.reached - made.reached)  # not before both are reached
        return made

    def synchronize(self) -> None:
        for number, event in enumerate(self.recorded):
            event.reached = float(number)


def test_layers_on_a_gpu_are_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    device = DeviceEvents()
    monkeypatch.setattr(torch.cuda, "Event", device.make)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    clock, model = clock_of("cuda:1"), nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    timer = LayerTimer(model, clock)
    for _ in range(2):
        step(timer, clock, model(torch.ones(1, 2)).sum())
    times = timer.result(1)
    assert times.forward_seconds == [1, 1]
    assert times.backward_seconds == [1, 1]
