"""What ends one process ends the job, with one error that names it; nothing hangs and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm

from .job import WORKER, Job, clean_environ, gone, run_job, worker

FOR_EVER = "1000000"
PATIENT = ("--fail-after", "100")  # so long that only a broken connection can tell


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


@pytest.mark.parametrize(("servers", "victim"), [(0, 0), (0, 2), (2, 2)])
def test_a_killed_rank_is_named_by_all_others_at_once(servers: int, victim: int) -> None:
    with Job("-n", "3", "--servers", str(servers), *PATIENT, *worker(FOR_EVER), patient=True) as job:
        pids = started(job, 3)
        extra = server_pids(job)
        os.kill(pids[victim], signal.SIGKILL)
        assert all(gone(pid) for pid in [*pids.values(), *extra])
        code, _, err = job.end()
    assert code != 0
    named = re.findall(rf"PeerLost: rank {victim}\b.*", err)
    assert len(named) >= 2 + (servers > 0), err
    assert "PeerLost: rank" not in re.sub(rf"PeerLost: rank {victim}\b", "", err), err
    told = f"commsched run: rank {victim} (pid {pids[victim]}) was killed by SIGKILL (out of memory?)"
    assert err.splitlines()[-1] == f"{told}; then {2 + servers} more ended with errors"


def test_a_killed_server_is_named_by_all_ranks() -> None:
    with Job("-n", "2", "--servers", "2", *PATIENT, *worker(FOR_EVER), patient=True) as job:
        pids = started(job, 2)
        servers = server_pids(job)
        assert len(servers) == 2
        os.kill(servers[1], signal.SIGKILL)
        assert all(gone(pid) for pid in [*pids.values(), *servers])
        code, _, err = job.end()
    assert code != 0
    assert len(re.findall(r"PeerLost: server [01]\b", err)) >= 2, err


@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "server"])
def test_a_stopped_process_is_given_up_after_fail_after(victim: str) -> None:
    servers = "1" if victim == "server" else "0"
    with Job("-n", "2", "--servers", servers, "--fail-after", "1", *worker(FOR_EVER)) as job:
        pids = started(job, 2)
        stopped = server_pids(job)[0] if victim == "server" else pids[int(victim[-1])]
        os.kill(stopped, signal.SIGSTOP)
        others = [pid for pid in pids.values() if pid != stopped]
        assert all(gone(pid) for pid in others)
        code, _, err = job.end()
        assert gone(stopped)
    assert code != 0
    assert f"(pid {stopped}) was stopped by SIGSTOP\n" in err
    assert re.search(rf"(PeerTimeout|PeerLost): {victim}", err), err


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_a_frozen_rank_0_is_named_by_every_survivor(lane: str) -> None:
    """The first that gives it up ends, which breaks its connections to the others: that rank is not to blame."""
    with Job("-n", "4", "--lane", lane, "--fail-after", "1", *worker(FOR_EVER), patient=True) as job:
        pids = started(job, 4)
        os.kill(pids[0], signal.SIGSTOP)
        assert all(gone(pids[rank]) for rank in (1, 2, 3))
        os.kill(pids[0], signal.SIGKILL)  # else the launcher gives it some seconds
        code, _, err = job.end()
    assert code != 0
    assert re.findall(r"^(Peer\w+: (?:rank|server) \d)", err, re.MULTILINE) == ["PeerTimeout: rank 0"] * 3, err


@pytest.mark.parametrize(("busy", "how"), [("0", []), ("1", ["--lane", "grpc"]), ("0", ["--servers", "1"])])
def test_a_rank_in_a_call_that_holds_the_interpreters_lock_for_longer_than_fail_after_goes_on(
    busy: str, how: list[str]
) -> None:
    code, out, err = run_job("-n", "2", "--fail-after", "1", *how, *worker("20", "--rank", busy, "--hold-at", "9"))
    assert (code, out.count("finished")) == (0, 2), err
    assert re.search(rf"rank {busy} \(host .*\) does not answer, but its process runs: one call may hold the", err), err


def test_a_process_stopped_for_less_than_fail_after_does_no_harm() -> None:
    with Job("-n", "2", "--fail-after", "5", *worker("1500")) as job:
        pids = started(job, 2)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pids[1], signal.SIGCONT)
        code, out, err = job.end()
    assert code == 0, err
    assert "rank 0 finished" in out
    assert "rank 1 finished" in out


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_exception_is_told_to_the_others_by_its_name(rank: str) -> None:
    code, _, err = run_job("-n", "2", *worker(FOR_EVER, "--fail-at", "5", "--rank", rank), patient=True)
    assert code == 1
    assert f"TransportError: rank {rank} ended: ValueError: boom" in err
    assert re.fullmatch(
        rf"commsched run: rank {rank} \(pid \d+\) ended with exit code 1; then 1 more ended with errors", err.splitlines()[-1]
    )


def test_a_rank_that_is_killed_before_it_joins_is_named_by_the_launcher() -> None:
    code, _, err = run_job("-n", "2", "--", "sh", "-c", "if [ $RANK = 1 ]; then kill -9 $$; fi")
    assert code == 128 + signal.SIGKILL
    told = r"commsched run: rank 1 \(pid \d+\) was killed by SIGKILL \(out of memory\?\) before it joined the job\n"
    assert re.fullmatch(told, err)


@pytest.mark.parametrize(
    ("end", "exit_code", "message"),
    [("--fail-at", r"exitcode  : 1 ", "ValueError: boom"), ("--kill-at", r"exitcode  : -9 ", r"Signal 9 \(SIGKILL\) received")],
)
def test_torchrun_takes_the_culprit_for_the_root_cause(end: str, exit_code: str, message: str) -> None:
    """The others hear of it within a few milliseconds, and wait: here until torchrun has seen the end of the culprit and ends
    them, however long that takes on a busy machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--no-python"]
    wait = "from commsched.core import timeouts; timeouts.CONSEQUENCE_SECONDS = 60.0; "
    run = f"import runpy; runpy.run_path({str(WORKER)!r}, run_name='__main__')"
    script = [sys.executable, "-c", wait + run, FOR_EVER, end, "7", "--rank", "2"]
    ended = warm.run([*torchrun, *script], imports=warm.TORCH, nested=True, env=clean_environ(), timeout=300)
    assert ended.returncode == 1
    cause = ended.stderr.rpartition("Root Cause (first observed failure):")[2]
    assert re.search(r"rank      : 2 ", cause), ended.stderr
    assert re.search(exit_code, cause), cause
    assert re.search(message, cause), cause


