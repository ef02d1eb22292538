"""``commsched tune`` around a job that writes what a tuner would; real ones are in ``tests/jobs``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from commsched.cli import launch
from commsched.cli import tune as tune_command
from commsched.cli.main import main
from commsched.cli.tune import HEADER
from commsched.core.scheduler import SchedulerConfig
from commsched.tuner.journal import Journal, Trial
from commsched.tuner.result import Verdict
from commsched.tuner.trials import Window

DEFAULT, WINNER = SchedulerConfig(4_000_000, 16_000_000), SchedulerConfig(1_000_000, 8_000_000)
KEPT = Verdict("kept", WINNER, DEFAULT, WINNER, 2, 1, 40, 9.0, 0.2, 0.19, 0.21, 4, 0.4, 0.32)
UNFINISHED = Verdict("unfinished", DEFAULT, DEFAULT, DEFAULT, 2, 1, 40, 9.0)
TRIALS = (
    Trial("search", DEFAULT, Window(0.4, 0.001, 10), 5.0, 13),
    Trial("search", WINNER, Window(0.32, 0.001, 10), 4.0, 13),
)

RunJob = Callable[[Callable[[dict[str, str]], int]], None]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tune_command, "LOOK_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("COMMSCHED_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def run_job(monkeypatch: pytest.MonkeyPatch) -> RunJob:
    """The next job is a call in this process, of what is given, with the ranks' environment."""

    def set_job(job: Callable[[dict[str, str]], int]) -> None:
        monkeypatch.setattr(launch, "run", lambda ranks, servers, command, environ, own_token: job(environ))

    return set_job


def commsched_tune(*options: str) -> int:
    return main(["tune", "-n", "2", "--out", "tuned.toml", "--by", "grid", *options, "--", sys.executable, "train.py"])


def write(verdict: Verdict | None, trials: tuple[Trial, ...] = TRIALS, tuned: bool = False, key: str = "m") -> None:
    """As rank 0 does, in its order."""
    journal = Journal("tuned.jsonl", {"model": key}, beside_others=True)
    for trial in trials:
        journal.add(trial)
    if verdict is not None:
        journal.end(verdict)
    journal.close()
    if tuned:
        Path("new").write_text("partition = 1000000\n")
        os.replace("new", "tuned.toml")


def test_the_trials_the_verdict_and_how_to_use_it(run_job: RunJob, capsys: pytest.CaptureFixture[str]) -> None:
    environs: list[dict[str, str]] = []

    def job(environ: dict[str, str]) -> int:
        environs.append(environ)
        write(KEPT, tuned=True)
        return 0

    run_job(job)
    assert commsched_tune("--budget", "90s", "--policies", "priority,fifo", "--rate", "200mbit", "--servers", "1") == 0
    out, err = capsys.readouterr()
    assert out == ""
    use = f"COMMSCHED_CONFIG=tuned.toml commsched run -n 2 --servers 1 --rate 200mbit -- {sys.executable} train.py"
    assert err.splitlines() == [
        HEADER,
        "          0     4.0 MB    16.0 MB  priority     400.0 +- 1.0    400.0  about 85 s at most",
        "          1     1.0 MB     8.0 MB  priority     320.0 +- 1.0    320.0  about 81 s at most",
        KEPT.sentence(),
        f"commsched: tuned.toml is written; use it: {use}",
    ]
    tuning = {name: value for name, value in environs[0].items() if name.startswith("COMMSCHED_")}
    assert tuning.pop("COMMSCHED_TUNE_END").startswith("/proc/")
    assert tuning == {
        "COMMSCHED_RATE": "200mbit",
        "COMMSCHED_TUNE": "90s",
        "COMMSCHED_TUNE_OUT": str(Path("tuned.toml").absolute()),  # a script may change its directory
        "COMMSCHED_TUNE_BY": "grid",
        "COMMSCHED_TUNE_POLICIES": "priority,fifo",
    }


