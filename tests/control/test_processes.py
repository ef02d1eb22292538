"""Members that are processes, and what others are told when one is killed, stopped or ends on its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from commsched.control.client import ControlClient
from commsched.control.messages import Member
from commsched.core.errors import CommschedError, PeerLost, PeerTimeout, ProtocolError
from tests import warm

from .world import PATIENCE_SECONDS, TOKEN, Job, Recorder, joining

ROOT = Path(__file__).parents[2]

Start = Callable[..., "Process"]


class Process:
    """A ``member_process``; what it says is read with a time limit."""

    def __init__(self, *args: object) -> None:
        command = [sys.executable, "-m", "tests.control.member_process", *map(str, args)]
        self.popen = warm.Popen(command, imports=warm.NUMPY, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.pid = self.popen.pid

    def says(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        late = threading.Timer(3 * PATIENCE_SECONDS, self.popen.kill)  # ends the read
        late.start()
        try:
            line = self.popen.stdout.readline()
        finally:
            late.cancel()
            late.join()
        assert line, "it ended, or said nothing"
        return json.loads(line)

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait(PATIENCE_SECONDS)
        assert self.popen.stdout is not None
        self.popen.stdout.close()


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start(*args: object) -> Process:
            process = Process(*args)
            stack.callback(process.end)
            return process

        yield start


def join_beside(job: Job, processes: list[Process]) -> ControlClient:
    """Rank 0 here, the others in their processes."""
    client = job.join_rank(0)
    for rank, process in enumerate(processes, 1):
        assert process.says() == {"joined": rank}
    return client


def test_kill_9_is_told_to_all_at_once(start: Start) -> None:
    with joining(3, fail_after_seconds=30.0) as job:  # so long that only the broken connection can tell
        processes = [start(job.server.address, rank, 3, 30.0) for rank in (1, 2)]
        join_beside(job, processes)
        processes[0].signal(signal.SIGKILL)
        error = job.listeners[0].next("failure")
        assert isinstance(error, PeerLost)
        assert str(error).startswith("rank 1 (host ")
        assert str(error).endswith(f", pid {processes[0].pid}) is gone: its connection broke")
        assert error.rank == 1
        assert processes[1].says() == {"failure": "PeerLost", "message": str(error)}
        assert processes[1].says() == {"threads": []}
        assert processes[1].popen.wait(PATIENCE_SECONDS) == 0


def test_kill_9_of_rank_0_is_told_to_all_at_once(start: Start) -> None:
    zero = start("serve", 0, 2, 30.0)
    address = zero.says()["address"]
    listener = Recorder()
    client = ControlClient(address, TOKEN, Member.rank(1, 2), fail_after_seconds=30.0, join_within_seconds=PATIENCE_SECONDS)
    client.listen(listener)
    assert zero.says() == {"joined": 0}
    zero.signal(signal.SIGKILL)
    error = listener.next("failure")
    assert isinstance(error, PeerLost)
    assert str(error).startswith("rank 0 (host ")
    assert str(error).endswith(f", pid {zero.pid}) is gone: the control connection to it broke")
    client.close()


def silent_seconds(error: CommschedError, pid: int) -> float:
    found = re.search(rf", pid {pid}\) has been silent for (\d+\.\d) s", str(error))
    assert found is not None, error
    return float(found[1])


def test_a_stopped_rank_is_told_after_fail_after(start: Start) -> None:
    with joining(3, fail_after_seconds=1.0) as job:
        processes = [start(job.server.address, rank, 3, 1.0) for rank in (1, 2)]
        join_beside(job, processes)
        processes[0].signal(signal.SIGSTOP)
        error = job.listeners[0].next("failure")
        assert isinstance(error, PeerTimeout)
        assert silent_seconds(error, processes[0].pid) >= 1.0
        assert processes[1].says() == {"failure": "PeerTimeout", "message": str(error)}
        processes[0].signal(signal.SIGCONT)  # it learns how it ended, and blames nobody else
        assert processes[0].says() == {"failure": "PeerTimeout", "message": str(error)}


def test_a_stopped_rank_0_is_told_after_fail_after(start: Start) -> None:
    zero = start("serve", 0, 2, 1.0)
    address = zero.says()["address"]
    listener = Recorder()
    client = ControlClient(address, TOKEN, Member.rank(1, 2), fail_after_seconds=1.0, join_within_seconds=PATIENCE_SECONDS)
    client.listen(listener)
    assert zero.says() == {"joined": 0}
    zero.signal(signal.SIGSTOP)
    error = listener.next("failure")
    assert isinstance(error, PeerTimeout)
    assert silent_seconds(error, zero.pid) >= 1.0
    client.close()


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_pause_shorter_than_fail_after_is_no_failure(start: Start, stopped: int) -> None:
    zero = start("serve", 0, 3, 4.0)
    address = zero.says()["address"]
    one = start(address, 1, 3, 4.0)
    listener = Recorder()
    client = ControlClient(address, TOKEN, Member.rank(2, 3), fail_after_seconds=4.0, join_within_seconds=PATIENCE_SECONDS)
    client.listen(listener)
    processes = [zero, one]
    assert [process.says() for process in processes] == [{"joined": 0}, {"joined": 1}]
    processes[stopped].signal(signal.SIGSTOP)
    assert not threading.Event().wait(2.2)
    processes[stopped].signal(signal.SIGCONT)
    assert not threading.Event().wait(1.0)
    assert listener.calls.empty()
    client.report(ValueError("enough"))  # all three are still members
    for told in (str(listener.next("failure")), *(process.says()["message"] for process in processes)):
        assert "ValueError: enough" in told
    client.close()


@pytest.mark.parametrize(("how", "code"), [("exit", 0), ("raise", 1)])
def test_a_script_that_ends_without_closing_ends_at_once_and_is_lost(start: Start, how: str, code: int) -> None:
    with joining(2, fail_after_seconds=30.0) as job:
        process = start(job.server.address, 1, 2, 30.0, how)
        client = join_beside(job, [process])
        with suppress(PeerLost):  # it is gone once it has what it gathered
            client.gather("all have joined", None)
        assert process.popen.wait(PATIENCE_SECONDS) == code
        error = job.listeners[0].next("failure")
        assert isinstance(error, PeerLost)
        assert f", pid {process.pid}) is gone: " in str(error)


def test_a_rank_0_that_ends_without_closing_ends_at_once_and_is_lost(start: Start) -> None:
    zero = start("serve", 0, 2, 30.0, "exit")
    listener = Recorder()
    client = ControlClient(
        zero.says()["address"],
        TOKEN,
        Member.rank(1, 2),
        fail_after_seconds=30.0,
        join_within_seconds=PATIENCE_SECONDS,
    )
    client.listen(listener)
    with suppress(PeerLost):
        client.gather("all have joined", None)
    assert zero.popen.wait(PATIENCE_SECONDS) == 0
    assert "rank 0 (host " in str(listener.next("failure"))
    client.close()


def test_two_processes_tell_and_hear_everything_in_order(start: Start) -> None:
    with joining(3, direct=True) as job:
        processes = [start(job.server.address, rank, 3, 30.0, "tell") for rank in (1, 2)]
        client = join_beside(job, processes)
        client.gather("all have joined", None)
        numbers: dict[int, list[int]] = {1: [], 2: []}
        for count in range(600):
            rank, number = job.listeners[0].next("told")
            numbers[rank].append(number)
            if count % 2:
                client.announce("t", count)
        assert numbers == {1: list(range(300)), 2: list(range(300))}
        client.leave()
        client.wait_until_all_left()
        for process in processes:
            assert process.says() == {"announced": list(range(1, 600, 2))}
            assert process.says() == {"threads": []}
            assert process.popen.wait(PATIENCE_SECONDS) == 0


def test_a_process_that_announces_as_rank_1_fails_the_job_by_name(start: Start) -> None:
    with joining(2, direct=True) as job:
        process = start(job.server.address, 1, 2, 30.0, "announce")
        client = join_beside(job, [process])
        client.gather("all have joined", None)
        error = job.listeners[0].next("failure")
        assert isinstance(error, ProtocolError)
        assert str(error).endswith(f", pid {process.pid}) announced something; only rank 0 may")
        assert process.says() == {"failure": "ProtocolError", "message": str(error)}
