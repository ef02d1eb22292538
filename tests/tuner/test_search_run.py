import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from commsched.core.scheduler import SchedulerConfig
from commsched.settings import DEFAULT_BUDGET, Budget
from commsched.tuner.journal import Journal
from commsched.tuner.result import Verdict
from commsched.tuner.search_run import BORNE_FAILURES, SearchRun
from commsched.tuner.searchers import SEARCHERS, Searcher, make_searcher
from commsched.tuner.space import Space
from commsched.tuner.trials import Stopped, TrialFailed, Window

from .surface import DEFAULT, TOTAL_BYTES, InTurn, Training, step_seconds

GOOD = SchedulerConfig(1_000_000, 2_000_000)
BETTER = SchedulerConfig(500_000, 1_000_000)
BAD = SchedulerConfig(32_000_000, 64_000_000)
OTHERS = [BAD, GOOD, SchedulerConfig(250_000, 500_000), BETTER, SchedulerConfig(64_000, 64_000)]
#: A comparison that decides at once, for the winner: in which order, and how much it gains.
IN_TURN = [0, 1, 1, 0, 1, 0, 0, 1] * 2
BEST = min([DEFAULT, *OTHERS], key=step_seconds)

Measure = Callable[[SchedulerConfig, int], Window]


def tune(
    training: Training,
    searcher: Searcher,
    budget: Budget = DEFAULT_BUDGET,
    *,
    measure: Measure | None = None,
    journal: Journal | None = None,
    said: list[str] | None = None,
) -> Verdict:
    return SearchRun(
        DEFAULT,
        searcher,
        measure or training.measure,
        budget,
        apply=training.applied.append,
        say=(list[str]() if said is None else said).append,
        journal=journal,
        clock=training.clock,
    ).run()


class Failing:
    """``measure`` of ``training``, but the trial of each of these numbers fails by what is given for it."""

    def __init__(self, training: Training, failures: dict[int, BaseException | Window]) -> None:
        self.calls = 0
        self._training = training
        self._failures = failures

    def __call__(self, config: SchedulerConfig, steps: int) -> Window:
        failure = self._failures.get(self.calls)
        self.calls += 1
        if isinstance(failure, BaseException):
            raise failure
        return failure or self._training.measure(config, steps)


def test_the_incumbent_is_measured_first_and_the_best_is_kept() -> None:
    training, searcher, said = Training(noise=0.01), InTurn(OTHERS), list[str]()
    verdict = tune(training, searcher, said=said)
    assert [config for config, _ in searcher.told] == [DEFAULT, *OTHERS]
    assert training.measured[6:] == [(DEFAULT, BEST)[which] for which in IN_TURN]
    assert (verdict.reason, verdict.kept, verdict.winner, verdict.incumbent) == ("kept", BEST, BEST, DEFAULT)
    assert training.applied == [BEST]
    true_gain = 1 - step_seconds(BEST) / step_seconds(DEFAULT)
    assert verdict.low < true_gain < verdict.high
    assert verdict.gain == pytest.approx(true_gain, abs=0.02)
    assert verdict.winner_seconds == pytest.approx(step_seconds(BEST), rel=0.02)
    assert (verdict.trials, verdict.others, verdict.steps) == (6, 5, 13 * (6 + 16))
    assert verdict.pairs == 4
    assert verdict.seconds == pytest.approx(training.now)
    assert len(said) == 7
    assert said[0].startswith("tuning: trial 0: partition 4.0 MB, credit 16.0 MB: 3")
    assert said[-1] == verdict.sentence()


def test_nothing_faster_is_no_gain_and_compares_nothing() -> None:
    training = Training()
    verdict = tune(training, InTurn([BAD]))
    assert (verdict.reason, verdict.kept, verdict.winner, verdict.pairs) == ("no gain", DEFAULT, DEFAULT, 0)
    assert verdict.incumbent_seconds == step_seconds(DEFAULT)
    assert training.applied == [DEFAULT]
    assert len(training.measured) == 2