@pytest.mark.parametrize(
    ("environ", "options", "budget"),
    [
        ({}, [], "1"),
        ({"COMMSCHED_TUNE": "0"}, [], "1"),
        ({"COMMSCHED_TUNE": "7trials"}, [], "7trials"),
        ({"COMMSCHED_TUNE": "7trials"}, ["--budget", "9s"], "9s"),
    ],
)
def test_the_budget_is_the_first_that_is_given(
    run_job: RunJob, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], options: list[str], budget: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    budgets: list[str] = []
    run_job(lambda environ: budgets.append(environ["COMMSCHED_TUNE"]) or 0)
    assert commsched_tune(*options) == 3
    assert budgets == [budget]


def test_trials_are_shown_while_the_job_runs(run_job: RunJob, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = threading.Event()
    monkeypatch.setattr(tune_command, "say_error", lambda line: shown.set() if line.lstrip().startswith("1 ") else None)

    def job(_: dict[str, str]) -> int:
        write(None)
        assert shown.wait(60)
        write(KEPT, (), tuned=True)
        return 0

    run_job(job)
    assert commsched_tune() == 0


def test_training_that_ends_first_is_told_from_success(run_job: RunJob, capsys: pytest.CaptureFixture[str]) -> None:
    run_job(lambda _: write(UNFINISHED) or 0)
    assert commsched_tune() == 3
    assert capsys.readouterr().err.splitlines()[-2:] == [
        UNFINISHED.sentence(),
        "commsched: tuned.toml was not written; run the same command again to continue after 2 trials",
    ]


def test_a_job_that_fails_has_its_own_code(run_job: RunJob, capsys: pytest.CaptureFixture[str]) -> None:
    run_job(lambda _: 7)
    assert commsched_tune() == 7
    assert capsys.readouterr().err.splitlines() == ["commsched: tuned.toml was not written"]
    run_job(lambda _: write(KEPT, tuned=True) or 7)
    assert commsched_tune() == 7
    assert "tuned.toml is written; use it" in capsys.readouterr().err


def test_a_start_without_a_new_trial_says_how_to_go_on_from_the_earlier_ones(
    run_job: RunJob, capsys: pytest.CaptureFixture[str]
) -> None:
    write(UNFINISHED)
    run_job(lambda _: 130)
    assert commsched_tune() == 130
    assert capsys.readouterr().err.splitlines() == [
        "commsched: tuned.jsonl has 2 trials of an earlier run: tuning continues after them",
        "commsched: tuned.toml was not written; run the same command again to continue after 2 trials",
    ]


def test_a_search_that_is_over_does_not_go_on(run_job: RunJob, capsys: pytest.CaptureFixture[str]) -> None:
    write(KEPT)
    run_job(lambda _: 130)
    assert commsched_tune() == 130
    assert capsys.readouterr().err.splitlines()[-1] == "commsched: tuned.toml was not written"


def test_a_second_start_goes_on(run_job: RunJob, capsys: pytest.CaptureFixture[str]) -> None:
    write(UNFINISHED)
    more = Trial("search", replace(WINNER, credit_bytes=4_000_000), Window(0.5, 0.001, 10), 4.0, 13)
    run_job(lambda _: write(KEPT, (more,), tuned=True) or 0)
    assert commsched_tune() == 0
    assert capsys.readouterr().err.splitlines()[:3] == [
        "commsched: tuned.jsonl has 2 trials of an earlier run: tuning continues after them",
        HEADER,
        "          2     1.0 MB     4.0 MB  priority     500.0 +- 1.0    320.0  9 trials, about 178 s at most",
    ]


def test_a_line_that_is_being_written_waits(run_job: RunJob, capsys: pytest.CaptureFixture[str]) -> None:
    write(None, TRIALS[:1])
    with open("tuned.jsonl", "a") as file:
        file.write('{"schema": 1, "ph')
    run_job(lambda _: write(KEPT, TRIALS[1:], tuned=True) or 0)  # opening the journal drops it
    assert commsched_tune() == 0
    assert "\n          1     1.0 MB     8.0 MB" in capsys.readouterr().err


def test_a_search_made_anew_begins_the_table_anew(run_job: RunJob, capsys: pytest.CaptureFixture[str]) -> None:
    def job(_: dict[str, str]) -> int:
        with closing(Journal("tuned.jsonl", {"model": "m"})) as journal:
            journal.start_over()
        write(None, TRIALS[1:], tuned=True)
        return 0

    write(KEPT)
    run_job(job)
    assert commsched_tune() == 0
    line = "          0     1.0 MB     8.0 MB  priority     320.0 +- 1.0    320.0  11 trials, about 172 s at most"
    assert line in capsys.readouterr().err.splitlines()


def test_the_searches_of_a_job_of_stages_are_counted_apart(run_job: RunJob, capsys: pytest.CaptureFixture[str]) -> None:
    """Stage a, then b, then the rest of a; each has its own numbers, best and budget."""

    def job(_: dict[str, str]) -> int:
        write(None, TRIALS[:1])
        write(UNFINISHED, (replace(TRIALS[0], window=Window(0.1, 0.001, 10)),), key="b")
        write(KEPT, TRIALS[1:], tuned=True)
        return 0

    run_job(job)
    assert commsched_tune() == 0
    said = capsys.readouterr().err.splitlines()
    rows = [line for line in said if "priority" in line]
    assert [row.partition(",")[0].split()[-5:] for row in rows] == [
        ["+-", "1.0", "400.0", "11", "trials"],
        ["+-", "1.0", "100.0", "11", "trials"],
        ["+-", "1.0", "320.0", "10", "trials"],
    ]
    assert said.count(KEPT.sentence()) == 1


def test_then_stop_ends_the_job_once_the_file_is_there(run_job: RunJob, capsys: pytest.CaptureFixture[str]) -> None:
    got, before = threading.Event(), signal.signal(signal.SIGTERM, lambda *_: got.set())

    def job(_: dict[str, str]) -> int:
        write(KEPT)
        assert not got.wait(0.1)
        write(None, (), tuned=True)
        assert got.wait(60)
        return 128 + signal.SIGTERM

    try:
        run_job(job)
        assert commsched_tune("--then-stop") == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "tuned.toml is written; use it" in capsys.readouterr().err


def test_then_stop_ends_a_job_whose_tuning_ends_without_a_file(run_job: RunJob, capsys: pytest.CaptureFixture[str]) -> None:
    got, before = threading.Event(), signal.signal(signal.SIGTERM, lambda *_: got.set())
    failed = replace(UNFINISHED, reason="failed")

    def job(environ: dict[str, str]) -> int:
        assert not got.wait(0.1)  # for what an earlier start came to
        with open(environ["COMMSCHED_TUNE_END"], "a") as file:
            file.write("half a line")
            file.flush()
            assert not got.wait(0.1)
            file.write(", and the rest\n")
        assert got.wait(60)
        return 128 + signal.SIGTERM

    try:
        write(failed)
        run_job(job)
        assert commsched_tune("--then-stop") == 3
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "commsched: tuned.toml was not written: half a line, and the rest\n" in capsys.readouterr().err


def test_a_verdict_whose_file_is_gone_is_written_again(run_job: RunJob, capsys: pytest.CaptureFixture[str]) -> None:
    write(KEPT)
    run_job(lambda _: write(None, (), tuned=True) or 0)
    assert commsched_tune() == 0
    assert capsys.readouterr().err.splitlines()[1:-1] == [KEPT.sentence()]


def test_a_file_that_was_there_before_is_not_taken_for_the_result(run_job: RunJob, capsys: pytest.CaptureFixture[str]) -> None:
    Path("tuned.toml").write_text("partition = 1\n")
    run_job(lambda _: write(KEPT) or 0)
    assert commsched_tune("--then-stop") == 3
    assert "tuned.toml was not written" in capsys.readouterr().err


# --- refused before anything starts ---


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["tune", *arguments, "--", sys.executable]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("commsched: ConfigError: ")
    assert err.count("\n") == 1
    return err.removeprefix("commsched: ConfigError: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "1", "--out", "tuned.toml"], "there is nothing to tune with -n 1: one rank sends nothing"),
        (["-n", "2", "--out", "tuned.toml", "--disable", "1"], "there is nothing to tune with disable=1: "),
        (["-n", "2", "--out", "tuned.toml", "--trace", "t", "--then-stop"], "a timeline is written at the end of training"),
        (["-n", "2", "--out", "tuned.toml", "--budget", "0"], "--budget 0 leaves no time to tune; write a budget"),
        (["-n", "2", "--out", "tuned.toml", "--budget", "5min"], "--budget='5min' is not a budget; write 1, 0, or how long"),
        (["-n", "2", "--out", "tuned.toml", "--by", "luck"], "tune_by='luck' is unknown; there are: bayes, grid, random, sgd"),
        (
            ["-n", "2", "--out", "tuned.toml", "--policies", "lifo"],
            "tune_policies='lifo' is unknown; did you mean fifo? there are: fifo, ",
        ),
        (["-n", "2", "--out", ""], "--out names no file"),
        (["-n", "2", "--out", "nowhere/tuned.toml"], "--out nowhere/tuned.toml: directory nowhere does not exist"),
        (["-n", "2", "--out", "tuned"], "--out tuned: use a name like tuned.toml; the journal is then tuned.jsonl"),
        (
            ["-n", "2", "--out", "tuned.toml", "--partition", "1MB", "--credit", "2MB"],
            "credit and partition are set, which leaves nothing to tune",
        ),
    ],
)
def test_what_cannot_be_tuned_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert refused(capsys, *arguments).startswith(message)


