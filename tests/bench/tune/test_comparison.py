"""Rows and text of searchers side by side."""

import json

import pytest

from bench.tune.case import Case
from bench.tune.comparison import Searching, replayed_rows
from bench.tune.grid import surface_of
from bench.tune.table import text

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
        "noise": surface.noise,
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


def test_the_table_says_what_is_emulated_and_what_is_replayed(grid):
    rows = replayed_rows(grid, Searching(("random",), 3, True))
    rows[0]["reached"][1].update(trials=None, seconds=None, seeds=1)
    lines = text(grid, rows).splitlines()
    assert lines[0].startswith("EMULATED uniform, 16.0 MB of gradients, 2 workers, ps, link 500mbit tbf: compute 250 ms, ")
    assert lines[1].startswith(f"grid of {len(grid['configs'])}, 3 windows of 5 steps each: best partition ")
    assert lines[2].startswith("REPLAYED over measured windows, 3 seeds, medians: ")
    assert lines[5].split()[0] == "searcher"
    assert "- (1/3)" in lines[6]
    assert lines[7].split()[0] == "paper"
    assert "simulator" not in "".join(lines)
    rows[0]["model_error"] = 0.034
    assert text(grid, rows).splitlines()[2] == "the simulator's predictions are typically 3.4% off the grid's step times"