def test_a_lucky_window_is_not_confirmed() -> None:
    lucky = replace(DEFAULT, credit_bytes=17_000_000)
    training = Training(bias=lambda number, changed: 0.7 if number == 1 else 1.0)
    verdict = tune(training, InTurn([lucky]))
    assert (verdict.reason, verdict.kept, verdict.winner) == ("not confirmed", DEFAULT, lucky)
    assert verdict.gain == pytest.approx(1 - step_seconds(lucky) / step_seconds(DEFAULT))
    assert training.applied == [DEFAULT]


@pytest.mark.parametrize("name", SEARCHERS)
def test_what_is_to_be_tried_also_comes_right_after_the_incumbent(name: str) -> None:
    """As what was set at first, in a search from what an earlier one had found."""
    old = SchedulerConfig(187_312, 1_236_000)
    training = Training()
    searcher = make_searcher(name, Space(old, TOTAL_BYTES))
    SearchRun(
        old,
        searcher,
        training.measure,
        Budget(trials=5),
        apply=training.applied.append,
        say=print,
        also=[old, DEFAULT, DEFAULT],
    ).run()
    assert training.measured[:2] == [old, DEFAULT]
    assert training.measured[2:5].count(DEFAULT) == 0
    assert len(set(training.measured[:5])) == 5


def test_what_was_to_be_tried_also_is_not_tried_again_by_the_next_start(tmp_path: Path) -> None:
    def start(failures: dict[int, BaseException | Window]) -> list[SchedulerConfig]:
        training = Training()
        with closing(Journal(tmp_path / "t.jsonl", {})) as journal:
            SearchRun(
                DEFAULT,
                InTurn([GOOD]),
                Failing(training, failures),
                Budget(trials=3),
                apply=training.applied.append,
                say=print,
                also=[BAD],
                journal=journal,
            ).run()
        return training.measured

    assert start({2: Stopped("closed")}) == [DEFAULT, BAD]
    assert start({})[:2] == [GOOD, DEFAULT]


# --- when the search ends ---


@pytest.mark.parametrize("trials", [2, 4])
def test_no_more_trials_than_the_budget_has(trials: int) -> None:
    verdict = tune(Training(), InTurn(OTHERS), Budget(trials=trials))
    assert verdict.trials == trials
    assert verdict.pairs >= 4 or verdict.winner == DEFAULT


def test_a_budget_of_one_trial_tries_nothing() -> None:
    said = list[str]()
    verdict = tune(Training(), InTurn(OTHERS), Budget(trials=1), said=said)
    assert (verdict.reason, verdict.trials, verdict.finished) == ("no gain", 1, False)
    assert "the budget is too small; to try anything and confirm it takes 2 trials and 234 steps" in said[1]
    assert verdict.sentence().endswith("no gain, nothing was tried; partition 4.0 MB, credit 16.0 MB kept")


@pytest.mark.parametrize("steps", [234, 300, 500, 2000])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_no_more_steps_than_the_budget_has(steps: int, noise: float) -> None:
    training = Training(noise=noise)
    verdict = tune(training, make_searcher("random", Space(DEFAULT, TOTAL_BYTES)), Budget(steps=steps))
    assert verdict.steps == sum(training.steps) + 3 * len(training.steps) <= steps
    assert verdict.trials >= 2
    assert verdict.pairs >= 4 or verdict.winner == DEFAULT


@pytest.mark.parametrize("seconds", [90.0, 200.0, 1000.0])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_about_as_many_seconds_as_the_budget_has(seconds: float, noise: float) -> None:
    training = Training(noise=noise)
    searcher = make_searcher("random", Space(DEFAULT, TOTAL_BYTES), random_seed=1)
    verdict = tune(training, searcher, Budget(seconds=seconds))
    assert training.now <= 1.1 * seconds
    assert verdict.trials >= 2
    assert verdict.pairs >= 4 or verdict.winner == DEFAULT


def test_it_stops_early_when_two_in_a_row_promise_less_than_noise_hides() -> None:
    others = [replace(DEFAULT, credit_bytes=size) for size in range(5_000_000, 11_000_000, 1_000_000)]
    searcher, said = InTurn(others, [None, 1e-6, 0.5, 1e-6, 1e-6, 0.5]), list[str]()
    verdict = tune(Training(noise=0.01), searcher, said=said)
    assert [config for config, _ in searcher.told] == [DEFAULT, *others[:4]]
    assert verdict.trials == 5
    assert any("stopped early, no candidate promises more than the 0.2% that noise hides" in line for line in said)