def test_a_library_that_is_not_installed_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "skopt", None)  # as if it were not there
    monkeypatch.setitem(sys.modules, "skopt.learning", None)
    assert 'pip install "commsched[tune]"' in refused(capsys, "-n", "2", "--out", "tuned.toml", "--by", "bayes")


def test_a_finished_search_is_not_begun_again(capsys: pytest.CaptureFixture[str]) -> None:
    write(KEPT, tuned=True)
    said = refused(capsys, "-n", "2", "--out", "tuned.toml", "--by", "grid")
    assert said == f"tuned.toml already exists, from tuned.jsonl: {KEPT.sentence()}; remove both to search anew"


@pytest.mark.parametrize("text", ["no JSON\n", '{"schema": 1}\n', "[]\n", '{"phase": "search"}\n'])
def test_what_is_no_journal_is_one_line(capsys: pytest.CaptureFixture[str], text: str) -> None:
    Path("tuned.jsonl").write_text(text)
    said = refused(capsys, "-n", "2", "--out", "tuned.toml", "--by", "grid")
    assert said == "tuned.jsonl is not a journal of tuning; remove it, or give --out another name"


@pytest.mark.parametrize("name", ["tuned.toml", "tuned.jsonl"])
def test_a_result_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str], name: str) -> None:
    Path(name).mkdir()
    said = refused(capsys, "-n", "2", "--out", "tuned.toml", "--by", "grid")
    assert said == f"--out tuned.toml: {name} is a directory"
    assert os.listdir() == [name]