def test_a_server_that_is_kept_serves_the_restarted_job_and_the_next() -> None:
    environ = clean_environ(COMMSCHED_TOKEN="a token of this test", COMMSCHED_JOIN_WITHIN="100")
    server = [sys.executable, "-m", "commsched", "server", "--keep"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(server, env=environ, **pipes) as serving:
        try:
            assert serving.stdout is not None
            environ["COMMSCHED_SERVERS"] = serving.stdout.readline().split()[-1]
            for end in (["--fail-at", "7"], []):
                command = [*torchrun, str(WORKER), "20", *end]
                ended = warm.run(command, imports=warm.TORCH, nested=True, env=environ, timeout=300)
                assert (ended.returncode, ended.stdout.count("finished")) == (0, 2), ended.stderr
        finally:
            serving.terminate()
            _, said = serving.communicate(timeout=300)
    assert serving.returncode == -signal.SIGTERM
    first, *rest = said.splitlines()
    assert "commsched server: the job has failed: TransportError: rank 1 ended: ValueError: boom; ready for the next" in first
    assert rest == ["commsched server: the job has ended; ready for the next"] * 2


def test_the_number_of_a_rank_that_has_ended_is_nobody_elses_while_the_job_lasts(tmp_path: Path) -> None:
    """The launcher signals process groups by it."""
    told = tmp_path / "pid"
    wait = f"for i in $(seq 1000); do grep -q ') Z' /proc/$(cat {told})/stat && exit 0; sleep 0.05; done; exit 1"
    script = f"if [ $RANK = 0 ]; then echo $$ > {told}.new; mv {told}.new {told}; else {wait}; fi"
    code, _, err = run_job("-n", "2", "--", "sh", "-c", script)
    assert code == 0, err


@pytest.mark.parametrize(("transport", "fail_after", "stall_after"), [("ps", 1, 3), ("gloo", 3, 6)])
def test_a_rank_that_lives_and_does_not_send_is_named(transport: str, fail_after: int, stall_after: int) -> None:
    limits = ("--transport", transport, "--fail-after", str(fail_after), "--stall-after", str(stall_after))
    code, _, err = run_job("-n", "3", *limits, *worker(FOR_EVER, "--stall-at", "7", "--rank", "2"))
    assert code == 1
    for rank in (0, 1):
        line = rf"rank {rank} has waited \d+ s for the average of 'layer0' of step 7: rank 2 has not sent 'layer0'"
        assert re.search(line, err), err
    error = rf"PeerTimeout: rank 2 has not sent 'layer0'; rank \d has waited \d+ s for .*, and stall_after is {stall_after} s"
    assert len(re.findall(error, err)) >= 2, err
    told = r"commsched run: rank 2 \(pid \d+\) had to be ended; 2 processes ended with errors that name the cause"
    assert re.fullmatch(told, err.splitlines()[-1]), err


def test_the_traceback_is_that_of_the_rank_that_failed() -> None:
    both = "import commsched\nsession = commsched.init()\nsession.gather(0)\n"
    script = both + "if session.rank == 1:\n    raise ValueError('boom')\nsession.gather(1)\n"
    code, _, err = run_job("-n", "2", "--", sys.executable, "-c", script, patient=True, imports=())
    assert code == 1
    assert err.count("Traceback") == 1, err
    line = "commsched: rank 0: TransportError: rank 1 ended: ValueError: boom (at <string>:6; COMMSCHED_LOG=debug shows all)"
    assert line in err.splitlines()
    code, _, err = run_job("-n", "2", "--log", "debug", "--", sys.executable, "-c", script, patient=True)
    assert err.count("Traceback") == 2, err


@pytest.mark.parametrize(
    ("how", "early"),
    [
        (["--servers", "0"], 0),
        (["--servers", "0"], 1),
        (["--servers", "1"], 0),
        (["--hierarchy", "on"], 0),
        (["--hierarchy", "on"], 1),
    ],
)
def test_a_rank_that_has_finished_does_not_wait_for_others_that_evaluate(tmp_path: Path, how: list[str], early: int) -> None:
    """They may wait, in a library of theirs, for nothing but its end."""
    enough = tmp_path / "enough"
    arguments = ["--rank", str(early), "--evaluate", str(enough)]
    with Job("-n", "3", *how, "--fail-after", "0.5", *worker("5", *arguments)) as job:
        pids = started(job, 3)
        assert gone(pids.pop(early))
        assert not any(gone(pid, 0.3) for pid in pids.values())
        enough.touch()
        code, out, err = job.end()
    assert (code, out.count("finished")) == (0, 3), err
    assert "Error" not in err
    assert "Lost" not in err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_exit_code_is_told_to_the_others(rank: str) -> None:
    code, _, err = run_job("-n", "2", *worker(FOR_EVER, "--exit-at", "5", "--rank", rank, "--exit-code", "3"), patient=True)
    assert code in (1, 3)  # of whichever is seen to end first
    assert f"TransportError: rank {rank} ended: exit code 3" in err


@pytest.mark.parametrize("servers", ["0", "1"])
def test_a_rank_that_ends_early_is_named_with_what_waits_for_it(servers: str) -> None:
    code, _, err = run_job("-n", "2", "--servers", servers, *worker("200", "--exit-at", "7"), patient=True)
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
    code, out, err = run_job("-n", "2", *worker("5", *arguments), patient=True)
    assert code == 1
    assert "pid" not in out  # no rank came past registration
    assert len(re.findall(f"ManifestMismatch: {message}", err)) == 2, err


def test_ctrl_c_ends_every_process() -> None:
    with Job("-n", "2", "--servers", "1", *worker(FOR_EVER)) as job:
        pids = [*started(job, 2).values(), *server_pids(job)]
        job.process.send_signal(signal.SIGINT)
        code, _, _ = job.end()
        assert all(gone(pid) for pid in pids)
    assert code == 128 + signal.SIGINT


def test_a_rank_killed_while_another_connects_to_a_server_is_named() -> None:
    """The server that is waited for never comes; what counts is the first cause."""
    environ = {"COMMSCHED_SERVERS": "127.0.0.1:1", "COMMSCHED_TOKEN": "a token", "COMMSCHED_JOIN_WITHIN": "300"}
    said = 'rank {os.environ["COMMSCHED_RANK"]} tells {os.environ["COMMSCHED_LAUNCHER_FILE"]} pid {os.getpid()}'
    announce = f"import os,sys; os.write(1, f'{said}\\n'.encode());"
    join = f"{announce} sys.argv = ['worker', '5']; import runpy; runpy.run_path({str(WORKER)!r}, run_name='__main__')"
    with Job("-n", "2", *PATIENT, "--", sys.executable, "-c", join, environ=environ) as job:
        lines = [line.split() for line in job.lines(2)]
        pids = {int(words[1]): int(words[-1]) for words in lines}
        told, deadline = Path(lines[0][3]), time.monotonic() + 120
        while not told.exists() or set(told.read_text().splitlines()) < {"joined 0", "joined 1"}:
            assert time.monotonic() < deadline
            time.sleep(0.02)  # other processes write it: nothing could tell us
        os.kill(pids[1], signal.SIGKILL)
        assert gone(pids[0])
        _, _, err = job.end()
    assert "PeerLost: rank 1" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_that_is_ended_ends_its_processes(number: signal.Signals) -> None:
    with Job("-n", "2", *worker(FOR_EVER)) as job:
        pids = list(started(job, 2).values())
        job.process.send_signal(number)
        code, _, _ = job.end()
        assert all(gone(pid) for pid in pids)
    assert code == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_a_launcher_was_told_to_ignore_it_ignores(number: signal.Signals) -> None:
    """As ``nohup``, and ``&`` in a script, ask for."""
    with Job("-n", "1", *worker(FOR_EVER), ignored=[number.name.removeprefix("SIG")]) as job:
        [pid] = started(job, 1).values()
        job.process.send_signal(number)
        job.process.send_signal(signal.SIGTERM)
        code, _, _ = job.end()
        assert gone(pid)
    assert code == 128 + signal.SIGTERM  # the first that it took notice of


def test_a_launcher_learns_of_the_end_of_its_processes_though_its_parent_ignored_such_signals() -> None:
    with Job("-n", "2", "--", "false", ignored=["CHLD"]) as job:
        code, _, err = job.end()
    assert code == 1, err


def test_a_launcher_that_is_killed_takes_its_job_along() -> None:
    with Job("-n", "2", "--servers", "1", *worker(FOR_EVER)) as job:
        pids = [*started(job, 2).values(), *server_pids(job)]
        assert len(pids) == 3
        os.killpg(job.process.pid, signal.SIGKILL)  # as by who ends what a shell has started
        assert all(gone(pid) for pid in pids)


def test_what_does_not_end_by_sigterm_is_killed_after_its_launcher() -> None:
    stubborn = "trap '' TERM; sleep 1000 & echo x x $$; echo x x $!; while true; do wait; done"
    with Job("-n", "1", "--", "sh", "-c", stubborn) as job:
        pids = [int(line.split()[-1]) for line in job.lines(2)]
        job.process.kill()
        assert all(gone(pid) for pid in pids)


def test_what_a_rank_leaves_running_ends_with_the_job() -> None:
    with Job("-n", "1", "--", "sh", "-c", "sleep 1000 & echo x x $!") as job:
        (pid,) = (int(line.split()[-1]) for line in job.lines(1))
        assert job.process.wait(60) == 0
        assert gone(pid)
