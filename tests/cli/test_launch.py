"""What ends processes, where that is not to be had from real ones."""

from __future__ import annotations

import io
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from commsched.cli import launch
from commsched.cli import launch_guard as guard
from commsched.cli.elastic import job as elastic_job
from commsched.cli.launch import Among, Elasticity, Ends, Job, ProcessEvent


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Signals that were sent. Process group 7 has gone, and 8 is another user's by now."""
    sent: list[tuple[int, int]] = []

    def killpg(process_group: int, number: int) -> None:
        if process_group in (7, 8):
            raise (ProcessLookupError if process_group == 7 else PermissionError)
        sent.append((process_group, number))

    monkeypatch.setattr(os, "killpg", killpg)
    return sent


def test_a_process_group_that_is_somebody_else_s_by_now_does_not_keep_the_others(signalled: list[tuple[int, int]]) -> None:
    for process_group in (7, 8, 9):
        launch.kill_group(process_group, signal.SIGTERM)
    assert signalled == [(9, signal.SIGTERM)]


def test_nor_does_it_when_the_launcher_was_killed(
    signalled: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guard, "KILL_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stdin", io.StringIO("7\n8\n10\n9\nreaped 10\n"))
    directory = tmp_path / "job"
    directory.mkdir()
    guard.main(str(directory))
    assert signalled == [(9, signal.SIGTERM), (9, signal.SIGKILL)]
    assert not directory.exists()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Two ranks and a server, whose ends the test tells."""
    made = object.__new__(Job)
    made._told = tmp_path / "told"
    made._processes, made._timers, made._ends_at, made._interrupted = {}, [], math.inf, 0
    made._ends = Ends(made._ranks_that)
    made._names, made._ranks = made._ends.names, made._ends.ranks
    made._names |= {10: "server 0 (pid 10)", 11: "rank 0 (pid 11)", 12: "rank 1 (pid 12)"}
    made._ranks |= {11: 0, 12: 1}
    made._alive, made._events = {10, 11, 12}, SimpleQueue()
    return made


def test_a_server_that_nobody_joined_is_ended_after_the_last_rank(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_end_soon", lambda: job._events.put(ProcessEvent(10)))
    for rank in (11, 12):
        job._events.put(ProcessEvent(rank))
    assert job.wait() == 0
    assert not job._alive


def test_a_server_that_had_to_be_ended_does_not_make_a_failure_of_ranks_that_ended_well(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def end_soon() -> None:
        job._ends.ended_by_us = ["server 0 (pid 10)"]
        job._events.put(ProcessEvent(10, -signal.SIGTERM))

    monkeypatch.setattr(job, "_end_soon", end_soon)
    for rank in (11, 12):
        job._events.put(ProcessEvent(rank))
    assert job.wait() == 0
    assert capfd.readouterr().err == "commsched run: server 0 (pid 10) had to be ended\n"


@pytest.mark.parametrize("ignores", [[], [10], [12]])
def test_who_ended_by_the_first_signal_to_the_rest_is_not_taken_for_the_cause(
    job: Job, signalled: list[tuple[int, int]], ignores: list[int]
) -> None:
    job._told.write_text("joined 0\njoined 1\nheard 0\n")
    job._ends.failures.append(ProcessEvent(11, 1))
    job._alive = {10, 12}
    job._end(signal.SIGTERM)
    for process in {10, 12} - {*ignores}:
        job._ends.failures.append(ProcessEvent(process, -signal.SIGTERM))
        job._alive.discard(process)
    job._end(signal.SIGKILL)
    job._ends.failures += [ProcessEvent(process, -signal.SIGKILL) for process in ignores]
    assert job.exit_code() == 1
    assert job._ends.what_happened().startswith("rank 1 (pid 12), server 0 (pid 10) had to be ended")


class _Timers:
    """Timers that a test reads, by what they would send."""

    def __init__(self) -> None:
        self.due: dict[int, float] = {}

    def __call__(self, seconds: float, _: object, arguments: list[int]) -> Any:
        (number,) = arguments
        self.due[number] = seconds
        return SimpleNamespace(start=lambda: None, cancel=lambda: self.due.pop(number, None))


def test_ranks_have_time_after_sigterm_to_end_by_themselves(
    job: Job, signalled: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may save a checkpoint. One that fails does not shorten that; a second signal does."""
    timers = _Timers()
    monkeypatch.setattr("commsched.cli.launch.threading.Timer", timers)
    job._pass_on(signal.SIGTERM, None)
    assert timers.due == {signal.SIGTERM: 25.0, signal.SIGKILL: 27.0}
    for event in (ProcessEvent(11, -signal.SIGTERM), ProcessEvent(10, 1), ProcessEvent(12, 0)):
        job._events.put(event)
    job.wait()
    assert timers.due == {signal.SIGTERM: 25.0, signal.SIGKILL: 27.0}
    job._pass_on(signal.SIGTERM, None)
    assert timers.due == {signal.SIGTERM: 5.0, signal.SIGKILL: 7.0}