def test_a_directory_that_cannot_be_written_to_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "-n", "2", "--out", "/proc/tuned.toml", "--by", "grid")
    assert said.startswith("--out /proc/tuned.toml cannot be written: ")


def test_a_journal_that_becomes_unreadable_is_said_once_and_the_job_s_exit_code_counts(
    run_job: RunJob, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(_: dict[str, str]) -> int:
        write(None, TRIALS[:1])
        with open("tuned.jsonl", "a") as file:
            file.write("no JSON\n")
        return 7

    def other_job(_: dict[str, str]) -> int:
        os.remove("tuned.jsonl")
        os.mkdir("tuned.jsonl")
        return 7

    run_job(job)
    assert commsched_tune() == 7
    assert capsys.readouterr().err.count("no further trials are shown: tuned.jsonl is not a journal of tuning") == 1
    os.remove("tuned.jsonl")
    write(None, TRIALS[:1])
    run_job(other_job)
    assert commsched_tune() == 7
    assert capsys.readouterr().err.count("no further trials are shown: tuned.jsonl cannot be read: Is a directory") == 1


def test_one_thing_to_choose_is_enough(run_job: RunJob) -> None:
    run_job(lambda _: 0)
    assert commsched_tune("--partition", "1MB") == 3
    assert commsched_tune("--partition", "1MB", "--credit", "2MB", "--policies", "priority,fifo") == 3
