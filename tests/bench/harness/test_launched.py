"""Ranks that a launcher has started, and that measure where they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness import launched as module
from bench.harness.job import Job, run_job
from bench.harness.launched import launched
from commsched.core.errors import ConfigError

ROOT = Path(__file__).parents[3]
RANK_MAIN = """
import os, signal, threading

def rank_main(session, arguments):
    if arguments["dies"] and session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if arguments["dies"] or arguments["waits"]:
        threading.Event().wait()  # as a library that waits for a lost rank
    return {"mine": session.rank, "systems": {"x": {"seconds": [session.rank], "timeline": ["long"]}}}
"""
RANK = """
import json, os, sys
from functools import partial
from bench.harness.launched import end_with, launched, run_here

given = json.loads(sys.argv[1])
world = launched(True)

def run():
    same = {"steps": world.rank if given.get("differs") else 5}
    arguments = {"dies": False, "waits": False, **given}
    outcome = run_here(world, {"transport": "ps"}, same, "rank_main_here", arguments, given.get("limit", 300))
    if outcome is not None:
        print(json.dumps([outcome.by_rank, outcome.link]))
    return 0

end_with(run, "the program", world)
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Runs two ranks; returns the exit code, stdout and stderr."""
    (tmp_path / "rank_main_here.py").write_text(RANK_MAIN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def run(**given):
        command = [sys.executable, "-m", "commsched", "run", "-n", "2", "--", sys.executable, "-c", RANK, json.dumps(given)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, done.stdout, done.stderr

    return run


def test_rank_0_has_what_all_have_measured(started):
    code, out, err = started()
    assert code == 0, err
    by_rank, link = json.loads(out)
    assert by_rank[0] == {"mine": 0, "systems": {"x": {"seconds": [0], "timeline": ["long"]}}}
    assert by_rank[1] == {"systems": {"x": {"seconds": [1], "timeline": []}}}
    assert link == "loopback"


def test_arguments_that_differ_are_named(started):
    code, _, err = started(differs=True)
    assert code == 1
    why = "ConfigError: steps is 0 on rank 0 but 1 on rank 1; start all ranks with the same arguments"
    assert [f"the program: rank {rank}: {why}" in err for rank in (0, 1)] == [True, True]


def test_a_rank_that_dies_ends_one_that_waits_in_a_library(started):
    code, _, err = started(dies=True)
    assert code == 128 + 9
    assert "commsched: PeerLost: rank 1" in err


def test_a_time_limit_ends_all(started):
    code, _, err = started(waits=True, limit=0.5)
    assert code == 1
    assert "the benchmark took longer than its time limit of 0.5 s (--timeout)" in err


def test_settings_of_several_machines_without_a_launcher_are_no_job(monkeypatch):
    monkeypatch.setenv("COMMSCHED_CONTROL", "10.0.0.1:29600")
    assert launched(False) is None
    with pytest.raises(ConfigError, match="no launcher has said which rank this is, of how many: start every rank by torchrun"):
        launched(True)


def test_one_rank_alone_is_as_none(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert module.launched(True) is None


def test_a_job_is_not_started_by_each_rank_of_another(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        ConfigError, match="torchrun has started this process as rank 1 of 4, but this benchmark starts its own"
    ):
        run_job(Job(2), "bench.rounds", {})
