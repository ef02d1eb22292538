"""What holds for every searcher."""

from __future__ import annotations

import math
import sys

import pytest

from commsched.core.errors import ConfigError
from commsched.core.scheduler import SchedulerConfig
from commsched.tuner.searchers import SEARCHERS, make_searcher, uses_model
from commsched.tuner.space import Space
from commsched.tuner.trials import Window

from .surfaces import SLOW_NETWORK, Fixed, search

NAMES = SEARCHERS
SPACE = SLOW_NETWORK.space


def test_the_searchers_there_are() -> None:
    assert NAMES == ("bayes", "grid", "random", "sgd")


def test_an_unknown_one_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="tune_by='genetic' is unknown; there are: bayes, grid, random, sgd"):
        make_searcher("genetic", SPACE)
    with pytest.raises(ConfigError, match="tune_by='genetic' is unknown"):
        uses_model("genetic")


@pytest.mark.parametrize("name", NAMES)
def test_who_says_that_it_uses_no_model_does_not_ask_one(name: str) -> None:
    asked = list[SchedulerConfig]()
    model = Fixed(lambda config: asked.append(config) or SLOW_NETWORK(config))
    with_model = search(make_searcher(name, SPACE, seeds=[SchedulerConfig(10**6)], model=model), SLOW_NETWORK, trials=6)
    assert bool(asked) == uses_model(name)
    assert (with_model != search(make_searcher(name, SPACE), SLOW_NETWORK, trials=6)) == uses_model(name)


def test_a_missing_library_ends_in_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skopt", None)
    monkeypatch.setitem(sys.modules, "skopt.learning", None)
    with pytest.raises(ConfigError, match=r'tune_by=\'bayes\' needs scikit-optimize: pip install "commsched\[tune\]"'):
        make_searcher("bayes", SPACE)


@pytest.mark.parametrize("name", NAMES)
def test_the_incumbent_comes_first_unless_it_was_told_of(name: str) -> None:
    searcher = make_searcher(name, SPACE)
    assert searcher.best() is None
    candidate = searcher.ask()
    assert candidate is not None
    assert candidate.config == SPACE.incumbent
    told = make_searcher(name, SPACE)
    told.tell(SPACE.incumbent, Window(0.5, 0.01, 10))
    candidate = told.ask()
    assert candidate is not None
    assert candidate.config != SPACE.incumbent
    assert told.best() == SPACE.incumbent


@pytest.mark.parametrize("name", NAMES)
def test_equal_answers_make_equal_questions_and_none_twice(name: str) -> None:
    first = search(make_searcher(name, SPACE, random_seed=3), SLOW_NETWORK, trials=10, noise=0.02)
    again = search(make_searcher(name, SPACE, random_seed=3), SLOW_NETWORK, trials=10, noise=0.02)
    assert first == again
    assert len(set(first)) == len(first) > 4
    assert all(config == SPACE.clip(config) for config in first)


@pytest.mark.parametrize("name", NAMES)
def test_asking_again_without_an_answer_asks_the_same(name: str) -> None:
    searcher = make_searcher(name, SPACE)
    for _ in range(6):
        candidate = searcher.ask()
        assert candidate is not None
        assert searcher.ask() == candidate
        searcher.tell(candidate.config, Window(SLOW_NETWORK(candidate.config), 0.001, 10))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("broken", [None, math.nan, math.inf, 0.0, -1.0])
def test_a_failed_trial_is_never_the_best_nor_asked_for_again(name: str, broken: float | None) -> None:
    searcher = make_searcher(name, SPACE)
    failed, succeeded = set(), set()
    for trial in range(8):
        candidate = searcher.ask()
        if candidate is None:
            break
        assert candidate.config not in failed
        fails = trial % 3 == 1
        (failed if fails else succeeded).add(candidate.config)
        seconds = broken if fails else SLOW_NETWORK(candidate.config)
        searcher.tell(candidate.config, None if seconds is None else Window(seconds, math.nan if fails else 0.003, 10))
    assert len(failed) >= 2
    assert searcher.best() in succeeded


@pytest.mark.parametrize("name", NAMES)
def test_where_nothing_ever_succeeds_there_is_an_end_and_no_best(name: str) -> None:
    searcher = make_searcher(name, SPACE)
    for _ in range(20):
        if (candidate := searcher.ask()) is not None:
            searcher.tell(candidate.config, None)
    assert searcher.best() is None


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_of_what_it_did_not_ask_for(name: str) -> None:
    searcher = make_searcher(name, SPACE)
    elsewhere = SchedulerConfig(50_000_000, 7)  # outside the bounds
    searcher.tell(elsewhere, Window(0.1, 0.001, 10))
    for config in search(searcher, lambda config: 0.2, trials=4):
        assert config != elsewhere
    assert searcher.best() == elsewhere


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [None, Window(0.5, 0.01, 10)])
def test_with_nothing_to_choose_only_the_incumbent_is_tried(name: str, window: Window | None) -> None:
    space = Space(SchedulerConfig(), 10**9, frozenset({"partition", "credit", "policy"}))
    searcher = make_searcher(name, space)
    candidate = searcher.ask()
    assert candidate is not None
    assert candidate.config == space.incumbent
    searcher.tell(space.incumbent, window)
    assert searcher.ask() is None
    assert searcher.best() == (None if window is None else space.incumbent)


@pytest.mark.parametrize("name", NAMES)
def test_policies_are_searched_too(name: str) -> None:
    space = Space(SchedulerConfig(), SLOW_NETWORK.total_bytes, frozenset({"credit"}), ("priority", "fifo"))

    def seconds(config: SchedulerConfig) -> float:
        return SLOW_NETWORK(config) * (0.5 if config.policy == "fifo" else 1.0)

    searcher = make_searcher(name, space)
    asked = search(searcher, seconds, trials=10)
    best = searcher.best()
    assert best is not None
    assert {config.policy for config in asked} == ({"priority"} if name == "sgd" else {"priority", "fifo"})
    assert best.policy == ("priority" if name == "sgd" else "fifo")
    assert {config.credit_bytes for config in asked} == {space.incumbent.credit_bytes}
