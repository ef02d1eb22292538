from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from commsched.plugins.torch import ScheduledOptimizer
from commsched.plugins.torch.rounds import ROUND_TRANSITIONS, RoundState
from commsched.session.local import local_sessions
from commsched.session.session import Session
from commsched.testing.world import run_world

T = TypeVar("T")
R = TypeVar("R", bound="Training")


class Training:
    """One of two ranks, whose round is watched."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.model = self.make_model()
        self.optimizer: Any = ScheduledOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1), model=self.model, session=self.session
        )
        self.round = self.optimizer._exchange._round

    def make_model(self) -> nn.Linear:
        return nn.Linear(2, 1)

    def backward(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()

    def read(self) -> None:
        assert self.model.weight.grad is not None
        self.model.weight.grad.norm().item()

    def step(self) -> None:
        self.optimizer.step()

    def no_sync(self) -> None:
        with self.optimizer.no_sync():
            self.backward()

    def drop(self) -> None:
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.session.close()


def on_two_ranks(run: Callable[[Training], T]) -> list[T]:
    return trained_on_two_ranks(Training, run)


def trained_on_two_ranks(make: Callable[[Session], R], run: Callable[[R], T]) -> list[T]:
    sessions = local_sessions(2)

    def rank_main(rank: int) -> T:
        training = make(sessions[rank])
        try:
            return run(training)
        finally:
            training.close()

    return run_world(2, rank_main)


@pytest.mark.parametrize(
    ("actions", "states"),
    [
        ("backward step backward step", "submitted committed submitted committed"),
        ("backward read step", "submitted filled committed"),
        ("backward backward step", "submitted submitted committed"),
        ("no_sync step", "idle committed"),
        ("step", "committed"),
        ("backward drop step", "submitted submitted committed"),
        ("backward close", "submitted idle"),
        ("backward read close", "submitted filled idle"),
        ("backward step close", "submitted committed committed"),
    ],
)
def test_what_a_training_does_to_its_round(actions: str, states: str) -> None:
    def train(training: Training) -> str:
        seen = []
        for action in actions.split():
            getattr(training, action)()
            seen.append(training.round.state.value)
        return " ".join(seen)

    assert on_two_ranks(train) == [states, states]


def test_a_second_gradient_folds_the_round_that_the_next_follows() -> None:
    def train(training: Training) -> list[str]:
        events = []
        advance = training.round.advance

        def noted(event: str) -> None:
            advance(event)
            events.append(event)

        training.round.advance = noted
        training.backward()
        training.backward()
        training.step()
        return events

    assert on_two_ranks(train)[0] == ["begin", "submit", "complete", "fold", "begin", "submit", "complete", "commit"]


def test_a_reader_that_comes_after_the_commit_fills_nothing() -> None:
    """Another thread may read a gradient while the training thread is in step()."""

    def train(training: Training) -> RoundState:
        training.backward()
        training.step()
        training.round.complete()
        training.round.fill()
        state: RoundState = training.round.state
        return state

    assert on_two_ranks(train) == [RoundState.COMMITTED] * 2


def test_threads_that_read_at_once_are_served_by_one_of_them() -> None:
    def train(training: Training) -> int:
        training.backward()
        training.round.complete()
        filled = []
        advance = training.round.advance

        def noted(event: str) -> None:
            advance(event)
            if event == "fill":
                filled.append(True)
                training.round.fill()  # the other thread has come in the meantime

        training.round.advance = noted
        training.read()
        training.step()
        return len(filled)

    assert on_two_ranks(train) == [1, 1]


def test_every_state_can_be_left_and_reached() -> None:
    assert {state for state, _ in ROUND_TRANSITIONS} == set(RoundState) == set(ROUND_TRANSITIONS.values())


def test_any_other_event_raises_and_changes_nothing() -> None:
    def fold(training: Training) -> RoundState:
        with pytest.raises(KeyError, match="fold"):
            training.round.advance("fold")
        return training.round.state

    assert on_two_ranks(fold) == [RoundState.IDLE] * 2


class NotedLock:
    """A lock that notes when another thread than the first comes to it."""

    def __init__(self, lock: Any, came: threading.Event) -> None:
        self._lock, self._came, self._first = lock, came, threading.get_ident()

    def __enter__(self) -> None:
        if threading.get_ident() != self._first:
            self._came.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_thread_that_reads_while_another_submits_the_rest_goes_on_when_that_is_done() -> None:
    """Otherwise it would use the flags of the round before."""

    def train(training: Training) -> list[str]:
        training.backward()
        training.step()
        training.optimizer.zero_grad()
        training.model.weight.sum().backward()  # the gradient of the bias is left to submit
        came, log = threading.Event(), []
        current = training.round
        current._lock = NotedLock(current._lock, came)
        flags = current._places.flags
        offer_used, used = flags.offer_used, flags.used

        def noted_used() -> object:
            log.append("used")
            came.set()
            return used()

        def noted_offer(*how: Any) -> None:
            reader.start()
            assert came.wait(60)
            offer_used(*how)
            log.append("offered")

        def read() -> None:
            current.complete()
            current.fill()

        reader = threading.Thread(target=read, daemon=True)
        flags.used, flags.offer_used = noted_used, noted_offer
        training.read()
        reader.join(60)
        assert not reader.is_alive()
        flags.used, flags.offer_used = used, offer_used
        training.step()
        return log

    assert on_two_ranks(train) == [["offered", "used"]] * 2