def test_what_a_comparison_can_see_is_worth_a_trial() -> None:
    """It has several windows, and resolves less than one of them."""
    other, training = replace(DEFAULT, credit_bytes=5_000_000), Training(noise=0.01)
    noise = 0.01 * 1.2533 / math.sqrt(10)
    for part, trials in ((0.3, 3), (1.0, 5)):
        others = [replace(other, policy="fifo"), other, replace(other, collective="rsag"), GOOD]
        assert tune(training, InTurn(others, [None, *[part * noise] * 3])).trials == trials


def test_windows_become_longer_where_steps_vary() -> None:
    quiet, noisy, noisier = Training(noise=0.005), Training(noise=0.1), Training(noise=0.5)
    for training in (quiet, noisy, noisier):
        tune(training, InTurn([GOOD]))
    assert set(quiet.steps) == {10}
    assert noisy.steps[0] == 10
    assert 10 < noisy.steps[1] < 40
    assert set(noisier.steps[1:]) == {40}


# --- failures ---


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (TrialFailed("transport 'x' cannot change"), "transport 'x' cannot change"),
        (Window(math.nan, 0.1, 10), "nan seconds per step"),
        (Window(math.inf, 0.1, 10), "inf seconds per step"),
        (Window(0.0, 0.1, 10), "0.0 seconds per step"),
        (Window(-1.0, 0.1, 10), "-1.0 seconds per step"),
        (Window(1.0, math.nan, 10), "an error of nan seconds"),
        (Window(1.0, -1.0, 10), "an error of -1.0 seconds"),
    ],
)
def test_a_failed_trial_is_recorded_and_passed_over(failure: BaseException | Window, why: str, tmp_path: Path) -> None:
    training, searcher = Training(), InTurn(OTHERS)
    with closing(Journal(tmp_path / "t.jsonl", {})) as journal:
        verdict = tune(training, searcher, measure=Failing(training, {1: failure}), journal=journal)
    assert (verdict.reason, verdict.kept, verdict.trials) == ("kept", BEST, 6)
    assert searcher.told[1] == (BAD, None)
    assert (journal.trials[1].config, journal.trials[1].window, journal.trials[1].why) == (BAD, None, why)


@pytest.mark.parametrize("first", [0, 1, 7])  # the incumbent's, in the search, in the comparison
def test_three_failures_in_a_row_are_borne_and_a_fourth_ends_it_with_what_was_set(first: int) -> None:
    for failures in (BORNE_FAILURES, BORNE_FAILURES + 1):
        training = Training()
        measure = Failing(training, {first + n: TrialFailed("disturbed") for n in range(failures)})
        verdict = tune(training, InTurn([*OTHERS, SchedulerConfig(3_000_000)]), measure=measure)
        if failures == BORNE_FAILURES:
            assert verdict.reason == "kept"
        else:
            assert (verdict.reason, verdict.kept, verdict.finished) == ("failed", DEFAULT, False)
            assert measure.calls == first + failures
        assert training.applied == [verdict.kept]


def test_failures_of_the_incumbent_are_no_trials_of_the_budget() -> None:
    measure = Failing(Training(), {0: TrialFailed("disturbed"), 1: TrialFailed("disturbed")})
    verdict = tune(Training(), InTurn(OTHERS), Budget(trials=3), measure=measure)
    assert (verdict.trials, verdict.others, verdict.finished) == (5, 2, True)


@pytest.mark.parametrize("candidates", [OTHERS[:2], OTHERS])
def test_a_search_in_which_nothing_else_could_be_measured_has_failed(candidates: list[SchedulerConfig]) -> None:
    """Whether the searcher ends, or failures in a row."""
    measure = Failing(Training(), dict.fromkeys(range(1, 9), TrialFailed("transport 'x' cannot change")))
    training = Training()
    verdict = tune(training, InTurn(candidates), Budget(trials=4), measure=measure)
    assert (verdict.reason, verdict.kept, verdict.others, verdict.finished) == ("failed", DEFAULT, 0, False)
    assert measure.calls == 1 + min(len(candidates), BORNE_FAILURES + 1)
    assert training.applied == [DEFAULT]
    assert verdict.sentence().endswith("no other configuration could be measured; partition 4.0 MB, credit 16.0 MB kept")


