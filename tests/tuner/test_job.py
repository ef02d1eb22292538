"""What a search writes down and reads again, over ranks whose reports the test makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commsched.core.errors import ConfigError
from commsched.core.interfaces import Observer
from commsched.core.manifest import Manifest
from commsched.core.scheduler import SchedulerConfig
from commsched.settings import Budget, Settings
from commsched.tuner.job import TuningJob, journal_path
from commsched.tuner.learn import JobFacts, Learner, TuningContext
from commsched.tuner.meter import StepTimer
from commsched.tuner.result import Verdict
from commsched.tuner.trials import TrialRunner

from .test_meter import manifest
from .test_trials import FakeSession, report

MODEL = manifest(1_000_000)
BEGIN = SchedulerConfig(1_000_000, 2_000_000)


class Ranks:
    """Smaller partitions are faster here, or larger ones. Without a model: training stands still for its profile."""

    def __init__(self, out: Path, trials: int = 3, by: str = "grid", workers: int = 3) -> None:
        self.lines: list[str] = []
        self.measured: list[SchedulerConfig] = []
        self.profiles = 0
        self.current = BEGIN
        self.slower = 1.0  # seconds per MB
        self._session = FakeSession(self._answer)
        meter = StepTimer(lambda report: None)
        meter.close()
        self._trials = TrialRunner(self._session, lambda: 0, settle_steps=3)
        settings = Settings(
            partition=BEGIN.partition_bytes,
            credit=BEGIN.credit_bytes,
            tune=Budget(trials=trials),
            tune_by=by,
            tune_out=str(out),
        )
        job = JobFacts(world_size=3, transport="ps", ordered=False, host="127.0.0.1", hosts=1, workers=workers)
        learner = Learner(job, meter, self._watch, lambda: None)
        context = TuningContext(settings, job, meter, self._trials, learner, lambda: self.current, self.lines.append)
        self.search = TuningJob(context)

    def _watch(self, observer: Observer) -> Callable[[], None]:
        self.profiles += 1
        return lambda: None

    def _answer(self, window: dict[str, int]) -> None:
        config = self._session.proposed[-1][0]
        self.measured.append(config)
        seconds = 1.0 + self.slower * config.partition_bytes / 1e6
        for rank in range(3):
            self._trials.on_message(rank, report(window["trial"], seconds, error=seconds / 1000))

    def run(self, described: Manifest = MODEL, **how: Any) -> Verdict:
        verdict = self.search.run(0, described, **how)
        assert verdict is not None
        self.current = verdict.kept
        return verdict


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_journal_stands_beside_the_result() -> None:
    assert journal_path("some/tuned.toml") == Path("some/tuned.jsonl")


def test_a_search_is_made_once_for_all_starts_of_a_job(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    first = Ranks(out)
    verdict = first.run()
    assert verdict.reason == "kept"
    assert verdict.kept.partition_bytes < BEGIN.partition_bytes
    assert Settings.load({}, {"COMMSCHED_CONFIG": str(out)}).scheduler == verdict.kept
    again = Ranks(out)
    assert again.run().kept == verdict.kept
    assert again.measured == []


def test_a_search_again_begins_from_nothing_and_may_be_taken_up_by_the_next_start(tmp_path: Path) -> None:
    """The next start begins where the first did, so it is the first one's journal."""
    out = tmp_path / "tuned.toml"
    ranks = Ranks(out)
    kept = ranks.run().kept
    ranks.measured.clear()
    ranks.slower = -0.5
    verdict = ranks.run(again=True)
    assert ranks.measured[0] == kept == verdict.incumbent
    assert ranks.measured[1] == BEGIN  # what was set at first may be good again
    assert verdict.reason == "kept"
    assert verdict.kept.partition_bytes > kept.partition_bytes
    assert Settings.load({}, {"COMMSCHED_CONFIG": str(out)}).scheduler == verdict.kept
    phases = [line["phase"] for line in lines_of(journal_path(str(out)))]
    assert phases.count("verdict") == 2  # what does not hold any more is there still
    assert phases.count("restart") == 1
    assert phases[phases.index("restart") - 1] == "verdict"
    after = Ranks(out)
    assert after.run().kept == verdict.kept
    assert after.measured == []


def test_a_profile_is_made_only_for_who_can_use_it(tmp_path: Path) -> None:
    def profiles(**how: Any) -> int:
        ranks = Ranks(tmp_path / "tuned.toml", **how)
        ranks.run()
        return ranks.profiles

    assert profiles(by="bayes") == 1
    assert profiles(by="bayes") == 0  # the journal has the end
    (tmp_path / "tuned.jsonl").unlink()
    assert profiles(by="bayes", workers=1) == 0
    for by in ("grid", "random", "sgd"):
        (tmp_path / "tuned.jsonl").unlink()
        assert profiles(by=by) == 0


def test_the_stages_of_a_job_share_a_journal_and_the_last_one_s_result_stays(tmp_path: Path) -> None:
    out, second = tmp_path / "tuned.toml", manifest(2_000_000)
    for start in range(2):
        ranks = Ranks(out)
        assert ranks.run().reason == "kept"
        ranks.current = BEGIN
        assert ranks.run(second).reason == "kept"
        assert bool(ranks.measured) == (start == 0)  # the second start finds both
        settings = Settings.load({}, {"COMMSCHED_CONFIG": str(out)})
        assert settings.tuned is not None
        assert settings.tuned["model"] == second.model_fingerprint


def test_another_model_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    Ranks(out).run()
    with pytest.raises(ConfigError, match="is of another search: model is"):
        Ranks(out).run(manifest(2_000_000))


def test_a_model_below_the_smallest_partition_leaves_nothing_to_choose(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "tuned.toml")
    assert ranks.search.run(0, manifest(10)) is None
    assert ranks.lines == [
        "tuning: nothing is left to choose; partition, credit and policy are given, or the model is too small"
    ]
    assert list(tmp_path.iterdir()) == []
