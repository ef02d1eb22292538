"""Real jobs of four ranks that believe to be on two hosts: what goes wrong on one is named by all."""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.jobs.job import WORKER, Job, gone, run_job

FOR_EVER = "1000000"

#: Ranks 0 and 1 are on one host, which rank 0 leads, ranks 2 and 3 on another.
SEATED = f"""
import os, runpy
host, place = divmod(int(os.environ["COMMSCHED_RANK"]), 2)
os.environ |= {{"COMMSCHED_HOST": f"127.0.0.{{host + 1}}", "COMMSCHED_LOCAL_RANK": str(place)}}
if os.environ.get("NONE_ON_RANK_3") and (host, place) == (1, 1):
    os.environ["COMMSCHED_HIERARCHY"] = "off"
runpy.run_path({str(WORKER)!r}, run_name="__main__")
"""


def on_two_hosts(transport: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    if transport == "gloo":
        pytest.importorskip("torch.distributed")
    return ["-n", "4", "--transport", transport, *options, "--", sys.executable, "-c", SEATED, *arguments]


def pids_of(job: Job) -> dict[int, int]:
    return {int(line.split()[1]): int(line.split()[-1]) for line in job.lines(4)}


def shared_memories(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:commsched")


def comes_to_share_memory(pid: int, timeout_seconds: float = 60.0) -> bool:
    """It is mapped by the first launch, which may come after a rank has said that it is there."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if shared_memories(pid) > 0:
            return True
        time.sleep(0.02)  # somebody else's process: nothing could tell us
    return False


@pytest.mark.parametrize(("transport", "options"), [("ps", []), ("ps", ["--servers", "1"]), ("gloo", [])])
def test_a_job_averages_and_ends(transport: str, options: list[str]) -> None:
    """In a static order: ``test_hosts.py``."""
    code, out, err = run_job(*on_two_hosts(transport, "50", options=options))
    assert code == 0, err
    assert sorted(re.findall(r"rank \d finished", out)) == [f"rank {rank} finished" for rank in range(4)]


def test_it_is_used_where_there_are_several_hosts_with_several_ranks() -> None:
    with Job(*on_two_hosts("ps", FOR_EVER)) as job:
        pids = pids_of(job)
        for leader in (0, 2):
            assert comes_to_share_memory(pids[leader])
    with Job(*on_two_hosts("ps", FOR_EVER), environ={"COMMSCHED_HIERARCHY": "off"}) as job:
        assert all(shared_memories(pid) == 0 for pid in pids_of(job).values())


@pytest.mark.parametrize(("transport", "victim"), [("ps", 1), ("ps", 2), ("gloo", 2)])
def test_a_killed_rank_is_named_by_all_others(transport: str, victim: int) -> None:
    with Job(*on_two_hosts(transport, FOR_EVER), patient=True) as job:
        pids = pids_of(job)
        os.kill(pids[victim], signal.SIGKILL)
        assert all(gone(pid) for pid in pids.values())
        code, _, err = job.end()
    assert code != 0
    named = re.findall(r"PeerLost: rank (\d)", err)
    assert len(named) >= 3, err
    assert set(named) == {str(victim)}, err


@pytest.mark.parametrize("victim", [0, 3])
def test_a_stopped_rank_is_given_up_after_fail_after(victim: int) -> None:
    """A leader that is stopped over gloo waits there as any rank does (``backends/gloo/test_jobs.py``)."""
    with Job(*on_two_hosts("ps", FOR_EVER, options=["--fail-after", "1"]), patient=True) as job:
        pids = pids_of(job)
        os.kill(pids[victim], signal.SIGSTOP)
        assert all(gone(pid) for rank, pid in pids.items() if rank != victim)
        os.kill(pids[victim], signal.SIGKILL)  # the launcher would give it some seconds to end by itself
        code, _, err = job.end()
    assert code != 0
    assert re.search(rf"(PeerTimeout|PeerLost): rank {victim}\b", err), err


@pytest.mark.parametrize("rank", ["1", "2"])
def test_an_exception_is_told_to_the_others_by_its_name(rank: str) -> None:
    code, _, err = run_job(*on_two_hosts("ps", FOR_EVER, "--fail-at", "5", "--rank", rank), patient=True)
    assert code == 1
    assert len(re.findall(f"TransportError: rank {rank} ended: ValueError: boom", err)) >= 3, err


@pytest.mark.parametrize("rank", ["1", "2", "3"])
def test_a_rank_that_ends_early_is_named_with_what_waits_for_it(rank: str) -> None:
    code, _, err = run_job(*on_two_hosts("ps", "200", "--exit-at", "7", "--rank", rank), patient=True)
    assert code == 1
    assert re.search(rf"PeerLost: rank {rank} left.*'layer\d.* step 7", err), err


def test_different_settings_of_ranks_are_told() -> None:
    environ = {"COMMSCHED_HIERARCHY": "on", "NONE_ON_RANK_3": "1"}
    code, _, err = run_job(*on_two_hosts("ps", "5"), environ=environ)
    assert code == 1
    assert "ConfigError: hierarchy is on on rank 0 but off on rank 3; give all the same" in err


def test_a_leader_that_cannot_open_its_network_ends_all(tmp_path: Path) -> None:
    """Members wait for their leader, who waits for a server that does not come."""
    environ = {"COMMSCHED_SERVERS": "127.0.0.1:1", "COMMSCHED_TOKEN": secrets.token_hex(32), "COMMSCHED_JOIN_WITHIN": "8"}
    code, _, err = run_job(*on_two_hosts("ps", "5", "--meet", str(tmp_path)), environ=environ, patient=True)
    assert code == 1
    assert len(re.findall(r"server 0 at 127.0.0.1:1 did not answer within", err)) == 4, err
