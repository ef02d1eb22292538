"""What all this is for: communication goes on during backward and during the next forward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from commsched import SchedulerConfig, Session
from commsched.core.group import DependencyProxy
from commsched.core.interfaces import Completion, ForwardingTransport, Transport
from commsched.core.task import CommTask
from commsched.plugins.torch import ScheduledOptimizer
from commsched.session.local import local_sessions
from commsched.testing.world import run_world

from ..where import here
from .loop import Data, alone, batch, require_close, run, train

PATIENCE_SECONDS = 60.0  # after which a test goes on, to fail
LATE = "the first layer waited for the last"
LARGE_BYTES = 2000


class Held(ForwardingTransport):
    """A transport whose large averages, those of the last layer, stay on their way until the test lets them arrive."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.large_one_started = threading.Event()
        self._completions: dict[CommTask, Completion] = {}
        self._held: list[CommTask] | None = None
        self._lock = threading.Lock()

    def start(self, task: CommTask, completion: Completion) -> None:
        with self._lock:
            self._completions[task] = completion
            if self._held is not None and task.nbytes >= LARGE_BYTES:
                self.large_one_started.set()
        super().start(task, self)

    # --- Completion, for the wrapped transport ---

    def on_sent(self, task: CommTask) -> None:
        with self._lock:
            completion = self._completions[task]
        completion.on_sent(task)

    def on_done(self, task: CommTask) -> None:
        with self._lock:
            if self._held is not None and task.nbytes >= LARGE_BYTES:
                self._held.append(task)
                return
            completion = self._completions.pop(task)
        completion.on_done(task)

    # --- for the test ---

    def hold(self) -> None:
        self._held = []

    def let_go(self) -> bool:
        """Whether anything was still held up."""
        with self._lock:
            held, self._held = self._held, None
            completions = [self._completions.pop(task) for task in held or ()]
        for task, completion in zip(held or (), completions):
            completion.on_done(task)
        return held is not None


def wide() -> nn.Module:
    model: nn.Module = here(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 500)).double())
    return model


def networked(loop: Any) -> None:
    """``loop(network, data, model, optimizer)`` on every rank; ``network`` is None in plain training."""
    networks: dict[int, Held] = {}

    def wrap(transport: Transport) -> Transport:
        networks[transport.rank] = Held(transport)
        return networks[transport.rank]

    def with_network(data: Data, model: nn.Module, optimizer: Any) -> Any:
        return loop(networks.get(data.ranks[0]) if len(data.ranks) == 1 else None, data, model, optimizer)

    expected = alone(with_network, model=wide)
    for result in run(with_network, model=wide, config=SchedulerConfig(4096, 16384), wrap_transport=wrap):
        require_close(result, expected)


def test_the_next_forward_begins_while_the_last_layer_is_on_its_way() -> None:
    def loop(network: Held | None, data: Data, model: Any, optimizer: Any) -> Any:
        train(data, model, optimizer, steps=1)
        optimizer.zero_grad()
        loss = data.loss(model, 1)
        if network is not None:
            network.hold()
            timer = threading.Timer(PATIENCE_SECONDS, network.let_go)
            timer.start()
        loss.backward()
        optimizer.step()
        hidden = model[0](batch(7))
        if network is not None:
            assert network.let_go(), LATE
            timer.cancel()
        return hidden, model[2](torch.tanh(hidden))

    networked(loop)


def test_gradients_leave_while_backward_goes_on() -> None:
    def loop(network: Held | None, data: Data, model: Any, optimizer: Any) -> Any:
        train(data, model, optimizer, steps=1)
        optimizer.zero_grad()
        started: list[bool] = []
        if network is not None:
            model[1].register_full_backward_pre_hook(
                lambda *_: started.append(network.large_one_started.wait(PATIENCE_SECONDS)) and None
            )
        loss = data.loss(model, 1)
        if network is not None:
            network.hold()
        loss.backward()
        if network is not None:
            assert started == [True], "the last layer's gradient had not left when backward came to the first"
            network.let_go()
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    networked(loop)


def test_updates_whose_averages_arrive_while_a_reader_waits_are_made_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's average comes first, while the first layer's is waited for: one call updates both."""
    networks: dict[int, Held] = {}
    made: dict[int, list[int]] = {0: [], 1: []}
    update, wait = ScheduledOptimizer._update, DependencyProxy.wait

    def hold(transport: Transport) -> Transport:
        networks[transport.rank] = Held(transport)
        return networks[transport.rank]

    def note(self: Any, slots: list[Any]) -> None:
        made[self._session.rank].append(len(slots))
        update(self, slots)

    def loop(session: Session, model: nn.Module) -> None:
        optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, session=session)
        for first in (True, False):
            optimizer.zero_grad()
            model(here(torch.ones(3, 20, dtype=torch.float64))).square().mean().backward()
            optimizer.step()
            if first:
                optimizer.synchronize()
                made[session.rank].clear()
                networks[session.rank].hold()
        exchange: Any = optimizer._exchange
        front, back = (next(slot for slot in exchange.places.slots if slot.name == name) for name in ("0.weight", "1.weight"))

        def wait_while_averages_arrive(self: DependencyProxy) -> None:
            if self is front.proxies[0]:
                exchange.places.flags.kept()
                networks[session.rank].let_go()
                wait(back.proxies[0])
            wait(self)

        waits[front.proxies[0]] = wait_while_averages_arrive
        both.wait(60)
        model[0].weight.sum()
        assert made[session.rank] == [2]

    waits: dict[DependencyProxy, Callable[[DependencyProxy], None]] = {}
    both = threading.Barrier(2)
    monkeypatch.setattr(ScheduledOptimizer, "_update", note)
    monkeypatch.setattr(DependencyProxy, "wait", lambda self: waits.get(self, wait)(self))
    models = [here(nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(2))).double()) for _ in range(2)]
    sessions = local_sessions(2, SchedulerConfig(4096, 16384), wrap_transport=hold)

    def rank_loop(rank: int) -> None:
        with sessions[rank] as session:
            loop(session, models[rank])

    try:
        run_world(2, rank_loop, timeout_seconds=60)
    finally:
        for session in sessions:
            session.abort("the test is over")
