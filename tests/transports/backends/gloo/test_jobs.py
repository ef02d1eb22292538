"""Real jobs over gloo: what ends one process ends the job, with one error that names it; nothing hangs and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

pytest.importorskip("torch.distributed")

from tests.jobs.job import Job, gone, run_job, worker

FOR_EVER = "1000000"
GLOO = ("--transport", "gloo", "--hierarchy", "off")


def started(job: Job, ranks: int) -> dict[int, int]:
    """Process ids by rank, once all run."""
    return {int(line.split()[1]): int(line.split()[-1]) for line in job.lines(ranks)}


def test_a_killed_rank_is_named_by_all_others() -> None:
    """Rank 0, in a static order. Another one, in an agreed order: ``hierarchy/test_jobs.py``."""
    victim = 0
    with Job("-n", "3", *GLOO, "--collective", "rsag", "--order", "static", *worker(FOR_EVER), patient=True) as job:
        pids = started(job, 3)
        os.kill(pids[victim], signal.SIGKILL)
        assert all(gone(pid) for pid in pids.values())
        code, _, err = job.end()
    assert code != 0
    assert len(re.findall(rf"PeerLost: rank {victim}\b.*", err)) >= 2, err
    assert "PeerLost: rank" not in re.sub(rf"PeerLost: rank {victim}\b", "", err), err


def test_a_stopped_rank_is_given_up_after_fail_after() -> None:
    victim = 0
    with Job("-n", "2", *GLOO, "--fail-after", "1", *worker(FOR_EVER), patient=True) as job:
        pids = started(job, 2)
        os.kill(pids[victim], signal.SIGSTOP)
        assert gone(pids[1 - victim])
        os.kill(pids[victim], signal.SIGKILL)  # the launcher would give it some seconds to end by itself
        code, _, err = job.end()
    assert code != 0
    assert re.search(rf"(PeerTimeout|PeerLost): rank {victim}", err), err


def test_a_rank_stopped_for_less_than_fail_after_does_no_harm() -> None:
    with Job("-n", "2", *GLOO, "--fail-after", "5", *worker("300")) as job:
        pids = started(job, 2)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pids[1], signal.SIGCONT)
        code, out, err = job.end()
    assert code == 0, err
    assert len(re.findall(r"rank \d finished", out)) == 2


def test_a_rank_that_ends_early_is_named_with_what_waits_for_it() -> None:
    code, _, err = run_job("-n", "2", *GLOO, *worker("200", "--exit-at", "7"), patient=True)
    assert code == 1
    assert re.search(r"PeerLost: rank 1 left.*'layer\d.* step 7", err), err
