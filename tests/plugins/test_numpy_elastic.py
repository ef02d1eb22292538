"""Elastic loops of the numpy engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import commsched
from commsched.control.generations import HOLDERS_LOST
from commsched.plugins.numpy import SGD, Linear, Network, ReLU, ScheduledOptimizer, softmax_cross_entropy
from commsched.session.session import Session
from tests.plugins.elastic_world import SMALL, Gates, equal, kill_the_giver, run_elastic

STEPS = 6


class Between:
    """A layer that computes nothing: the updates of the layers before it are made, those behind it are not."""

    def __init__(self) -> None:
        self.parameters: dict[str, NDArray[Any]] = {}
        self.gradients: dict[str, NDArray[Any]] = {}
        self.gate: Callable[[], None] = lambda: None

    def forward(self, inputs: NDArray[Any]) -> NDArray[Any]:
        self.gate()
        return inputs

    def backward(self, gradient: NDArray[Any]) -> NDArray[Any]:
        return gradient


def train(session: Session, gates: Gates, first: int = 0) -> list[Any]:
    rng = np.random.default_rng(session.rank)
    between = Between()
    network = Network([Linear(6, 8, rng), ReLU(), between, Linear(8, 5, rng), ReLU(), Linear(5, 3, rng)])
    sgd = SGD(network, 0.1, 0.9)
    optimizer = ScheduledOptimizer(sgd, session)
    elastic = commsched.Elastic(optimizer)
    for step in elastic.steps(STEPS, first):
        with step:
            sgd.learning_rate = 0.1 / (1 + step.number)
            gates.at("start", step.rank, step.number)
            between.gate = partial(gates.at, "between", step.rank, step.number)
            data = np.random.default_rng((step.number, step.rank))
            outputs = network.forward(data.standard_normal((4, 6)))
            gates.at("forward", step.rank, step.number)
            _, gradient = softmax_cross_entropy(outputs, data.integers(0, 3, 4))
            network.backward(gradient)
            gates.at("backward", step.rank, step.number)
            optimizer.step()
            gates.at("stepped", step.rank, step.number)
    layers = zip(network.layers, sgd.velocities)
    return [[values.tolist() for values in (*layer.parameters.values(), *velocities.values())] for layer, velocities in layers]


@pytest.mark.parametrize("where", ["start", "forward", "backward", "stepped"])
def test_weights_are_those_of_a_run_without_loss(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    undisturbed = run_elastic(monkeypatch, 3, partial(train, gates=Gates()))
    run = run_elastic(monkeypatch, 3, partial(train, gates=Gates((where, 0, 2), (where, 2, 5))), max_restarts=2)
    assert equal(run.results) == equal(undisturbed.results)


class Together(Gates):
    """Rank 1 dies behind step 3, of which it has sent its first layer only, when the others have updated that layer."""

    def __init__(self) -> None:
        super().__init__(("stepped", 1, 3))
        self._all = threading.Barrier(3, timeout=60.0)
        self._to_meet = {("between", 0, 4), ("stepped", 1, 3), ("between", 2, 4)}

    def at(self, where: str, rank: int, step: int) -> None:
        if (where, rank, step) in self._to_meet:
            self._to_meet.remove((where, rank, step))
            self._all.wait()
        super().at(where, rank, step)


def test_updates_of_a_step_that_nobody_can_finish_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = run_elastic(monkeypatch, 3, partial(train, gates=Gates()))
    first_layer = math.ceil((6 * 8 + 8) * 8 / SMALL.partition_bytes)  # partitions that have a part of it

    def holds(rank: int, step: int, partition: int) -> bool:
        return (rank, step) == (1, 3) and partition >= first_layer

    run = run_elastic(monkeypatch, 3, partial(train, gates=Together()), max_restarts=1, holds=holds)
    assert run.generations == [(3, 0), (3, 3)]
    assert equal(run.results) == equal(undisturbed.results)


@pytest.mark.parametrize("where", [0, 1, 5, 11, 12, "to begin an elastic loop", "to begin the steps"])
def test_the_root_is_lost_while_it_gives_its_values_and_another_rank_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, where: str | int
) -> None:
    """It broadcasts 12 arrays, and then what the loop has beside them."""
    undisturbed = run_elastic(monkeypatch, 3, partial(train, gates=Gates()))
    kill_the_giver(monkeypatch, where)
    run = run_elastic(monkeypatch, 3, partial(train, gates=Gates(("forward", 1, 3))), max_restarts=2)
    assert run.why == ""
    assert len(run.generations) == 3
    assert equal(run.results) == equal(undisturbed.results)


class Ahead(Gates):
    """Rank 1 dies in step 4, when rank 0 has made the updates of step 3, and rank 2 has not."""

    def __init__(self) -> None:
        super().__init__(("start", 1, 4))
        self._all = threading.Barrier(3, timeout=60.0)
        self._to_meet = {("forward", 0, 4), ("start", 1, 4), ("start", 2, 4)}
        self._session: Session | None = None  # of rank 2

    def train(self, session: Session) -> list[Any]:
        if session.rank == 2 and self._session is None:
            self._session = session
        return train(session, self)

    def at(self, where: str, rank: int, step: int) -> None:
        if (where, rank, step) in self._to_meet:
            self._to_meet.remove((where, rank, step))
            self._all.wait()
            if rank == 2 and self._session is not None:
                self._session.gather(None)  # raises that rank 1 is lost
        super().at(where, rank, step)


def test_the_root_is_lost_with_the_only_result_of_the_last_step_and_the_others_go_on_from_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undisturbed = run_elastic(monkeypatch, 3, partial(train, gates=Gates()))
    kill_the_giver(monkeypatch, 5)
    run = run_elastic(monkeypatch, 3, Ahead().train, max_restarts=2)
    assert run.generations == [(3, 0), (3, 4), (3, 3)]
    assert equal(run.results) == equal(undisturbed.results)


def test_a_new_process_that_has_a_part_of_the_values_is_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    kill_the_giver(monkeypatch, 5)
    run = run_elastic(monkeypatch, 2, partial(train, gates=Gates(("forward", 1, 3))), max_restarts=5)
    assert run.results == {}
    assert run.why == HOLDERS_LOST
    assert len(run.generations) == 2


def test_a_job_that_begins_with_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = run_elastic(monkeypatch, 2, partial(train, gates=Gates(), first=2))
    run = run_elastic(monkeypatch, 2, partial(train, gates=Gates(("start", 1, 4)), first=2), max_restarts=1)
    assert equal(run.results) == equal(undisturbed.results)
    assert [ranks for ranks, _ in run.generations] == [2, 2]


def test_down_to_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = Gates(("backward", 1, 2), ("forward", 1, 4))
    run = run_elastic(monkeypatch, 3, partial(train, gates=gates), min_ranks=1)
    assert [ranks for ranks, _ in run.generations] == [3, 2, 1]
    assert [*run.results] == [0]
