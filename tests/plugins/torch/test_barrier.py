"""What waits for all averages before the next forward is named once, with its cost; the rest of the overlap stays."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from commsched import SchedulerConfig, Session
from commsched.core.interfaces import Completion, Observer, Transport
from commsched.core.manifest import Manifest
from commsched.core.task import CommTask
from commsched.plugins.torch import ScheduledOptimizer
from commsched.plugins.torch import timing as barrier
from commsched.plugins.torch.timing import STEPS, FullWaitReport
from commsched.session.local import local_sessions
from commsched.testing.check_plugin import Delayed
from commsched.testing.world import run_world

DELAY_SECONDS = 0.004
SMALL = SchedulerConfig(64, 128)  # every tensor cut
COST = r"median (\d+\.\d) ms of (\d+\.\d) ms per step \((\d+) %\)"


class AllAtOnce(torch.optim.SGD):
    """Not of torch.optim, so it may use all gradients at once."""


def _unscale(model: nn.Module, optimizer: Any) -> None:
    """The scale is 1, so that the numbers are those of plain steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))  # makes the scale that unscale_ divides by
    scaler.unscale_(optimizer)  # the line that is named


class Midway(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.call()
        return gradients[0], None


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def run(
    loop: Callable[[Session, nn.Module], Any],
    wrap: Callable[[Transport], Transport] | None = None,
    config: SchedulerConfig | None = None,
) -> list[Any]:
    def rank_loop(rank: int) -> Any:
        with sessions[rank] as session:
            return loop(session, models[rank])

    models = [make_model() for _ in range(2)]
    sessions = local_sessions(2, config, wrap_transport=wrap)
    try:
        return run_world(2, rank_loop, timeout_seconds=300)
    finally:
        for session in sessions:
            session.abort("the test is over")


def late(transport: Transport) -> Transport:
    """Every send and every reply takes DELAY_SECONDS."""
    delayed = Delayed(transport, transport.rank, DELAY_SECONDS)
    delayed._random.uniform = max  # type: ignore[method-assign,assignment]  # the longest of those it may draw
    return delayed


def backward(session: Session, model: Any, step: int, midway: Callable[[], None] = lambda: None) -> None:
    """Calls ``midway`` when it is through the last layer."""
    generator = torch.Generator().manual_seed(100 * session.rank + step)
    hidden = model[1](model[0](torch.randn(5, 4, generator=generator, dtype=torch.float64)))
    model[2](Midway.apply(hidden, midway)).square().mean().backward()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "all averages are waited for" in record.getMessage()]


def _clip(model: nn.Module, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def _clip_what_is_clamped(model: nn.Module, optimizer: Any) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


READS: dict[str, tuple[Callable[[nn.Module, Any], Any], int]] = {
    "a norm of what was clamped": (_clip_what_is_clamped, _clip_what_is_clamped.__code__.co_firstlineno + 2),
    "a log line": (read := lambda model, optimizer: model[0].weight.grad.sum().item(), read.__code__.co_firstlineno),
}
WAITS_FOR_NORMS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "clip_grad_norm_": _clip,
    "a log line": lambda model, optimizer: model[0].weight.grad.norm().item(),
    "GradScaler": _unscale,
}


@pytest.mark.parametrize("name", WAITS_FOR_NORMS)
def test_a_line_that_waits_for_norms_only_is_not_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def loop(session: Session, model: nn.Module) -> None:
        optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, session=session)
        for step in range(STEPS + 4):
            optimizer.zero_grad()
            backward(session, model, step)
            WAITS_FOR_NORMS[name](model, optimizer)
            optimizer.step()

    with caplog.at_level(logging.INFO, logger="commsched"):
        run(loop)
    assert messages(caplog) == []


@pytest.mark.parametrize("name", READS)
def test_a_line_that_reads_gradients_before_step_is_named_once_with_what_it_costs(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(session: Session, model: nn.Module) -> None:
        optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, session=session)
        for step in range(2 * STEPS + 2):
            optimizer.zero_grad()
            backward(session, model, step)
            read(model, optimizer)
            optimizer.step()

    read, line = READS[name]
    with caplog.at_level(logging.INFO, logger="commsched"):
        run(loop, late)
    (message,) = messages(caplog)
    assert message.startswith(f"{__file__}:{line}: gradients are read before step(), so all averages are waited for there")
    cost = re.search(COST, message)
    assert cost is not None
    waited, whole, share = map(float, cost.groups())
    assert 1e3 * DELAY_SECONDS <= waited <= whole  # the first layer's gradient leaves when backward is over
    assert share == pytest.approx(100 * waited / whole, abs=2)


def test_an_optimizer_that_needs_all_averages_is_named_once_with_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    def loop(session: Session, model: nn.Module) -> None:
        optimizer = ScheduledOptimizer(AllAtOnce(model.parameters(), lr=0.1), model, session=session)
        for step in range(STEPS + 2):
            optimizer.zero_grad()
            backward(session, model, step)
            optimizer.step()

    with caplog.at_level(logging.INFO, logger="commsched"):
        run(loop, late)
    (message,) = messages(caplog)
    assert re.match(rf"{re.escape(__file__)}:\d+: AllAtOnce may use all gradients at once, so all averages", message)
    cost = re.search(COST, message)
    assert cost is not None
    assert 1e3 * DELAY_SECONDS <= float(cost[1]) <= float(cost[2])


