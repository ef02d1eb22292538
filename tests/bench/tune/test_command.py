"""``python -m bench tune``: its options, what it refuses, and a small run of the whole."""

import argparse
import json
import math
import re

import pytest

from bench import tune
from bench.__main__ import main
from bench.harness.job import Outcome
from bench.harness.processes import JobFailed
from bench.tune import TuneOptions, options_of
from bench.tune import grid as tune_grid
from bench.tune.case import Case
from bench.tune.grid import case_of, surface_of
from commsched.core.scheduler import SchedulerConfig

SMALL = Case("uniform", 2, "200mbit", 1.0, 1.0, "ps", True)


def parse(*argv):
    parser = argparse.ArgumentParser(exit_on_error=False)
    tune.add_arguments(parser)
    return options_of(parser.parse_args(list(argv)))


def test_defaults_are_those_of_the_options():
    assert parse() == TuneOptions()


def test_options_of_a_command_line():
    where = ["--model", "vgg16,resnet50", "--workers", "2,4", "--bandwidth", "500mbit,250mbit", "--rho", "2"]
    how = ["--megabytes", "8", "--transport", "gloo", "--grid", "coarse", "--passes", "2", "--steps", "4", "--settle", "5"]
    options = parse(*where, *how, "--seeds", "7", "--searchers", "bayes+model,random", "--paper", "--live")
    assert options == TuneOptions(
        model=("vgg16", "resnet50"),
        workers=(2, 4),
        bandwidth=("500mbit", "250mbit"),
        rho=2.0,
        megabytes=8.0,
        transport="gloo",
        grid="coarse",
        passes=2,
        steps=4,
        settle=5,
        seeds=7,
        searchers=("bayes+model", "random"),
        paper=True,
        live=True,
    )
    assert len(options.cases()) == 8
    assert options.cases()[1] == Case("vgg16", 2, "250mbit", 2.0, 8.0, "gloo", True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--searchers", "bayes,pigeon"], "'pigeon' is unknown; there are: bayes, grid, random, sgd, bayes+model"),
        (["--searchers", "grid+model"], "'grid+model' is unknown"),
        (["--workers", "2,2"], "'2,2' names one twice"),
        (["--workers", "1"], "'1' is not a number of at least 2"),
        (["--bandwidth", "500mbit,fast"], "'fast' is not a rate"),
        (["--passes", "1"], "'1' is not a number of at least 2"),
        (["--settle", "2"], "'2' is not a number of at least 3"),
        (["--megabytes", "-1"], "'-1' is not a positive number"),
        (["--grid", "finer"], "invalid choice: 'finer'"),
    ],
)
def test_wrong_arguments_are_said(argv, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["tune", *argv])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "alexnet"], "model=alexnet: must be one of uniform, "),
        (["--transport", "pigeon"], "transport='pigeon' is unknown"),
        (["--transport", "auto"], "transport='auto' does not name the measured transport"),
        (["--replay", "grids.json", "--live"], "replay and live: a replayed grid was measured before"),
    ],
)
def test_wrong_options_are_said_before_anything_starts(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(tune_grid, "run_job", None)
    assert main(["tune", *argv]) == 1
    assert capsys.readouterr().err.startswith(f"python -m bench tune: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("{", "Expecting property name"),
        ('{"schema": 99, "rows": []}', "its schema is 99, not 1"),
        ('{"schema": 1, "rows": [{"kind": "replayed"}]}', "there is no grid in it"),
        ('{"schema": 1, "rows": [{"kind": "grid"}]}', "not a row of a grid that bench tune measured: KeyError: 'case'"),
    ],
)
def test_what_cannot_be_replayed_is_named(text, message, tmp_path, capsys):
    path = tmp_path / "grids.json"
    if text is not None:
        path.write_text(text)
    assert main(["tune", "--replay", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"python -m bench tune: replay={path}: ")
    assert message in error


def test_a_grid_of_one_pass_cannot_be_replayed(measured, tmp_path, capsys):
    measured()
    row = tune_grid.measure(SMALL, passes=2, settle=3, steps=3, timeout_seconds=60)
    for config in row["configs"]:
        del config["windows"][1:]
    path = tmp_path / "grids.json"
    path.write_text(json.dumps({"schema": 1, "rows": [row]}))
    assert main(["tune", "--replay", str(path)]) == 1
    error = capsys.readouterr().err
    assert f"replay={path}: uniform, 2 workers, 200mbit, ps: " in error
    assert "one pass does not show how much windows differ" in error


CHOSEN = SchedulerConfig(123_456, 234_567)


def by_rank(difference):
    """What two ranks of ``SMALL`` would return; the second is slower in the second pass."""
    layer = {"names": ["a"], "forward_seconds": [0.02], "backward_seconds": [0.02], "nbytes": [10**6], "tensors": [[10**6]]}
    common = {
        "network": {"worker_rates": [24e6, 23e6], "server_rates": []},
        "layers": [layer, layer],
        "message_seconds": 1e-4,
        "profiled": {},
        "chosen": CHOSEN.to_record(),
        "max_difference": difference,
    }
    count = len(SMALL.grid) + 1
    return [
        {**common, "passes": [[[0.1, 0.1, 0.1]] * count, [[0.1 + slower + 0.01 * place] * 3 for place in range(count)]]}
        for slower in (0.0, 0.1)
    ]


@pytest.fixture
def measured(monkeypatch):
    def install(difference=0.0, link="200mbit tbf"):
        given = {}

        def run_job(job, module, arguments):
            given.update(arguments, job=job, module=module)
            return Outcome(by_rank(difference), link)

        monkeypatch.setattr(tune_grid, "run_job", run_job)
        monkeypatch.setattr(tune_grid, "why_not_shaped", lambda links: None)
        return given

    return install


def test_a_step_is_as_slow_as_the_slowest_rank(measured):
    given = measured()
    row = tune_grid.measure(SMALL, passes=2, settle=3, steps=3, timeout_seconds=60)
    assert (given["module"], given["job"].bandwidth) == ("bench.tune.rank", "200mbit")
    assert (given["job"].settings, given["job"].auto_sizes) == ({"transport": "ps"}, True)
    assert [sorted(order) for order in given["orders"]] == [list(range(len(SMALL.grid) + 1))] * 2
    surface = surface_of(json.loads(json.dumps(row)))
    assert list(surface.passes) == SMALL.grid
    assert surface.passes[SMALL.grid[2]] == [[0.1] * 3, [0.22] * 3]
    assert (row["best_seconds"], row["incumbent_seconds"]) == (pytest.approx(0.15), pytest.approx(0.15))
    assert row["window_deviation"] == pytest.approx(
        1.4826 * math.log((0.2 + 0.01 * (len(SMALL.grid) - 1) / 2) / 0.1) / 2**0.5, rel=0.01
    )
    assert row["bound_seconds"] == pytest.approx(1e6 / 23e6 + 0.04)
    last = 0.2 + 0.01 * len(SMALL.grid)
    chosen = {
        **CHOSEN.to_record(),
        "step_seconds": pytest.approx((0.1 + last) / 2),
        "windows": [[0.1] * 3, [pytest.approx(last)] * 3],
    }
    assert row["chosen"] == chosen
    assert case_of(json.loads(json.dumps(row))) == SMALL


def test_wrong_weights_end_it(measured):
    measured(difference=0.5)
    with pytest.raises(
        JobFailed, match=r"uniform, 2 workers, 200mbit, ps: weights differ from plain averaging by 0.5 of the change that"
    ):
        tune_grid.measure(SMALL, passes=2, settle=3, steps=3, timeout_seconds=60)


def test_links_that_turn_out_not_to_be_shaped_are_not_measured(measured):
    measured(link="200mbit cap in the transport")
    with pytest.raises(JobFailed, match=r"links were to be shaped, .* but the link was 200mbit cap in the transport"):
        tune_grid.measure(SMALL, passes=2, settle=3, steps=3, timeout_seconds=60)


# --- the whole ---


def test_a_small_grid_is_measured_and_searched(tmp_path, capsys):
    path, again = tmp_path / "out.json", tmp_path / "again.json"
    size = ["--model", "uniform", "--megabytes", "1", "--bandwidth", "200mbit", "--grid", "coarse"]
    steps = ["--passes", "2", "--steps", "2"]
    search = ["--seeds", "1", "--searchers", "bayes+model,random"]
    assert main(["tune", *size, *steps, *search, "--json", str(path), "--out", str(tmp_path / "figures")]) == 0
    printed = capsys.readouterr().out
    assert "uniform, 2 workers, 200mbit, ps: 4 configurations, 2 passes, 3 + 2 steps of about 0.06 s" in printed
    assert re.search(r"pass 1 of 2: 5 windows, \d+ s so far; about \d+ s left\n", printed)
    assert "REPLAYED over measured windows, 1 seeds" in printed
    assert re.search(r"\nchosen by the job itself: partition .*: \d+ ms \([+-]", printed)
    assert re.search(r"CHOSEN by a job that sets nothing, .* of the grid in [01] of 1 cases; [+-]", printed)
    assert printed.index("ALL CASES, REPLAYED: ") > printed.index("REPLAYED over measured windows, 1 seeds")
    svg = (tmp_path / "figures" / "regret.svg").read_text()
    assert "bayes+model" in svg
    document = json.loads(path.read_text())
    assert (document["schema"], "versions" in document["environment"]) == (1, True)
    grid, *rows = document["rows"]
    surface = surface_of(grid)
    assert SchedulerConfig() in surface.passes
    assert len(surface.passes) == 4
    assert [len(window) for window in grid["chosen"]["windows"]] == [2, 2]
    assert grid["chosen"]["partition_bytes"] < SchedulerConfig().partition_bytes
    assert all([len(window) for window in windows] == [2, 2] for windows in surface.passes.values())
    # Nothing is faster than its bytes on the link.
    assert grid["comm_seconds"] > 0
    assert min(surface.seconds.values()) > 0.9 * 1e6 / 25e6
    assert sum(layer["forward_seconds"] for layer in grid["profiled"]["profile"]["layers"]) > 0
    assert [row["searcher"] for row in rows] == ["bayes+model", "random"]
    for row in rows:
        assert row["kind"] == "replayed"
        assert [curve[0]["trial"] for curve in row["curves"]] == [1]
        assert row["curves"][0][0]["regret"] == pytest.approx(surface.regret(SchedulerConfig()))
        assert sum(row["tuning"]["reasons"].values()) == 1
    assert rows[0]["model_error"] > 0

    assert main(["tune", "--replay", str(path), "--seeds", "1", "--searchers", "random", "--paper", "--json", str(again)]) == 0
    assert "ALL CASES, REPLAYED: " in capsys.readouterr().out
    same, random, paper = json.loads(again.read_text())["rows"]
    assert same == grid
    assert random["curves"] == rows[1]["curves"]
    assert (paper["searcher"], paper["in_the_end"]["trials"], paper["steps"]) == ("paper", 15, 100)
