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
from commsched.control.generations import HOLDERS_LOST, NOTHING_KEPT
from commsched.plugins.numpy import SGD, Linear, Network, ReLU, ScheduledOptimizer, softmax_cross_entropy
from commsched.plugins.numpy import plugin as numpy_plugin
from commsched.plugins.numpy.elastic import ElasticPart
from commsched.session.elastic import Keep
from commsched.session.session import Session
from commsched.testing import SimulatedDevice
from tests.plugins.elastic_world import SMALL, Gates, equal, kill_the_giver, run_elastic
from tests.plugins.simulated_array import SimulatedArray
from tests.plugins.test_numpy_on_device import move, put

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


def train(session: Session, gates: Gates, first: int = 0, keep: Keep = "device", on_device: bool = False) -> list[Any]:
    rng = np.random.default_rng(session.rank)
    entry, between = Between(), Between()
    network = Network([entry, Linear(6, 8, rng), ReLU(), between, Linear(8, 5, rng), ReLU(), Linear(5, 3, rng)])
    device = SimulatedDevice(seed=session.rank, number=session.rank) if on_device else None
    if device is not None:
        move(network, device)
    sgd = SGD(network, 0.1, 0.9)
    optimizer = ScheduledOptimizer(sgd, session, device)
    elastic = commsched.Elastic(optimizer, keep=keep)
    for step in elastic.steps(STEPS, first):
        with step:
            sgd.learning_rate = 0.1 / (1 + step.number)
            gates.at("start", step.rank, step.number)
            entry.gate = partial(gates.at, "entry", step.rank, step.number)
            between.gate = partial(gates.at, "between", step.rank, step.number)
            data = np.random.default_rng((step.number, step.rank))
            inputs = data.standard_normal((4, 6))
            outputs = network.forward(inputs if device is None else put(inputs, device))
            if device is not None:
                outputs = outputs.get()  # type: ignore[attr-defined]
            gates.at("forward", step.rank, step.number)
            _, gradient = softmax_cross_entropy(outputs, data.integers(0, 3, 4))
            network.backward(gradient if device is None else put(gradient, device))
            gates.at("backward", step.rank, step.number)
            optimizer.step()
            gates.at("stepped", step.rank, step.number)
    if device is not None:
        optimizer.synchronize()
    layers = zip(network.layers, sgd.velocities)
    arrays = [[*layer.parameters.values(), *velocities.values()] for layer, velocities in layers]
    return [[(values if device is None else values.get()).tolist() for values in each] for each in arrays]


@pytest.mark.parametrize("where", ["start", "forward", "backward", "stepped"])
def test_weights_are_those_of_a_run_without_loss(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    undisturbed = run_elastic(monkeypatch, 3, partial(train, gates=Gates()))
    run = run_elastic(monkeypatch, 3, partial(train, gates=Gates((where, 0, 2), (where, 2, 5))), max_restarts=2)
    assert equal(run.results) == equal(undisturbed.results)


class Together(Gates):
    """Rank 1 dies behind step 3, when the others are at ``where`` in step 4: if it has sent its first layer only, they have
    updated that layer ("between"), or none ("entry")."""

    def __init__(self, where: str = "between") -> None:
        super().__init__(("stepped", 1, 3))
        self._all = threading.Barrier(3, timeout=60.0)
        self._to_meet = {(where, 0, 4), ("stepped", 1, 3), (where, 2, 4)}

    def at(self, where: str, rank: int, step: int) -> None:
        if (where, rank, step) in self._to_meet:
            self._to_meet.remove((where, rank, step))
            self._all.wait()
        super().at(where, rank, step)


FIRST_LAYER = math.ceil((6 * 8 + 8) * 8 / SMALL.partition_bytes)  # partitions that have a part of it


def holds_others(rank: int, step: int, partition: int) -> bool:
    """Rank 1 sends its first layer of step 3 only."""
    return (rank, step) == (1, 3) and partition >= FIRST_LAYER


def holds_all(rank: int, step: int, partition: int) -> bool:
    return (rank, step) == (1, 3)


def test_updates_of_a_step_that_nobody_can_finish_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = run_elastic(monkeypatch, 3, partial(train, gates=Gates()))
    run = run_elastic(monkeypatch, 3, partial(train, gates=Together()), max_restarts=1, holds=holds_others)
    assert run.generations == [(3, 0), (3, 3)]
    assert equal(run.results) == equal(undisturbed.results)


@pytest.mark.parametrize(("most", "ahead"), [(numpy_plugin.COPIED_AHEAD, [1, 4, 6]), (300, [1, 6])])
def test_copies_are_made_while_an_average_is_awaited(monkeypatch: pytest.MonkeyPatch, most: int, ahead: list[int]) -> None:
    """Rank 1 sends no gradient of step 3 before rank 0 has copied the layer that it awaits, and others of at most so many
    bytes."""
    monkeypatch.setattr(numpy_plugin, "COPIED_AHEAD", most)
    copied: list[int] = []
    are_copied = threading.Event()
    saved = ElasticPart._saved

    def noted(part: ElasticPart, layer: int, memory: Any) -> Any:
        if (part.session.rank, part._undo._updating) == (0, 3) and not are_copied.is_set():
            copied.append(layer)
            if len(copied) == len(ahead):
                are_copied.set()
        return saved(part, layer, memory)

    undisturbed = run_elastic(monkeypatch, 2, partial(train, gates=Gates()))
    monkeypatch.setattr(ElasticPart, "_saved", noted)

    def awaits_copies(rank: int, step: int, partition: int) -> bool:
        return (rank, step) == (1, 3) and not are_copied.wait(60.0)

    run = run_elastic(monkeypatch, 2, partial(train, gates=Gates()), holds=awaits_copies)
    assert equal(run.results) == equal(undisturbed.results)
    assert copied == ahead


@pytest.mark.parametrize("keep", ["device", "cpu"])
def test_so_they_are_on_a_device(monkeypatch: pytest.MonkeyPatch, keep: Keep) -> None:
    """Copies are on the device, or in the host's memory."""
    places: list[type] = []
    saved = ElasticPart._saved

    def noted(part: ElasticPart, layer: int, memory: Any) -> Any:
        copies = saved(part, layer, memory)
        places.extend(type(each) for each in copies)
        return copies

    monkeypatch.setattr(ElasticPart, "_saved", noted)
    job = partial(train, on_device=True, keep=keep)
    undisturbed = run_elastic(monkeypatch, 3, partial(job, gates=Gates()))
    run = run_elastic(monkeypatch, 3, partial(job, gates=Together()), max_restarts=1, holds=holds_others)
    assert run.generations == [(3, 0), (3, 3)]
    assert equal(run.results) == equal(undisturbed.results)
    assert set(places) == {SimulatedArray if keep == "device" else memoryview}


def test_with_nothing_kept_the_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    job = partial(train, gates=Together(), keep="nothing")
    run = run_elastic(monkeypatch, 3, job, max_restarts=1, holds=holds_others)
    assert (run.results, run.why) == ({}, NOTHING_KEPT)


def test_with_nothing_kept_and_no_update_of_the_step_begun_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are beyond a layer without parameters, of which there is nothing to update."""
    undisturbed = run_elastic(monkeypatch, 3, partial(train, gates=Gates()))
    job = partial(train, gates=Together("entry"), keep="nothing")
    run = run_elastic(monkeypatch, 3, job, max_restarts=1, holds=holds_all)
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
