"""``python -m bench transports``: what it runs, and the tables that it makes."""

import json
import re

import pytest

from bench import __main__ as bench_main
from bench import transports
from bench.__main__ import main
from bench.harness import results
from bench.harness.results import SCHEMA
from bench.transports import Table, tables


def idle_rows(transport):
    row = {"transport": transport, "idle_share": 0.00456, "waiting_share": 0.0312}
    return [{**row, "rank": 0}, {**row, "rank": 1}]


@pytest.fixture
def ran(monkeypatch):
    """What stands for the other benchmarks: the commands given, and of each that is not of mpi its rows."""
    commands = []

    def run(argv):
        commands.append(" ".join(argv[: argv.index("--json")]))
        if "mpi" in argv:
            return 1
        rows = idle_rows(argv[argv.index("--transport") + 1])
        with open(argv[-1], "w") as file:
            json.dump({"schema": 1, "environment": results.environment(), "rows": rows}, file)
        return 0

    idle = [Table("Idle", transports._IDLE, ["idle --transport ps", "idle --transport mpi", "idle --transport gloo"])]
    monkeypatch.setattr(transports, "tables", lambda rounds: idle)
    monkeypatch.setattr(bench_main, "main", run)
    return commands


def test_every_command_is_one_that_there_is():
    for table in tables(3):
        for command in table.commands:
            name, *argv = command.split()
            parser = bench_main.argparse.ArgumentParser()
            bench_main.import_module(f"bench.{name}").add_arguments(parser)
            parser.parse_args(argv)


def test_every_command_has_a_file_of_its_own():
    commands = [command for table in tables(3) for command in table.commands]
    assert len({transports._file_name(command) for command in commands}) == len(commands)
    assert all(re.fullmatch(r"[a-z]+-[0-9a-f]{12}\.json", transports._file_name(command)) for command in commands)


def test_tables(ran, tmp_path, capsys):
    assert main(["transports", "--out", str(tmp_path / "new")]) == 1
    assert ran == ["idle --transport ps", "idle --transport mpi", "idle --transport gloo"]
    assert capsys.readouterr().err == "failed: python -m bench idle --transport mpi\n"
    text = (tmp_path / "new" / "tables.md").read_text()
    assert text.startswith("### Idle\n\n```sh\npython -m bench idle --transport ps\n")
    assert "\n| transport | rank | idle, % of a core | waiting, % of a core |\n| --- | --- | --- | --- |\n" in text
    assert "\n| gloo | 1 | 0.46 | 3.12 |\n" in text


@pytest.fixture
def outcome(monkeypatch):
    """What the only benchmark writes and returns; both may be changed."""
    outcome = {"schema": SCHEMA, "code": 0, "runs": 0}

    def run(argv):
        outcome["runs"] += 1
        with open(argv[argv.index("--json") + 1], "w") as file:
            rows = idle_rows(f"run {outcome['runs']}")
            json.dump({"schema": SCHEMA, "environment": results.environment(), "rows": rows}, file)
        return outcome["code"]

    monkeypatch.setattr(transports, "tables", lambda rounds: [Table("Idle", transports._IDLE, ["idle --transport ps"])])
    monkeypatch.setattr(bench_main, "main", run)
    return outcome


def test_results_that_are_wrong_are_not_kept(outcome, tmp_path, capsys):
    outcome["code"] = 1
    for _ in range(2):
        assert main(["transports", "--out", str(tmp_path)]) == 1
        assert capsys.readouterr().err == "failed: python -m bench idle --transport ps\n"
        assert [path.name for path in tmp_path.iterdir()] == ["tables.md"]
        assert "| run " not in (tmp_path / "tables.md").read_text()
    outcome["code"] = 0
    assert main(["transports", "--out", str(tmp_path)]) == 0
    assert outcome["runs"] == 3
    assert "| run 3 | 0 |" in (tmp_path / "tables.md").read_text()


def test_results_of_another_layout_are_measured_again(outcome, tmp_path):
    path = tmp_path / transports._file_name("idle --transport ps")
    path.write_text(json.dumps({"schema": SCHEMA + 1, "rows": [{"unknown": 1}]}))
    outcome["code"] = 1
    assert main(["transports", "--out", str(tmp_path)]) == 1
    assert "unknown" in path.read_text()
    outcome["code"] = 0
    assert main(["transports", "--out", str(tmp_path)]) == 0
    assert json.loads(path.read_text())["rows"] == idle_rows("run 2")


@pytest.mark.parametrize(("options", "runs"), [([], 2), (["--keep"], 1)])
def test_results_of_another_commit_are_measured_again(outcome, monkeypatch, tmp_path, capsys, options, runs):
    here = results.environment()
    monkeypatch.setattr(results, "environment", lambda: {**here, "commit": "old"})
    assert main(["transports", "--out", str(tmp_path)]) == 0
    monkeypatch.setattr(results, "environment", lambda: {**here, "commit": "new", "time": "later"})
    assert main(["transports", "--out", str(tmp_path), *options]) == 0
    assert outcome["runs"] == runs
    said = capsys.readouterr().err
    then = ", so they are measured again; --keep keeps them" if runs == 2 else "; they are kept as they are"
    assert said.startswith(f"1 results are of another commit, machine or version{then}\n")
    assert f"| run {runs} | 0 |" in (tmp_path / "tables.md").read_text()


def test_ctrl_c_ends_all_of_them(monkeypatch, tmp_path):
    commands = []

    def interrupted(argv):
        commands.append(argv[0])
        return bench_main.INTERRUPTED

    run = bench_main.main
    monkeypatch.setattr(bench_main, "main", interrupted)
    assert run(["transports", "--out", str(tmp_path)]) == bench_main.INTERRUPTED
    assert len(commands) == 1


def test_what_is_there_is_not_measured_again(ran, tmp_path):
    main(["transports", "--out", str(tmp_path)])
    ran.clear()
    main(["transports", "--out", str(tmp_path)])
    assert ran == ["idle --transport mpi"]
