"""Jobs that are tuned while they train: what is written, what becomes of it, and what a kill leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .job import ROOT, Job, gone, run_job

FOR_EVER = "1000000"

#: An emulated link, slow enough for partition and credit to matter.
LINK = ("--rate", "200mbit", "--transport", "ps")


def training(*arguments: str) -> Sequence[str]:
    return ["--", sys.executable, str(ROOT / "tests" / "jobs" / "training.py"), *arguments]


def tuning(out: Path, budget: str = "3trials") -> Sequence[str]:
    return ["-n", "2", *LINK, "--out", str(out), "--by", "random", "--budget", budget]


def weights(out: str) -> list[str]:
    return re.findall(r"weights (\w{64})$", out, re.MULTILINE)


def pids(job: Job) -> list[int]:
    return [int(line.split()[-1]) for line in job.lines(2)]


def records(journal: Path) -> list[dict[str, Any]]:
    """What is whole in it."""
    whole = journal.read_text().rpartition("\n")[0] if journal.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def wait_for_trials(journal: Path, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 120
    while len(found := records(journal)) < count:
        assert time.monotonic() < deadline, f"{found} after 120 s"
        time.sleep(0.02)  # another process writes it: nothing could tell us
    return found


def test_what_is_found_serves_the_same_job_and_no_other(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    code, _, err = run_job(*tuning(out), "--then-stop", *training(FOR_EVER), subcommand="tune")
    assert code == 0, err
    assert re.search(r"^ +2 .* 0 trials, about \d+ s at most$", err, re.MULTILINE), err
    assert len(re.findall(r"tuning: 3 trials, \d+ s: ", err)) == 1, err
    assert re.search(r"^tuning: 3 trials, \d+ s: ", err, re.MULTILINE), err
    assert f"use it: COMMSCHED_CONFIG={out} commsched run -n 2 --transport ps --rate 200mbit -- " in err
    assert records(tmp_path / "tuned.jsonl")[-1]["phase"] == "verdict"

    config = {"COMMSCHED_CONFIG": str(out)}
    code, said, err = run_job("-n", "2", *LINK, *training("10"), environ=config)
    assert code == 0, err
    assert re.fullmatch(r"commsched: 2 ranks on 1 host, ps over tcp, 6 tensors of .*\n", err), err
    assert len(weights(said)) == 2
    code, _, err = run_job("-n", "3", *LINK, *training("10"), environ=config, patient=True)
    assert code == 1
    assert "\nConfigError: the tuned file is for 2 ranks, but this job has 3; tune again for this job" in f"\n{err}"
    assert err.count("the tuned file is for 2 ranks, but this job has 3") == 3, err
    code, _, err = run_job("-n", "2", *LINK, *training("10", "--width", "200"), environ=config, patient=True)
    assert code == 1
    assert err.count("ConfigError: the tuned file is for another model, but this job trains one with other tensors") == 2, err

    code, said, err = run_job("-n", "2", *LINK, *training("10", "--width", "160", "200"), environ=config)
    assert (code, len(weights(said))) == (0, 4)  # another model, after that which it is for
    assert "\ncommsched: a group of tensors (6 tensors, 220840 bytes) was not there when the tuned file was made" in err, err
    assert err.count("\n") == 2

    code, _, err = run_job(*tuning(out), *training(FOR_EVER), subcommand="tune")
    assert code == 2
    assert "remove both to search anew" in err


@pytest.mark.parametrize("also", [[], ["--hierarchy", "on", "--trace", "traces"]])
def test_weights_are_those_of_training_that_is_not_tuned(tmp_path: Path, also: list[str]) -> None:
    steps, traces = "200", tmp_path / "traces"
    also = [str(traces) if word == "traces" else word for word in also]
    _, plain, _ = run_job("-n", "2", *LINK, *training(steps))
    code, tuned, err = run_job(*tuning(tmp_path / "tuned.toml", "100trials"), *also, *training(steps), subcommand="tune")
    assert code == 3, err
    assert traces.exists() == bool(also)
    assert len({json.dumps(record["config"]) for record in records(tmp_path / "tuned.jsonl")[:-1]}) >= 2
    assert len(weights(plain)) == len(weights(tuned)) == 2
    assert len({*weights(plain), *weights(tuned)}) == 1


def test_training_that_ends_first_is_said_and_tuning_goes_on_later(tmp_path: Path) -> None:
    command = [*tuning(tmp_path / "tuned.toml", "100trials"), *training("200")]
    counts = []
    for _ in range(2):
        code, said, err = run_job(*command, subcommand="tune")
        assert code == 3, err
        assert len(weights(said)) == 2
        assert "not finished" in err
        assert not (tmp_path / "tuned.toml").exists()
        counts.append(sum(record["phase"] == "search" for record in records(tmp_path / "tuned.jsonl")))
        assert f"tuned.toml was not written; run the same command again to continue after {counts[-1]} trials" in err
    assert 0 < counts[0] < counts[1]


@pytest.mark.parametrize(
    ("budget", "width", "why"),
    [
        ("30steps", "160", "no gain, nothing was tried"),
        ("3trials", "16", "nothing is left to choose"),
    ],
)
def test_then_stop_ends_a_job_that_cannot_be_tuned(tmp_path: Path, budget: str, width: str, why: str) -> None:
    command = [*tuning(tmp_path / "tuned.toml", budget), "--then-stop", *training(FOR_EVER, "--width", width)]
    code, _, err = run_job(*command, subcommand="tune")
    assert code == 3, err
    assert why in err
    assert "tuned.toml was not written" in err


def test_then_stop_ends_a_job_that_finds_the_journal_of_another(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    run_job(*tuning(out, "100trials"), *training("60"), subcommand="tune")
    before = records(tmp_path / "tuned.jsonl")
    command = [*tuning(out), "--then-stop", *training(FOR_EVER, "--width", "200")]
    code, _, err = run_job(*command, subcommand="tune")
    assert code == 3, err
    assert re.search(r"tuned.toml was not written: ConfigError: the journal .* is of another search: model is", err), err
    assert records(tmp_path / "tuned.jsonl") == before


def test_a_job_that_is_killed_goes_on_with_the_next_trial(tmp_path: Path) -> None:
    out, journal = tmp_path / "tuned.toml", tmp_path / "tuned.jsonl"
    with Job(*tuning(out, "100trials"), "--then-stop", *training(FOR_EVER), subcommand="tune") as job:
        ranks = pids(job)
        wait_for_trials(journal, 3)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none hears of another's end, and writes a verdict
            for pid in [*ranks, job.process.pid]:
                os.kill(pid, number)
        assert all(gone(pid) for pid in ranks)
    before = records(journal)
    assert not out.exists()
    code, _, err = run_job(*tuning(out, "6trials"), "--then-stop", *training(FOR_EVER), subcommand="tune")
    assert code == 0, err
    assert out.exists()
    trials = records(journal)[:-1]
    assert trials[: len(before)] == before
    assert [trial["trial"] for trial in trials] == list(range(len(trials)))
    searched = [trial for trial in trials if trial["phase"] == "search"]
    assert len(searched) == max(6, sum(trial["phase"] == "search" for trial in before))
    measured = [json.dumps(trial["config"]) for trial in searched if trial["status"] == "ok"]
    assert len(measured) == len(set(measured))
    assert f"tuned.jsonl has {len(before)} trials of an earlier run" in err


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with Job(*tuning(tmp_path / "tuned.toml", "100trials"), *training(FOR_EVER), subcommand="tune") as job:
        ranks = pids(job)
        wait_for_trials(tmp_path / "tuned.jsonl", 1)
        job.process.kill()
        assert all(gone(pid) for pid in ranks)


def test_any_launcher_can_tune_and_nothing_is_written_unasked(tmp_path: Path) -> None:
    environ = {"COMMSCHED_TUNE": "3trials", "COMMSCHED_TUNE_BY": "random"}
    script = f"cd {tmp_path} && exec {' '.join(training('100')[1:])}"
    code, said, err = run_job("-n", "2", *LINK, "--", "sh", "-c", script, environ=environ)
    assert code == 0, err
    assert len(weights(said)) == 2
    assert re.search(r"^commsched: tuning: \d trials, \d+ s: ", err, re.MULTILINE), err
    assert list(tmp_path.iterdir()) == []