def test_starts_that_failed_take_nothing_from_one_that_is_healthy(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for first in (0, 0, 1):  # also the incumbent's
        failures: dict[int, BaseException | Window] = dict.fromkeys(range(first, 9), TrialFailed("disturbed"))
        with closing(Journal(path, {})) as journal:
            verdict = tune(Training(), InTurn(OTHERS), Budget(trials=6), measure=Failing(Training(), failures), journal=journal)
        assert (verdict.reason, verdict.finished) == ("failed", False)
    training = Training()
    with closing(Journal(path, {})) as journal:
        verdict = tune(training, InTurn(OTHERS), Budget(trials=6), journal=journal)
    assert training.measured[:5] == OTHERS
    assert (verdict.reason, verdict.kept, verdict.others) == ("kept", BEST, 5)
    assert verdict.trials == 3 * (BORNE_FAILURES + 1) + 6


@pytest.mark.parametrize("number", [0, 3, 9])
def test_training_that_ends_leaves_tuning_unfinished(number: int, tmp_path: Path) -> None:
    training = Training()
    with closing(Journal(tmp_path / "t.jsonl", {})) as journal:
        verdict = tune(training, InTurn(OTHERS), measure=Failing(training, {number: Stopped("closed")}), journal=journal)
    assert (verdict.reason, verdict.kept, verdict.finished) == ("unfinished", DEFAULT, False)
    assert training.applied == []  # nobody is there to hear it
    assert verdict.trials == min(number, 6)
    assert verdict.sentence().endswith(": not finished; partition 4.0 MB, credit 16.0 MB kept")
    assert journal.verdict == verdict


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("number", [0, 3, 9])
def test_after_any_other_error_the_incumbent_is_in_place(number: int, error: BaseException) -> None:
    training = Training()
    with pytest.raises(type(error)):
        tune(training, InTurn(OTHERS), measure=Failing(training, {number: error}))
    assert training.applied == [DEFAULT]


def test_training_that_ends_when_the_result_is_to_be_applied_changes_no_verdict() -> None:
    def ended(config: SchedulerConfig) -> None:
        raise Stopped("closed")

    training = Training()
    verdict = SearchRun(DEFAULT, InTurn(OTHERS), training.measure, Budget(trials=12), apply=ended, say=print).run()
    assert (verdict.reason, verdict.kept) == ("kept", BEST)


# --- the journal ---


@pytest.mark.parametrize("name", SEARCHERS)
def test_a_job_that_is_started_again_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    def searcher() -> Searcher:
        return make_searcher(name, Space(DEFAULT, TOTAL_BYTES), random_seed=2)

    budget = Budget(trials=8)
    whole = Training()
    expected = tune(whole, searcher(), budget)
    seen = list[SchedulerConfig]()
    for killed_after in (1, 4, 100):
        with closing(Journal(tmp_path / f"{name}.jsonl", {})) as journal:
            known = [trial.config for trial in journal.trials]
            training = Training()
            failing = Failing(training, {killed_after: KeyboardInterrupt()})
            try:
                verdict = tune(training, searcher(), budget, measure=failing, journal=journal)
            except KeyboardInterrupt:
                assert training.measured != []
            assert [trial.config for trial in journal.trials] == known + training.measured
            seen += training.measured
    assert seen == whole.measured
    assert (verdict.kept, verdict.reason, verdict.trials) == (expected.kept, expected.reason, expected.trials)
    assert verdict.steps == expected.steps


def test_a_comparison_that_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    training = Training()
    with closing(Journal(path, {})) as journal, pytest.raises(KeyboardInterrupt):
        tune(training, InTurn(OTHERS), measure=Failing(training, {8: KeyboardInterrupt()}), journal=journal)
    assert training.measured[6:] == [DEFAULT, BEST]
    training, searcher = Training(), InTurn(OTHERS)
    with closing(Journal(path, {})) as journal:
        verdict = tune(training, searcher, journal=journal)
    assert training.measured == [(DEFAULT, BEST)[which] for which in IN_TURN]
    assert (verdict.kept, verdict.trials) == (BEST, 6)
    assert [config for config, _ in searcher.told] == [DEFAULT, *OTHERS]  # of the search, not of the comparison


def test_a_finished_search_is_not_made_again(tmp_path: Path) -> None:
    path, said = tmp_path / "t.jsonl", list[str]()
    with closing(Journal(path, {})) as journal:
        verdict = tune(Training(), InTurn(OTHERS), journal=journal)
    again = Training()
    with closing(Journal(path, {})) as journal:
        assert tune(again, InTurn([]), journal=journal, said=said) == verdict
    assert again.measured == []
    assert again.applied == [BEST]
    assert said == [f"tuning: the search in {path} is finished; remove that file to search anew", verdict.sentence()]


def test_what_failed_or_was_unfinished_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for failure, reason in ((Stopped("closed"), "unfinished"), (TrialFailed("disturbed"), "failed")):
        training = Training()
        measure = Failing(training, dict.fromkeys(range(2, 9), failure))
        with closing(Journal(path, {})) as journal:
            assert tune(training, InTurn(OTHERS), measure=measure, journal=journal).reason == reason
    with closing(Journal(path, {})) as journal:
        assert tune(Training(), InTurn(OTHERS), journal=journal).finished


def test_a_baseline_that_failed_before_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    training = Training()
    with closing(Journal(path, {})) as journal:
        failures: dict[int, BaseException | Window] = {0: TrialFailed("disturbed"), 1: Stopped("closed")}
        tune(training, InTurn(OTHERS), measure=Failing(training, failures), journal=journal)
    with closing(Journal(path, {})) as journal:
        verdict = tune(training, InTurn(OTHERS), journal=journal)
    assert training.measured[0] == DEFAULT
    assert (verdict.kept, verdict.trials) == (BEST, 7)


def test_a_lost_disk_ends_tuning_with_what_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    training = Training()
    with closing(Journal(tmp_path / "t.jsonl", {})) as journal:
        monkeypatch.setattr(journal, "end", full)
        with pytest.raises(OSError, match="No space left"):
            tune(training, InTurn(OTHERS), journal=journal)
    assert training.applied == [DEFAULT]


# --- sentences ---

_SENTENCE = Verdict(
    "kept",
    kept=SchedulerConfig(2_000_000, 8_000_000),
    incumbent=DEFAULT,
    winner=SchedulerConfig(2_000_000, 8_000_000),
    trials=12,
    others=11,
    steps=300,
    seconds=61.2,
    gain=0.182,
    low=0.168,
    high=0.196,
    pairs=6,
    incumbent_seconds=0.412,
    winner_seconds=0.337,
)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {},
            "tuning: 12 trials, 61 s: partition 2.0 MB, credit 8.0 MB: 337.0 ms instead of 412.0 ms (-18.2 %, 95 % between "
            "-16.8 % and -19.6 %, 6 pairs): kept",
        ),
        (
            {
                "reason": "not confirmed",
                "kept": DEFAULT,
                "gain": -0.01,
                "low": -0.03,
                "high": 0.01,
                "winner_seconds": 0.0123,
                "winner": SchedulerConfig(64_000, 512_000, "fifo"),
            },
            "tuning: 12 trials, 61 s: no gain confirmed; partition 4.0 MB, credit 16.0 MB kept. The best candidate was "
            "partition 64 KB, credit 512 KB, policy fifo: 12.3 ms instead of 412.0 ms (+1.0 %, 95 % between +3.0 % and -1.0 %, "
            "6 pairs)",
        ),
        (
            {"reason": "no gain", "kept": DEFAULT, "winner": DEFAULT, "pairs": 0},
            "tuning: 12 trials, 61 s: no gain, nothing tried was faster; partition 4.0 MB, credit 16.0 MB kept",
        ),
        (
            {"reason": "failed", "kept": DEFAULT, "winner": DEFAULT, "pairs": 0},
            "tuning: 12 trials, 61 s: too many trials in a row failed; partition 4.0 MB, credit 16.0 MB kept",
        ),
    ],
)
def test_sentences(changes: dict[str, Any], sentence: str) -> None:
    verdict = replace(_SENTENCE, **changes)
    assert verdict.sentence() == sentence
    assert Verdict.from_record({**asdict(verdict), "sentence": sentence}) == verdict
