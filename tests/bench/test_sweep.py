"""None"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from bench import __main__ as bench_main
from bench import sweep
from bench.harness import results
from bench.harness.processes import JobFailed
from bench.harness.sweep_log import read_cells
from commsched.core.errors import ConfigError


def parse(*argv):
    parser = argparse.ArgumentParser(exit_on_error=False)
    sweep.add_arguments(parser)
    return parser.parse_args(list(argv))


def row(options, system, difference=1e-7):
    return {
        "system": system,
        "workers": options.workers,
        "rho": options.rho,
        "step_seconds": {"median": 1.0, "high": 1.0},
        "bound_seconds": 0.9,
        "max_difference": difference,
        "correct": difference < 1e-4,
    }


class Measure:
    """Measures nothing; ``fails`` says which rho ends in an error."""

    def __init__(self, fails=None):
        self.fails = fails or {}
        self.seen = []

    def __call__(self, options):
        self.seen.append((options.workers, options.rho))
        if options.rho in self.fails:
            raise self.fails[options.rho]
        return [row(options, system) for system in options.systems]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


def run(path, measure, *argv):
    return sweep.run(parse("--out", str(path), *argv), measure, lambda options: None)


def test_cells_are_the_product_and_each_only_once():
    cells = sweep.cells_of(parse("--out", "f", "--workers", "2,4,2", "--rho", "0.5,1,2", "--systems", "ddp,commsched"))
    assert [(cell.workers, cell.rho) for cell in cells] == [(2, 0.5), (2, 1), (2, 2), (4, 0.5), (4, 1), (4, 2)]
    assert {cell.systems for cell in cells} == {("ddp", "commsched")}


def test_every_swept_option_takes_a_list():
    lists = {
        "model": "uniform,profiles/mine.json",
        "workers": "2,4",
        "servers": "0,n",
        "bandwidth": "500mbit/250mbit,1gbit",
        "rho": "1,2",
        "partition": "auto,1MB",
        "credit": "auto,4MB",
    }
    assert lists.keys() == set(sweep.SWEPT)
    cells = sweep.cells_of(parse("--out", "f", *(part for name, text in lists.items() for part in (f"--{name}", text))))
    assert len(cells) == 2 ** len(lists)
    assert {cell.bandwidth for cell in cells} == {"500mbit,250mbit", "1gbit"}
    assert {cell.model for cell in cells} == {"uniform", "profiles/mine.json"}
    assert {cell.servers for cell in cells} == {"0", "n"}
    assert {cell.partition for cell in cells} == {"auto", "1MB"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workers", "2,x"], "'x' is not a number of at least 2"),
        (["--rho", "1,0"], "'0' is not a positive number"),
        (["--bandwidth", "fast"], "'fast' is not a rate; write it like 200mbit or 1gbit"),
        (["--model", "uniform,,vgg16"], "'uniform,,vgg16' has an empty place between its commas"),
    ],
)
def test_a_wrong_value_in_a_list_is_said(argv, message):
    with pytest.raises(argparse.ArgumentError) as error:
        parse("--out", "f", *argv)
    assert message in str(error.value)


#: What differs between two looks at one machine.
NOW = {"time": "now", "load_average": []}


def test_the_rows_of_each_cell_are_a_line_and_all_of_them_one_document(path, tmp_path):
    document = tmp_path / "all.json"
    assert run(path, Measure(), "--rho", "1,2", "--systems", "ddp,commsched", "--json", str(document)) == 0
    cells = read_cells(path)
    assert [cell.key["rho"] for cell in cells] == [1, 2]
    assert [each["system"] for each in cells[0].rows] == ["ddp", "commsched"]
    assert cells[0].environment["python"]
    written = json.loads(document.read_text())
    assert written["schema"] == 1
    assert {**written["environment"], **NOW} == {**cells[-1].environment, **NOW}
    assert [(each["rho"], each["system"]) for each in written["rows"]] == [
        (1, "ddp"),
        (1, "commsched"),
        (2, "ddp"),
        (2, "commsched"),
    ]


def test_what_is_done_is_not_done_again(path, capsys):
    run(path, Measure(), "--rho", "1,2")
    again = Measure()
    assert run(path, again, "--rho", "1,2,4", "--timeout", "7") == 0  # when to give up changes no result
    assert again.seen == [(2, 4)]
    assert f"3 of 3 cells are in {path}" in capsys.readouterr().out


@pytest.fixture
def of_another_commit(path, monkeypatch):
    here = results.environment()
    monkeypatch.setattr(results, "environment", lambda: {**here, "commit": "old"})
    run(path, Measure(), "--rho", "1,2")
    monkeypatch.setattr(results, "environment", lambda: {**here, "commit": "new", "time": "later", "load_average": [9]})


@pytest.mark.usefixtures("of_another_commit")
def test_what_another_commit_measured_is_measured_again(path, capsys):
    again = Measure()
    assert run(path, again, "--rho", "1,2,4") == 0
    assert again.seen == [(2, 1), (2, 2), (2, 4)]
    assert "2 cells are of another commit, machine or version, so they are measured again; --keep" in capsys.readouterr().err
    assert {cell.environment["commit"] for cell in read_cells(path)} == {"new"}
    once_more = Measure()
    assert run(path, once_more, "--rho", "1,2,4") == 0
    assert once_more.seen == []


@pytest.mark.usefixtures("of_another_commit")
def test_it_is_kept_if_one_says_so(path, capsys):
    again = Measure()
    assert run(path, again, "--rho", "1,2,4", "--keep") == 0
    assert again.seen == [(2, 4)]
    assert "2 cells are of another commit, machine or version; they are kept as they are\n" in capsys.readouterr().err


def test_no_cell_is_measured_beside_one_that_cannot_be(path):
    def check(options):
        if options.rho == 2:
            raise ConfigError("too much")

    measure = Measure()
    with pytest.raises(ConfigError, match="uniform 2\\+0 loopback rho 2: too much"):
        sweep.run(parse("--out", str(path), "--rho", "1,2"), measure, check)
    assert measure.seen == []
    assert run(path, measure, "--rho", "1,2") == 0
    assert sweep.run(parse("--out", str(path), "--rho", "1,2,4"), measure, check) == 0  # what is measured is not checked
    assert measure.seen == [(2, 1), (2, 2), (2, 4)]


def test_a_mistake_is_told_before_any_cell_is_measured(path):
    measure = Measure()
    with pytest.raises(ConfigError, match="uniform 3\\+0 loopback rho 1: bandwidth: an EMULATED model is scaled to the link"):
        sweep.run(parse("--out", str(path), "--workers", "3,4"), measure)
    assert measure.seen == []


@pytest.mark.parametrize("options", [[], ["--keep"]])
def test_a_profile_that_has_changed_is_measured_again(path, tmp_path, capsys, options):
    profile = tmp_path / "own.json"
    profile.write_text("1")
    argv = ("--rho", "1", "--model", str(profile), *options)
    for content, seen in (("1", 1), ("1", 0), ("2", 1), ("2", 0), (None, 0), ("2", 0)):
        profile.unlink() if content is None else profile.write_text(content)
        measure = Measure()
        assert run(path, measure, *argv) == 0
        assert len(measure.seen) == seen
    assert len(read_cells(path)) == 1
    told = "1 cells are of an earlier content of their profile, so they are measured again\n"
    assert capsys.readouterr().err.count(told) == 1


def test_a_file_with_the_name_of_a_model_is_not_its_profile(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(path, Measure(), "--rho", "1", "--model", "uniform")
    (tmp_path / "uniform").write_text("1")
    again = Measure()
    assert run(path, again, "--rho", "1", "--model", "uniform") == 0
    assert again.seen == []


def test_other_cells_of_the_file_stay_and_do_not_count(path, tmp_path):
    run(path, Measure(), "--rho", "1")
    assert run(path, Measure(), "--rho", "2", "--json", str(tmp_path / "f")) == 0
    assert [cell.key["rho"] for cell in read_cells(path)] == [1, 2]
    assert {each["rho"] for each in json.loads((tmp_path / "f").read_text())["rows"]} == {2}


def test_a_line_torn_by_a_kill_is_measured_again(path):
    run(path, Measure(), "--rho", "1,2,4")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    again = Measure()
    assert run(path, again, "--rho", "1,2,4") == 0
    assert again.seen == [(2, 4)]
    assert [cell.key["rho"] for cell in read_cells(path)] == [1, 2, 4]
    assert path.read_bytes().count(b"\n") == 3


def test_a_file_that_a_kill_left_empty_of_whole_lines_starts_anew(path):
    path.write_text('{"schema": 1, "ke')
    assert run(path, Measure()) == 0
    assert len(read_cells(path)) == 1


def test_a_failing_cell_does_not_stop_the_others_and_is_tried_again(path, capsys):
    assert run(path, Measure({2: JobFailed("rank 1 ended with exit code 1")}), "--rho", "1,2,4") == 1
    errors = capsys.readouterr().err
    assert "failed: rho=2.0: JobFailed: rank 1 ended with exit code 1" in errors
    assert "the same command tries them again" in errors
    assert [cell.error is None for cell in read_cells(path)] == [True, False, True]
    again = Measure()
    assert run(path, again, "--rho", "1,2,4") == 0
    assert again.seen == [(2, 2)]
    assert [cell.error for cell in read_cells(path)] == [None, None, None]


def test_rows_that_are_no_json_are_a_failure_of_their_cell(path):
    assert run(path, lambda options: [row(options, "ddp") | {"rho": float("nan")}]) == 1
    assert read_cells(path)[0].error.startswith("ValueError: Out of range float values are not JSON compliant")


def test_no_rows_are_a_failure(path):
    assert run(path, lambda options: []) == 1
    assert read_cells(path)[0].error == "ValueError: no rows were measured"


def test_wrong_weights_make_the_exit_code_1(path, capsys):
    assert run(path, lambda options: [row(options, "p3", difference=0.5)]) == 1
    assert "p3 is wrong: its weights differ from plain averaging by 0.5" in capsys.readouterr().err
    assert read_cells(path)[0].error is None


def test_what_was_faster_than_the_bound_is_said(path, capsys):
    assert run(path, lambda options: [row(options, "p3") | {"bound_seconds": 1.1}]) == 0
    assert "model=uniform: p3 was faster than T*, so layers or links were disturbed" in capsys.readouterr().err


def test_an_interrupt_leaves_what_is_done(path, capsys):
    with pytest.raises(KeyboardInterrupt):
        run(path, Measure({2: KeyboardInterrupt()}), "--rho", "1,2,4")
    assert "interrupted: the finished cells are kept" in capsys.readouterr().err
    assert [cell.key["rho"] for cell in read_cells(path)] == [1]
    again = Measure()
    assert run(path, again, "--rho", "1,2,4") == 0
    assert again.seen == [(2, 2), (2, 4)]


def test_a_file_of_other_options_is_refused(path):
    run(path, Measure())
    cell = json.loads(path.read_text())
    cell["key"]["colour"] = cell["key"].pop("rho")
    path.write_text(json.dumps(cell) + "\n")
    with pytest.raises(ConfigError, match=r"have other options \(not in both: colour, rho\)"):
        run(path, Measure())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"schema": 2}', "line 1: has schema 2, but this program knows schema 1; use another file"),
        ('{"rows": []}', "line 1: not a cell of a sweep"),
        ("[1]", "line 1: not a cell of a sweep"),
        ("{", "line 1: not JSON: "),
        ('{"schema": 1, "key": {}}', "line 1: a cell has environment, error, key, rows, wall_seconds; here are key"),
        (
            '{"schema": 1, "key": {}, "rows": 3, "environment": {}, "wall_seconds": 1, "error": null}',
            "line 1: rows is of type int, not list",
        ),
    ],
)
def test_a_file_of_something_else_is_refused_and_stays_as_it_is(path, line, message):
    path.write_text(line + "\n")
    with pytest.raises(ConfigError) as error:
        run(path, Measure())
    assert message in str(error.value)
    assert path.read_text() == line + "\n"


def test_two_sweeps_in_one_file_are_refused(path):
    def second(options):
        with pytest.raises(ConfigError, match="is being written by another sweep"):
            run(path, Measure())
        return [row(options, "ddp")]

    assert run(path, second) == 0


def test_a_directory_that_is_not_there_is_said(tmp_path, capsys):
    assert bench_main.main(["sweep", "--out", str(tmp_path / "no" / "f.jsonl")]) == 1
    assert capsys.readouterr().err.endswith("f.jsonl: No such file or directory\n")


def test_without_tqdm_the_line_that_installs_it_is_said(path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert bench_main.main(["sweep", "--out", str(path)]) == 1
    assert capsys.readouterr().err == 'python -m bench sweep: this needs tqdm: pip install "commsched[report]"\n'


def test_what_only_running_needs_is_not_imported_before():
    script = "import sys; import bench.sweep, bench.report; assert not {'tqdm', 'matplotlib', 'jinja2'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
