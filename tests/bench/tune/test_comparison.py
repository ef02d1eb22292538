"""Rows and text of searchers side by side."""

import json

import pytest

from bench.tune import comparison
from bench.tune.case import Case
from bench.tune.comparison import Searching, replayed_rows
from bench.tune.grid import surface_of
from bench.tune.table import chosen_text, summary_text, text
from commsched.core.scheduler import SchedulerConfig
from commsched.settings import Budget
from commsched.simulator.profile import LayerProfile, Profile

CONFIG = SchedulerConfig(123_456, 234_567)
CASE = {"model": "uniform", "workers": 2, "bandwidth": "500mbit", "rho": 1.0, "megabytes": 16.0, "transport": "ps"}


@pytest.fixture
def grid(space, surface):
    row = {
        "kind": "grid",
        "model": "uniform",
        "workers": 2,
        "bandwidth_bps": 5e8,
        "link": "500mbit tbf",
        "emulated": True,
        "transport": "ps",
        "gradient_bytes": 16_000_000,
        "compute_seconds": 0.25,
        "comm_seconds": 0.25,
        "bound_seconds": 0.26,
        "settle": 3,
        "steps": 5,
        "passes": 3,
        "case": {**CASE, "coarse": False},
        "incumbent": space.incumbent.to_record(),
        "incumbent_seconds": surface.seconds[space.incumbent],
        "best": surface.best.to_record(),
        "best_seconds": surface.seconds[surface.best],
        "window_deviation": surface.window_deviation,
        "configs": [
            {**config.to_record(), "step_seconds": surface.seconds[config], "windows": windows}
            for config, windows in surface.passes.items()
        ],
    }
    return json.loads(json.dumps(row))


def test_a_surface_comes_back_from_its_row(grid, surface):
    assert surface_of(grid).passes == surface.passes


def test_rows_say_when_each_search_was_near_enough_and_what_it_cost(grid, surface, space):
    searching = Searching(("random", "grid"), 3, True)
    rows = replayed_rows(grid, searching)
    assert [row["searcher"] for row in rows] == ["random", "grid", "paper"]
    assert all(row["title"] == str(Case(**grid["case"])) for row in rows)
    json.dumps(rows, allow_nan=False)
    for row in rows:
        for found in row["reached"]:
            ends = [curve[-1]["regret"] <= found["within"] for curve in row["curves"]]
            assert found["seeds"] == sum(ends)
            assert (found["trials"] is None) == (sum(ends) < 2)  # of three
        assert row["in_the_end"]["worst_regret"] == max(curve[-1]["regret"] for curve in row["curves"])
    random, _, paper = rows
    assert [curve[0]["regret"] for curve in random["curves"]] == [surface.regret(space.incumbent)] * 3
    assert random["after_budget"]["regret"] == sorted(curve[11]["regret"] for curve in random["curves"])[1]
    assert random["tuning"]["trials"] <= 12
    assert sum(random["tuning"]["reasons"].values()) == 3
    assert paper["in_the_end"]["seconds"] > 10 * random["after_budget"]["seconds"]
    assert paper["tuning"] is None


@pytest.fixture
def profiled(grid, surface, space):
    """``grid`` with what a profiler would have seen: layers of 4 MB each, on a link that is taken for too fast."""
    layers = tuple(LayerProfile(f"layer {place}", ((1_000_000,),), 0.02, 0.04) for place in range(4))
    link = {"seconds_per_byte": 1.2e-8, "partition_seconds": 1e-4, "what_it_had_once": 0.0}
    profile = Profile("uniform", layers, "measured").to_record()
    seconds = surface.seconds[space.incumbent]
    return {**grid, "profiled": {"profile": profile, "link": link, "step_seconds": seconds}}


