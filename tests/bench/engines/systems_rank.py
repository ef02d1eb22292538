"""What each rank of the engines' ``test_bench.py`` does, and what must come of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bench.engines.emulated import difference, plain_averaging
from bench.engines.turn import Turn, systems_of
from bench.harness.job import Job, run_job
from bench.harness.measure import TOLERATED_DIFFERENCE
from commsched.session.session import Session
from commsched.simulator.profile import LayerProfile, Profile
from tests import warm

IMPORTS = {"tensorflow": warm.TENSORFLOW, "jax": warm.JAX, "mxnet": warm.MXNET}
STEPS = 6
LAYER_SECONDS = 0.002
SHAPES = (((40, 30), (30,)), ((30, 20),), ((2000,),), ())
PROFILE = Profile(
    "four", tuple(LayerProfile(str(i), shapes, LAYER_SECONDS, 2 * LAYER_SECONDS) for i, shapes in enumerate(SHAPES)), "test"
)


def rank_main(session: Session, arguments: dict[str, Any]) -> dict[str, Any]:
    """Trains with one system after the other, in one process."""
    found = {}
    for system in arguments["systems"]:
        turn = Turn(session, PROFILE, STEPS, ["127.0.0.1"] * session.world_size)
        weights = systems_of(arguments["engine"])[system](turn)
        found[system] = {"weights": weights, "ended": turn.steps.ended, "cpu_seconds": turn.steps.cpu_seconds}
    return found


def train(engine: str, systems: Sequence[str], ranks: int = 2) -> list[dict[str, Any]]:
    """By rank and system; weights were compared."""
    job = Job(ranks, settings={"transport": "ps"}, timeout_seconds=300)
    with pytest.MonkeyPatch.context() as patch:
        warm.let_benchmarks_fork(patch, IMPORTS[engine], nested=True)
        by_rank = run_job(job, "tests.bench.engines.systems_rank", {"engine": engine, "systems": list(systems)}).by_rank
    wanted = plain_averaging(PROFILE, STEPS, ranks)
    assert difference(plain_averaging(PROFILE, STEPS - 1, ranks), wanted) > 100 * TOLERATED_DIFFERENCE  # a step more shows
    for rank in by_rank:
        for system in systems:
            assert len(rank[system]["ended"]) == STEPS
            assert np.diff(rank[system]["ended"]).min() > 0
            assert np.diff(rank[system]["cpu_seconds"]).min() > 0
            if rank[system]["weights"] is not None:
                assert difference(rank[system]["weights"], wanted) < TOLERATED_DIFFERENCE
                assert rank[system]["weights"] == by_rank[0][system]["weights"]
    return by_rank
