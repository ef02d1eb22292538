"""The tuner itself in a training job, judged by a grid."""

import pytest

from bench.harness.job import Outcome
from bench.harness.processes import JobFailed
from bench.tune import live
from bench.tune.case import Case
from bench.tune.table import live_text
from commsched.core.scheduler import SchedulerConfig

TINY = Case("uniform", 2, "200mbit", 1.0, 0.2, "ps", True)
COUNT = len(TINY.grid)


@pytest.fixture
def grid():
    """A row of ``TINY``, the n-th configuration n times as slow as the first."""
    configs = [{**config.to_record(), "windows": [[0.02 * place] * 3]} for place, config in enumerate(TINY.grid, 1)]
    return {"model": "uniform", "workers": 2, "bandwidth_bps": 2e8, "emulated": True, "transport": "ps", "configs": configs}


def test_tuning_comes_to_an_end_in_a_training_that_stays_right(grid):
    (row,) = live.live_rows(TINY, grid, ["random"], 1, "300steps")
    verdict = row["verdict"]
    assert verdict["reason"] in ("kept", "no gain", "not confirmed")
    assert SchedulerConfig(**verdict["incumbent"]).partition_bytes == 64_000  # the first guess for so small a model
    assert verdict["trials"] > 1
    assert 10 * verdict["trials"] < verdict["steps"] < 400
    assert row["max_difference"] <= 1e-4
    places = [0.02 * place for place in range(1, COUNT + 1)]
    assert row["regret"] in [seconds / min(places) - 1 for seconds in places]
    assert live_text([row]).splitlines()[-1].split()[:2] == ["random", "0"]


def test_wrong_weights_end_it(grid, monkeypatch):
    outcome = Outcome([{"verdict": None, "max_difference": 0.5}] * 2, "200mbit tbf")
    monkeypatch.setattr(live, "run_job", lambda job, module, arguments: outcome)
    with pytest.raises(
        JobFailed, match=r"uniform, 2 workers, 200mbit, ps: weights differ from plain averaging by 0.5 of the change"
    ):
        live.live_rows(TINY, grid, ["random"], 1)
