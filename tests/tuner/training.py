"""A numpy training whose weights show whatever goes wrong, on ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commsched.core.interfaces import Transport
from commsched.core.scheduler import SchedulerConfig
from commsched.plugins.numpy import SGD, Linear, Network, ReLU, ScheduledOptimizer, softmax_cross_entropy
from commsched.session.local import local_sessions
from commsched.session.session import Session
from commsched.session.tuning import facts_of, start_choosing, start_tuning
from commsched.settings import Settings
from commsched.testing.check_plugin import Delayed
from commsched.testing.world import run_world

Weights = dict[str, NDArray[Any]]

#: Cuts every tensor of the default network.
SMALL = SchedulerConfig(400, 800)

_ASK_STEPS = 20

#: Steps: more than there is time for, since ``until`` ends the training.
UNTIL_ENDED = 10**6

#: Of a network with a little more than twice the smallest partition that tuning tries.
WIDE = 128


def network(seed: int, width: int = 24) -> Network:
    rng = np.random.default_rng(seed)
    return Network([Linear(6, width, rng), ReLU(), Linear(width, width, rng), ReLU(), Linear(width, 3, rng)])


def weights_of(trained: Network) -> Weights:
    return {f"{i}.{name}": value.copy() for i, layer in enumerate(trained.layers) for name, value in layer.parameters.items()}


@dataclass
class Training:
    """``steps`` steps on each of ``world_size`` ranks; ``before_step(session, step)`` is called on each rank. ``until`` ends
    it, on all ranks at the same step, soon after it was set."""

    world_size: int = 2
    steps: int = 40
    config: SchedulerConfig = SMALL
    width: int = 24
    before_step: Callable[[Session, int], None] = lambda session, step: None
    open_rank: Callable[[Session], None] = lambda session: None  # before anything is registered
    until: threading.Event = field(default_factory=threading.Event)
    later: tuple[tuple[int, threading.Event], ...] = ()  # width, and what ends it, of networks to be trained after the first
    delay_seconds: float = 0.0
    wrap_transport: Callable[[Transport], Transport] | None = None
    sessions: list[Session] = field(default_factory=list)
    taken: int = 0  # steps

    def run(self, timeout_seconds: float = 300.0) -> list[Weights]:
        """The weights of each rank."""
        self.sessions = local_sessions(self.world_size, self.config, wrap_transport=self._wrap)
        try:
            return run_world(self.world_size, self._rank, timeout_seconds=timeout_seconds)
        finally:
            for session in self.sessions:
                session.abort("the test is over")

    def _wrap(self, transport: Transport) -> Transport:
        if self.wrap_transport is not None:
            transport = self.wrap_transport(transport)
        return Delayed(transport, transport.rank, self.delay_seconds) if self.delay_seconds else transport

    def _rank(self, rank: int) -> Weights:
        with self.sessions[rank] as session:
            self.open_rank(session)
            for width, until in ((self.width, self.until), *self.later):
                weights = self._train(session, width, until)
            return weights

    def _train(self, session: Session, width: int, until: threading.Event) -> Weights:
        trained = network(session.rank, width)
        optimizer = ScheduledOptimizer(SGD(trained, 0.1, 0.9), session)
        for step in range(self.steps):
            self.before_step(session, step)
            rng = np.random.default_rng([session.rank, step])
            _, gradient = softmax_cross_entropy(trained.forward(rng.standard_normal((4, 6))), rng.integers(0, 3, 4))
            trained.backward(gradient)
            optimizer.step()
            self.taken = step + 1
            if self.taken % _ASK_STEPS == 0 and session.gather(until.is_set())[0]:
                break
        optimizer.synchronize()
        return weights_of(trained)


def tuned(settings: Settings, say: Callable[[str], None] = lambda line: None) -> Callable[[Session], None]:
    """For ``open_rank``."""
    return lambda session: start_tuning(session, settings, facts_of(session, settings, "local", "127.0.0.1", 1), say)


def choosing(settings: Settings, say: Callable[[str], None] = lambda line: None) -> Callable[[Session], None]:
    """For ``open_rank``: partition and credit choose themselves."""

    def open_rank(session: Session) -> None:
        start_choosing(session, settings, facts_of(session, settings, "local", "127.0.0.1", 1), say)

    return open_rank


def require_same_weights(by_rank: list[Weights], expected: Weights) -> None:
    """Bitwise."""
    for rank, weights in enumerate(by_rank):
        for name, value in expected.items():
            assert np.isfinite(value).all(), name
            np.testing.assert_array_equal(weights[name], value, err_msg=f"{name} of rank {rank}")