def test_each_replay_has_an_uncalibrated_model_and_pays_for_the_profile(profiled, surface, space, monkeypatch):
    monkeypatch.setattr(comparison, "TRIALS", 8)  # a model of all 24 takes seconds
    monkeypatch.setattr(comparison, "DEFAULT_BUDGET", Budget(trials=8))
    with_model, again, without = replayed_rows(profiled, Searching(("bayes+model", "bayes+model", "bayes"), 1, False))
    assert len(with_model["curves"][0]) > 6  # more than what calibrates it
    assert with_model == again
    assert (with_model["beforehand_steps"], without["beforehand_steps"]) == (6, 0)
    first, at_once = (row["curves"][0][0]["seconds"] for row in (with_model, without))
    assert first == pytest.approx(at_once + 6 * surface.seconds[space.incumbent])  # both begin with the same trial
    lines = text(profiled, [with_model, without]).splitlines()
    assert "bayes+model: its seconds begin with a profile, 6 steps of the default configuration; " in lines[6]


def summarised(searcher, workers, regret, worst, trials, seconds, own_budget=False):
    at_end = {"regret": regret, "worst_regret": worst, "seconds": 50.0, "trials": 15}
    return {
        "searcher": searcher,
        "workers": workers,
        "settle": 10 if own_budget else 3,
        "steps": 100 if own_budget else 5,
        "beforehand_steps": 0,
        "budget_trials": 12,
        "reached": [{"within": 0.03, "trials": trials, "seconds": seconds}],
        "after_budget": {"regret": 9.0, "worst_regret": 9.0, "seconds": 1.0} if own_budget else at_end,
        "in_the_end": at_end,
        "tuning": None if own_budget else {},
    }


def test_the_summary_counts_the_cases_of_each_searcher_and_number_of_workers():
    rows = [
        summarised("bayes", 4, 0.01, 0.02, 3, 7.0),
        summarised("bayes", 2, 0.01, 0.02, 3, 7.0),
        summarised("paper", 2, 0.5, 0.6, None, None, own_budget=True),
        summarised("bayes", 2, 0.03, 0.031, 5, 30.0),
        summarised("bayes", 2, 0.04, 0.08, None, None),
    ]
    lines = [line.split() for line in summary_text(rows).splitlines()]
    assert lines[-4][0] == "searcher"
    assert lines[-3:] == [
        ["bayes", "2", "2/3", "3.0", "8.0", "5", "30"],
        ["paper*", "2", "0/1", "50.0", "60.0", "-", "-"],
        ["bayes", "4", "1/1", "1.0", "2.0", "3", "7"],
    ]
    assert "*: after its own 15 trials of 10 + 100 steps each, not 12" in summary_text(rows)
    assert "*" not in summary_text(rows[:2])


def test_the_sizes_that_jobs_choose_are_compared_with_the_best_of_each_grid(grid):
    assert chosen_text([grid]) == ""  # of an earlier version
    rows = [
        {**grid, "chosen": {**CONFIG.to_record(), "step_seconds": (1 + above) * grid["best_seconds"]}}
        for above in (0.029, 0.05, -0.01)
    ]
    assert chosen_text([grid, *rows]) == (
        "CHOSEN by a job that sets nothing, MEASURED in the same passes: within 3 % of the best of the grid in 2 of 3 cases; "
        "+2.9% in the median, +5.0% at worst"
    )
    line = text(rows[1], replayed_rows(grid, Searching(("random",), 1, False))).splitlines()[2]
    assert line.startswith("chosen by the job itself: partition 123 KB, credit 235 KB: ")
    assert line.endswith(" ms (+5.0%)")


def test_the_table_says_what_is_emulated_and_what_is_replayed(grid):
    rows = replayed_rows(grid, Searching(("random",), 3, True))
    rows[0]["reached"][1].update(trials=None, seconds=None, seeds=1)
    lines = text(grid, rows).splitlines()
    assert lines[0].startswith("EMULATED uniform, 16.0 MB of gradients, 2 workers, ps, link 500mbit tbf: compute 250 ms, ")
    assert lines[1].startswith(f"grid of {len(grid['configs'])}, 3 windows of 5 steps each: best partition ")
    assert lines[2].startswith("REPLAYED over measured windows, 3 seeds, medians: ")
    assert lines[5] == "*: after its own 15 trials of 10 + 100 steps each, not 12"
    assert lines[6].split()[0] == "searcher"
    assert "- (1/3)" in lines[7]
    assert lines[8].split()[0] == "paper*"
    assert "simulator" not in "".join(lines)
    rows[0]["model_error"] = 0.034
    assert text(grid, rows).splitlines()[2] == "the simulator's predictions are typically 3.4% off the grid's step times"