@pytest.mark.parametrize("number", [0, signal.SIGINT, signal.SIGHUP])
def test_they_have_less_after_a_failure_and_other_signals(
    job: Job, signalled: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    timers = _Timers()
    monkeypatch.setattr("commsched.cli.launch.threading.Timer", timers)
    job._end_soon()
    job._pass_on(number, None)
    assert timers.due == {signal.SIGTERM: 5.0, signal.SIGKILL: 7.0}


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_processes_start_also_when_the_guard_was_killed(tmp_path: Path) -> None:
    job = Job(str(tmp_path), tmp_path / "told")
    try:
        job._guard.kill()
        job._guard.wait()
        ignored = "import signal; assert signal.getsignal(signal.SIGPIPE) != signal.SIG_DFL"  # Python's own default
        for rank in range(2):
            job.start_rank([sys.executable, "-c", ignored], os.environ, rank, 2)
        assert job.wait() == 0
    finally:
        job.kill()


@pytest.mark.usefixtures("handlers")
def test_a_job_ends_also_when_the_guard_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GUARD_SECONDS", 0.1)
    job = Job(str(tmp_path), tmp_path / "told")
    os.kill(job._guard.pid, signal.SIGSTOP)
    job.kill()
    assert job._guard.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_job_has_begun_leaves_no_directory(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    directories: list[Path] = []

    def run_elastic(directory: str, *arguments: object) -> int:
        directories.append(Path(directory))
        os.kill(os.getpid(), number)
        return 0

    monkeypatch.setattr(elastic_job, "run_elastic", run_elastic)
    signal.signal(number, signal.SIG_DFL)
    with pytest.raises(SystemExit) as ended:
        launch.run(2, 0, ["train"], {}, Elasticity(2, 3, 60.0, 30.0))
    assert ended.value.code == 128 + number
    assert not directories[0].exists()


def test_neither_a_server_nor_who_heard_of_a_failure_is_its_cause(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "_end_soon", lambda: None)
    job._told.write_text("joined 0\njoined 1\nheard 0\n")
    for event in (ProcessEvent(10, 1), ProcessEvent(11, 1), ProcessEvent(12, 3)):
        job._events.put(event)
    assert job.wait() == 3
    assert capfd.readouterr().err == "commsched run: rank 1 (pid 12) ended with exit code 3; then 2 more ended with errors\n"


def test_a_job_that_is_over_is_not_ended_again(
    signalled: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guard, "KILL_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stdin", io.StringIO("9\ndone\n"))
    guard.main(str(tmp_path))
    assert signalled == []


def test_later_processes_of_an_elastic_job_have_the_token_that_the_first_ones_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also if the user's file has another one by then: the launcher gives them a file of its own."""
    theirs = tmp_path / "token"
    theirs.write_text("another one")
    found: list[tuple[str, int]] = []

    def run_elastic(directory: str, ranks: int, servers: int, command: object, environ: dict[str, str], _: object) -> int:
        path = Path(environ["COMMSCHED_TOKEN_FILE"])
        found.append((path.read_text(), path.stat().st_mode & 0o777))
        assert "COMMSCHED_TOKEN" not in environ
        return 0

    monkeypatch.setattr(elastic_job, "run_elastic", run_elastic)
    among = Among("10.0.0.1:7", "the first one", "job", 1, None, None, 5.0)
    elasticity = Elasticity(2, 3, 60.0, 30.0, False, among, token_from_file=among.token)
    assert launch.run(2, 0, ["train"], {"COMMSCHED_TOKEN_FILE": str(theirs)}, elasticity, own_token=False) == 0
    assert found == [("the first one", 0o600)]
