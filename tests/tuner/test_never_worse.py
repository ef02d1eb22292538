"""Tuning leaves training no slower than it was, whatever noise and bad luck say."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from commsched.core.scheduler import SchedulerConfig
from commsched.settings import Budget
from commsched.tuner.result import Verdict
from commsched.tuner.search_run import SearchRun
from commsched.tuner.searchers import make_searcher
from commsched.tuner.space import Space

from .surface import DEFAULT, TOTAL_BYTES, Training, step_seconds

RUNS = 50

#: What makes windows look better or worse than they are: a factor, from their number, a change before them, and the run.
Bias = Callable[[int, bool, int], float]

ADVERSARIES: dict[str, Bias] = {
    "none": lambda number, changed, run: 1.0,
    "the first windows are fast": lambda number, changed, run: 0.7 if number < 1 + run % 20 else 1.0,
    "the first windows but the incumbent's are fast": lambda number, changed, run: 0.7 if 0 < number < 2 + run % 20 else 1.0,
    "the first window after a change is fast": lambda number, changed, run: 0.7 if changed else 1.0,
    "the first window after a change is slow": lambda number, changed, run: 1.3 if changed else 1.0,
    "it grows slower": lambda number, changed, run: 1.01**number,
    "it grows faster": lambda number, changed, run: 0.99**number,
    "it is periodic over four windows": lambda number, changed, run: 0.7 if (number + run) % 4 < 2 else 1.0,
    "it is periodic over two windows": lambda number, changed, run: 0.7 if (number + run) % 2 else 1.0,
    "now and then a window is fast": lambda number, changed, run: 0.7 if Random(1000 * run + number).random() < 0.2 else 1.0,
}


def default_is_best(config: SchedulerConfig) -> float:
    """Everything else is slower, by a little nearby."""
    octaves = abs(config.partition_bytes.bit_length() - DEFAULT.partition_bytes.bit_length())
    return 0.3 * (1 + 0.015 * (octaves + (config != DEFAULT)))


def overhead_counts(config: SchedulerConfig) -> float:
    return step_seconds(config, 2e-3)


SURFACES = {"small is better": step_seconds, "large is better": overhead_counts, "the default is best": default_is_best}


def tune(name: str, true: Callable[[SchedulerConfig], float], bias: Bias, run: int) -> Verdict:
    training = Training(true, noise=0.2, seed=run, bias=lambda number, changed: bias(number, changed, run))
    searcher = make_searcher(name, Space(DEFAULT, TOTAL_BYTES), random_seed=run)
    verdict = SearchRun(
        DEFAULT, searcher, training.measure, Budget(trials=12), apply=training.applied.append, say=lambda line: None
    ).run()
    assert training.applied == [verdict.kept]
    return verdict


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_fifty_searches_at_random_are_never_worse(adversary: str, surface: str) -> None:
    true = SURFACES[surface]
    for run in range(RUNS):
        verdict = tune("random", true, ADVERSARIES[adversary], run)
        assert true(verdict.kept) <= 1.01 * true(DEFAULT), (run, verdict)


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_bayes_is_never_worse(adversary: str) -> None:
    """60 searches in all."""
    for run in range(6):
        true = list(SURFACES.values())[run % len(SURFACES)]
        assert true(tune("bayes", true, ADVERSARIES[adversary], run).kept) <= 1.01 * true(DEFAULT), run


def test_what_is_much_better_is_kept_even_so() -> None:
    """The noise of one step is twice what can be gained."""
    verdicts = [tune("random", step_seconds, ADVERSARIES["none"], run) for run in range(RUNS)]
    reasons = Counter(verdict.reason for verdict in verdicts)
    assert reasons["kept"] >= 0.75 * RUNS
    gains = [1 - step_seconds(verdict.kept) / step_seconds(DEFAULT) for verdict in verdicts]
    possible = 1 - min(map(step_seconds, Space(DEFAULT, TOTAL_BYTES).lattice(2))) / step_seconds(DEFAULT)
    assert sum(gains) / RUNS >= 0.5 * possible
