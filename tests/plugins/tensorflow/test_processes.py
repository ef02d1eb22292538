"""Jobs of real processes, over the parameter server, each with one thread for operations."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.jobs.job import ROOT, clean_environ, run_job

pytestmark = pytest.mark.timeout(120)
TEST = "test_the_next_forward_begins_before_all_averages_are_there"
RANK = [sys.executable, str(ROOT / "tests" / "plugins" / "tensorflow" / "rank.py")]


def test_two_processes_with_one_thread_each() -> None:
    code, out, err = run_job("-n", "2", "--transport", "ps", "--partition", "600", "--", *RANK, timeout_seconds=100)
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if line.startswith("rank ")) == ["rank 0: equal", "rank 1: equal"]


def test_a_rank_that_dies_is_named() -> None:
    code, out, err = run_job("-n", "2", "--transport", "ps", "--", *RANK, "--dies", timeout_seconds=100)
    assert code != 0
    assert "rank 0 saw" in out, err
    assert "PeerLost: rank 1" in out


def test_overlap_with_one_thread() -> None:
    """No gate holds the only thread: the next forward begins while the last average is held back."""
    tests = "tests/plugins/tensorflow/test_order.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{tests}::{TEST}[graph]"]
    environ = {key: value for key, value in clean_environ(COMMSCHED_TEST_INTER_OP="1").items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
