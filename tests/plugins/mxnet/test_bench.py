"""Both systems of the benchmark train the same EMULATED network to the same weights, in real processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.engines.turn import Turn
from bench.job import Job, run_job
from commsched.session import Session
from commsched.simulator.profile import Layer, Profile

pytestmark = pytest.mark.timeout(120)

LAYER_SECONDS = 0.002
SHAPES = (((40, 30), (30,)), ((30, 20),), ((2000,),), ())
PROFILE = Profile(
    "four", tuple(Layer(str(i), shapes, LAYER_SECONDS, 2 * LAYER_SECONDS) for i, shapes in enumerate(SHAPES)), "test"
)


def rank_main(session: Session, arguments: dict[str, Any]) -> dict[str, Any]:
    """What ``bench.job`` calls in each rank."""
    from bench.engines.mxnet import SYSTEMS

    trained = SYSTEMS[arguments["system"]](Turn(session, PROFILE, arguments["steps"], ["127.0.0.1"] * session.world_size))
    return {"ended": list(trained.ended), "weights": list(trained.weights)}


def trained(system: str, steps: int) -> list[dict[str, Any]]:
    job = Job(2, settings={"transport": "ps"}, timeout_seconds=60)
    return run_job(job, "tests.plugins.mxnet.test_bench", {"system": system, "steps": steps}).by_rank


def test_all_systems_end_with_equal_weights() -> None:
    ours, theirs, shorter = trained("commsched", 6), trained("dist_sync", 6), trained("commsched", 5)
    for by_rank in (ours, theirs):
        assert by_rank[0]["weights"] == by_rank[1]["weights"]
        assert len(by_rank[0]["ended"]) == 6
        assert np.diff(by_rank[0]["ended"]).min() >= len(SHAPES) * LAYER_SECONDS
    np.testing.assert_allclose(ours[0]["weights"], theirs[0]["weights"], rtol=1e-5)
    assert len(ours[0]["weights"]) == 3
    assert np.abs(np.subtract(ours[0]["weights"], shorter[0]["weights"])).min() > 1e-4  # a step more shows in every layer
