"""A job of real processes, over the parameter server, each with one thread for operations."""

from __future__ import annotations

import sys

import pytest

from tests import warm
from tests.jobs.job import ROOT, run_job

RANK = [sys.executable, str(ROOT / "tests" / "plugins" / "tensorflow" / "rank.py")]


@pytest.fixture(scope="module")
def job() -> tuple[int, str, str]:
    """Its code, and what it wrote. Processes import TensorFlow for long, so one job shows all."""
    arguments = ["-n", "2", "--transport", "ps", "--partition", "600", "--", *RANK]
    return run_job(*arguments, patient=True, imports=warm.TENSORFLOW)


def test_two_processes_train_as_one(job: tuple[int, str, str]) -> None:
    _, out, err = job
    assert {"rank 0: equal", "rank 1: equal"} <= set(out.splitlines()), err


def test_overlap_with_one_thread(job: tuple[int, str, str]) -> None:
    """No gate holds the only thread: the next forward begins while the last average is held back."""
    _, out, err = job
    assert "rank 0: overlaps" in out.splitlines(), err


def test_a_rank_that_dies_is_named(job: tuple[int, str, str]) -> None:
    code, out, err = job
    assert code != 0
    assert "rank 0 saw" in out, err
    assert "PeerLost: rank 1" in out
