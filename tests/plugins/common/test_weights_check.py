"""The rotating comparison of weights covers all of them, and finds a rank whose weights are others."""

from __future__ import annotations

import zlib
from collections import defaultdict
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.core.errors import CommschedError, RanksDiverged
from commsched.plugins.common import weights_check
from commsched.plugins.common.weights_check import HINT, PARTS, WeightsCheck, digest_of
from commsched.plugins.numpy import SGD, Linear, Network, ScheduledOptimizer
from commsched.session.local import local_sessions
from commsched.session.session import Session
from commsched.testing.world import run_world


class Recorder(SimpleNamespace):
    """A session that records what is compared."""

    def __init__(self, check_weights: int, world_size: int = 2) -> None:
        super().__init__(check_weights=check_weights, world_size=world_size)
        self.compared: list[tuple[str, int, dict[str, Any]]] = []

    def compare(self, what: str, step: int, values: dict[str, Any], hint: str) -> None:
        self.compared.append((what, step, values))


@given(st.lists(st.integers(0, 40).map(lambda n: 4 * n), min_size=1, max_size=8), st.sampled_from([16, 64, 10_000]))
def test_every_byte_is_compared_within_the_promised_number_of_parts(nbytes: list[int], least: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_check, "MIN_PART_BYTES", least)
        check = WeightsCheck(Recorder(1), [str(n) for n in range(len(nbytes))], nbytes)  # type: ignore[arg-type]
        seen: defaultdict[int, set[int]] = defaultdict(set)
        for step in range(PARTS):
            if check.begin(step):
                for tensor in range(len(nbytes)):
                    if (part := check.wanted(tensor)) is not None:
                        assert part[0] % 16 == 0
                        assert part[1] % 16 == 0 or part[1] == nbytes[tensor]
                        seen[tensor] |= set(range(*part))
                        check.add(tensor, 0)
                        assert check.wanted(tensor) is None
    assert [len(seen[tensor]) for tensor in range(len(nbytes))] == nbytes


def test_it_compares_every_so_many_steps_once_all_updates_are_in_place() -> None:
    session = Recorder(check_weights=3)
    check = WeightsCheck(session, ["a", "b"], [8, 4], what="weights of the critic")  # type: ignore[arg-type]
    assert [step for step in range(7) if check.begin(step)] == [0, 1, 2, 3, 6]
    assert (check.wanted(0), check.wanted(1)) == ((0, 8), (0, 4))
    check.add(1, 0xAB)
    assert session.compared == []
    check.add(0, 0xCD)
    assert session.compared == [("weights of the critic", 6, {"a": "000000cd", "b": "000000ab"})]


def test_a_comparison_is_of_its_own_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_check, "MIN_PART_BYTES", 16)
    session = Recorder(check_weights=1)
    check = WeightsCheck(session, ["a", "b"], [16, 16])  # type: ignore[arg-type]
    for step in range(3):
        assert check.begin(step)
        check.add(step % 2, step)
    assert session.compared == [("weights", step, {"ab"[step % 2]: f"{step:08x}"}) for step in range(3)]


@pytest.mark.parametrize(("every", "world_size", "nbytes"), [(0, 2, [8]), (1, 1, [8]), (1, 2, [0]), (1, 2, [])])
def test_without_anything_to_compare_nothing_is_wanted(every: int, world_size: int, nbytes: list[int]) -> None:
    check = WeightsCheck(Recorder(every, world_size), ["a"] * len(nbytes), nbytes)  # type: ignore[arg-type]
    assert not check.begin(0)
    assert check.wanted(0) is None


def test_the_digest_is_of_every_byte() -> None:
    assert digest_of(memoryview(b"some weights")) == zlib.crc32(b"some weights")


@pytest.mark.parametrize(("step", "steps"), [(0, None), (3, None), (5, 6)])
def test_a_weight_that_one_rank_changes_ends_the_training_of_all(step: int, steps: int | None) -> None:
    """It does so in the last step too, after which nothing waits for another rank any more but the end of the session.
    Otherwise ranks train until they hear of it."""
    errors: dict[int, CommschedError] = {}

    def train(rank: int) -> None:
        network = Network([Linear(3, 2, np.random.default_rng(0)), Linear(2, 2, np.random.default_rng(1))])
        with sessions[rank] as session:
            try:
                optimizer = ScheduledOptimizer(SGD(network, learning_rate=0.1), session)
                for number in count() if steps is None else range(steps):
                    network.forward(np.ones((2, 3)))
                    network.backward(np.ones((2, 2)))
                    optimizer.step()
                    if rank == 1 and number == step:
                        network.layers[1].parameters["weight"][1, 0] += 2.0**-40
                optimizer.synchronize()
            except CommschedError as error:
                errors[rank] = error
                raise

    def closed(session: Session, rank: int) -> None:
        try:
            train(rank)
        except CommschedError as error:
            errors.setdefault(rank, error)

    sessions = local_sessions(3, check_weights=1)
    run_world(3, lambda rank: closed(sessions[rank], rank), timeout_seconds=300)
    assert isinstance(errors[0], RanksDiverged)
    shown = str(errors[0])
    assert shown.startswith(f"weights differ between ranks after step {step}: '1.weight' is ")
    assert " on ranks 0, 2 but " in shown
    assert f" on rank 1; {HINT}" in shown
    if steps is None:
        assert [str(errors[rank]) for rank in (1, 2)] == [shown] * 2


def test_it_compares_more_often_at_the_beginning() -> None:
    check = WeightsCheck(Recorder(check_weights=100), ["a"], [8])  # type: ignore[arg-type]
    assert [step for step in range(301) if check.begin(step)] == [0, 1, 2, 4, 8, 16, 32, 64, 100, 200, 300]