def test_a_loop_that_waits_nowhere_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def loop(session: Session, model: nn.Module) -> None:
        optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, session=session)
        for step in range(STEPS + 2):
            optimizer.zero_grad()
            backward(session, model, step)
            optimizer.step()

    with caplog.at_level(logging.INFO, logger="commsched"):
        run(loop)
    assert messages(caplog) == []


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(barrier, "monotonic", fake)
    return fake


def test_waits_of_a_step_are_added_and_steps_without_one_do_not_count(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    measured = FullWaitReport(lambda *wait: None)
    with caplog.at_level(logging.INFO, logger="commsched"):
        for step in range(2 * STEPS):
            assert messages(caplog) == []
            clock.seconds += 0.050
            if step % 2 == 1:
                for _ in range(3):  # several gradients are read
                    with measured.waiting("gradients are read before step()"):
                        clock.seconds += 0.010
            clock.seconds += 0.020
            measured.step_ended()
    (message,) = messages(caplog)
    assert "median 30.0 ms of 100.0 ms per step (30 %)" in message


def test_each_line_is_counted_by_itself(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    measured = FullWaitReport(lambda *wait: None)
    with caplog.at_level(logging.INFO, logger="commsched"):
        for step in range(STEPS + 3):
            clock.seconds += 1.0
            if step == 2:
                with measured.waiting("it is logged now and then"):
                    clock.seconds += 0.5
            else:
                with measured.waiting("it is clipped"):
                    clock.seconds += 0.25
            measured.step_ended()
    (message,) = messages(caplog)  # the first step's time is not known, so it does not count
    assert "it is clipped" in message
    assert "median 250.0 ms of 1250.0 ms per step (20 %)" in message


def test_a_wait_that_fails_is_no_wait_of_the_next_step(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    measured = FullWaitReport(lambda *wait: None)
    with pytest.raises(RuntimeError, match="the network is gone"), measured.waiting("gradients are read"):
        raise RuntimeError("the network is gone")
    with caplog.at_level(logging.INFO, logger="commsched"):
        for _ in range(STEPS + 1):
            clock.seconds += 1.0
            measured.step_ended()
    assert messages(caplog) == []


# --- what clipping leaves as it is ---


class Watch(Observer):
    """An observer: which tensors' averages are there, and what the engine waited for."""

    def __init__(self, session: Session) -> None:
        self.done: dict[str, threading.Event] = {}
        self.waits: list[str] = []
        self._manifests: dict[int, Manifest] = {}
        session.on_register(self._on_register)
        session.observe(self)

    def _on_register(self, group: int, manifest: Manifest) -> None:
        self._manifests[group] = manifest
        self.done.update({spec.name: threading.Event() for spec in manifest.tensors})

    def on_task(self, task: CommTask) -> None:
        if task.group in self._manifests:  # the others are broadcasts
            for tensor in task.partition.tensors:
                self.done[self._manifests[task.group].tensors[tensor].name].set()

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        if track == "wait":
            self.waits.append(name)


def test_with_clipping_averages_are_made_during_backward_and_updates_wait_for_their_reader() -> None:
    def loop(session: Session, model: nn.Module) -> list[str]:
        updates: list[int] = []
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        plain.register_step_pre_hook(lambda its, *_: updates.append(len(its.param_groups[0]["params"])))
        optimizer = ScheduledOptimizer(plain, model, session=session, per_parameter=True)
        watch = Watch(session)

        def average_of_the_last_layer() -> None:
            assert watch.done["2.bias"].wait(60), "the last layer's average was not made during backward"

        for step in range(2):
            backward(session, model, step, average_of_the_last_layer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            watch.waits.clear()
            updates.clear()
            optimizer.step()
            assert updates == []
            model(torch.ones(5, 4, dtype=torch.float64))
            assert sum(updates) == 4
            for event in watch.done.values():
                event.clear()
        return watch.waits

    for waits in run(loop, late, SMALL):
        assert set(waits) <= {"commsched.kept"}  # whether every rank commits to the step, and nothing else


class Held:
    """Another transport, whose next start waits for ``go``, so that what becomes ready meanwhile stands behind it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.go = threading.Event()
        self.go.set()
        self.started: list[CommTask] = []
        self.holding = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def start(self, task: CommTask, completion: Completion) -> None:
        self.started.append(task)
        self.holding.set()
        assert self.go.wait(60)
        self._transport.start(task, completion)


def test_with_clipping_front_layers_still_go_first() -> None:
    def loop(session: Session, model: nn.Module) -> list[int]:
        optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, session=session)
        held = session.transport
        assert isinstance(held, Held)

        def last_layer_is_being_sent() -> None:
            assert held.holding.wait(60)

        for step in range(2):
            optimizer.synchronize()  # nothing of the step before is on its way
            held.started.clear()
            held.holding.clear()
            if step == 1:
                held.go.clear()
            backward(session, model, step, last_layer_is_being_sent)
            held.go.set()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            gradients = held.started[0].group
            started = [task.partition.index for task in held.started if task.group == gradients]
            optimizer.step()
            optimizer.zero_grad()
        return started

    for first, *rest in run(loop, Held, SchedulerConfig(64, 64)):
        assert rest == sorted(rest)
        assert first > rest[0]
        assert len(rest) == 7
