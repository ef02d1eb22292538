"""What ends one process ends the job, with one error that names it; nothing hangs and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest

from .job import WORKER, Job, gone, run_job, worker

pytestmark = pytest.mark.timeout(90)
FOR_EVER = "1000000"


def started(job: Job, ranks: int) -> dict[int, int]:
    """Process ids by rank, once all run."""
    return {int(line.split()[1]): int(line.split()[-1]) for line in job.lines(ranks)}


def server_pids(job: Job) -> list[int]:
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read().split(b"\0")
            with open(f"/proc/{pid}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == job.process.pid and b"server" in command:
            pids.append(int(pid))
    return pids


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_all_others_within_3_seconds(servers: int, victim: int) -> None:
    with Job("-n", "3", "--servers", str(servers), *worker(FOR_EVER)) as job:
        pids = started(job, 3)
        extra = server_pids(job)
        os.kill(pids[victim], signal.SIGKILL)
        killed_at = time.monotonic()
        assert all(gone(pid, 3.0) for pid in [*pids.values(), *extra])
        took = time.monotonic() - killed_at
        code, _, err = job.end()
    assert code != 0
    named = re.findall(rf"PeerLost: rank {victim}\b.*", err)
    assert len(named) >= 2 + (servers > 0), err
    assert "PeerLost: rank" not in re.sub(rf"PeerLost: rank {victim}\b", "", err), err
    assert took <= 3.0


def test_a_killed_server_is_named_by_all_ranks() -> None:
    with Job("-n", "2", "--servers", "2", *worker(FOR_EVER)) as job:
        pids = started(job, 2)
        servers = server_pids(job)
        assert len(servers) == 2
        os.kill(servers[1], signal.SIGKILL)
        assert all(gone(pid, 3.0) for pid in [*pids.values(), *servers])
        code, _, err = job.end()
    assert code != 0
    assert len(re.findall(r"PeerLost: server [01]\b", err)) >= 2, err


@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "server"])
def test_a_stopped_process_is_given_up_after_fail_after(victim: str) -> None:
    fail_after = 1.0
    servers = "1" if victim == "server" else "0"
    with Job("-n", "2", "--servers", servers, "--fail-after", str(fail_after), *worker(FOR_EVER)) as job:
        pids = started(job, 2)
        stopped = server_pids(job)[0] if victim == "server" else pids[int(victim[-1])]
        os.kill(stopped, signal.SIGSTOP)
        others = [pid for pid in pids.values() if pid != stopped]
        assert all(gone(pid, fail_after + 2.0) for pid in others)
        code, _, err = job.end()
        assert gone(stopped, 1.0)
    assert code != 0
    assert re.search(rf"(PeerTimeout|PeerLost): {victim}", err), err


def test_a_process_stopped_for_less_than_fail_after_does_no_harm() -> None:
    with Job("-n", "2", "--fail-after", "5", *worker("1500")) as job:
        pids = started(job, 2)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pids[1], signal.SIGCONT)
        code, out, err = job.end(60)
    assert code == 0, err
    assert "rank 0 finished" in out
    assert "rank 1 finished" in out


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_exception_is_told_to_the_others_by_its_name(rank: str) -> None:
    code, _, err = run_job("-n", "2", *worker(FOR_EVER, "--fail-at", "5", "--rank", rank))
    assert code == 1
    assert f"TransportError: rank {rank} ended: ValueError: boom" in err


@pytest.mark.parametrize("servers", ["0", "1"])
def test_a_rank_that_ends_early_is_named_with_what_waits_for_it(servers: str) -> None:
    code, _, err = run_job("-n", "2", "--servers", servers, *worker("200", "--exit-at", "7"))
    assert code == 1
    assert re.search(r"PeerLost: rank 1 left.*'layer\d.* step 7", err), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1001"], r"tensor 0 is 'layer0' float32\[1000\] on rank 0 but 'layer0' float32\[1001\] on rank 1"),
        (["--dtype", "float64"], r"tensor 0 is 'layer0' float32\[1000\] on rank 0 but 'layer0' float64\[1000\] on rank 1"),
        (["--tensors", "3"], r"rank 0 has 2 tensors, rank 1 has 3; the first that only one has is 'layer2'"),
    ],
)
def test_different_tensors_are_named_by_all_ranks_before_data_moves(arguments: list[str], message: str) -> None:
    code, out, err = run_job("-n", "2", *worker("5", *arguments))
    assert code == 1
    assert "pid" not in out  # no rank came past registration
    assert len(re.findall(f"ManifestMismatch: {message}", err)) == 2, err


def test_ctrl_c_ends_every_process() -> None:
    with Job("-n", "2", "--servers", "1", *worker(FOR_EVER)) as job:
        pids = [*started(job, 2).values(), *server_pids(job)]
        job.process.send_signal(signal.SIGINT)
        code, _, _ = job.end()
        assert all(gone(pid, 1.0) for pid in pids)
    assert code == 128 + signal.SIGINT


def test_a_rank_killed_while_another_connects_to_a_server_is_named() -> None:
    """The server that is waited for never comes; what counts is the first cause."""
    environ = {"COMMSCHED_SERVERS": "127.0.0.1:1", "COMMSCHED_JOIN_WITHIN": "60"}
    announce = "import os,sys; os.write(1, f'rank {os.environ[\"COMMSCHED_RANK\"]} pid {os.getpid()}\\n'.encode());"
    join = f"{announce} sys.argv = ['worker', '5']; import runpy; runpy.run_path({str(WORKER)!r}, run_name='__main__')"
    with Job("-n", "2", "--", sys.executable, "-c", join, environ=environ) as job:
        pids = started(job, 2)
        time.sleep(4)  # until both are in the control channel; were they not yet, the test would pass for less reason
        os.kill(pids[1], signal.SIGKILL)
        assert gone(pids[0], 3.0)
        _, _, err = job.end()
    assert "PeerLost: rank 1" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_that_is_ended_ends_its_processes(number: signal.Signals) -> None:
    with Job("-n", "2", *worker(FOR_EVER)) as job:
        pids = list(started(job, 2).values())
        job.process.send_signal(number)
        code, _, _ = job.end()
        assert all(gone(pid, 1.0) for pid in pids)
    assert code == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_a_launcher_was_told_to_ignore_it_ignores(number: signal.Signals) -> None:
    """As ``nohup``, and ``&`` in a script, ask for."""
    with Job("-n", "1", *worker(FOR_EVER), ignored=[number.name.removeprefix("SIG")]) as job:
        [pid] = started(job, 1).values()
        job.process.send_signal(number)
        job.process.send_signal(signal.SIGTERM)
        code, _, _ = job.end()
        assert gone(pid, 1.0)
    assert code == 128 + signal.SIGTERM  # the first that it took notice of


def test_a_launcher_that_is_killed_takes_its_job_along() -> None:
    with Job("-n", "2", "--servers", "1", *worker(FOR_EVER)) as job:
        pids = [*started(job, 2).values(), *server_pids(job)]
        assert len(pids) == 3
        job.process.kill()
        assert all(gone(pid, 5.0) for pid in pids)


def test_what_does_not_end_by_sigterm_is_killed_after_its_launcher() -> None:
    stubborn = "trap '' TERM; sleep 1000 & echo x x $$; echo x x $!; while true; do wait; done"
    with Job("-n", "1", "--", "sh", "-c", stubborn) as job:
        pids = [int(line.split()[-1]) for line in job.lines(2)]
        job.process.kill()
        assert all(gone(pid, 20.0) for pid in pids)


def test_what_a_rank_leaves_running_ends_with_the_job() -> None:
    with Job("-n", "1", "--", "sh", "-c", "sleep 1000 & echo x x $!") as job:
        (pid,) = (int(line.split()[-1]) for line in job.lines(1))
        assert job.process.wait(20) == 0
        assert gone(pid, 1.0)
