"""The processes of one machine of an elastic job."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

from commsched.cli.elastic.machine import _HAS_ITS_PLACE, LocalMachine, ServerEnded, Signalled
from commsched.control.elastic_messages import (
    EndAll,
    Ended,
    KeepReady,
    KillMember,
    MemberSaid,
    NotStarted,
    Refused,
    Started,
    StartMember,
    Tell,
    from_line,
)
from commsched.core.errors import TransportError

SCRIPT = """
import os, sys
with open(os.environ["TOLD"], "a") as file:
    file.write(" ".join([*sys.argv[1:], os.environ["RANK"], os.environ["LOCAL_RANK"], str(os.getpid())]) + "\\n")
sys.exit(int(sys.argv[1]))
"""

CONNECTS = """
import os, socket, time
connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ["COMMSCHED_ELASTIC"])
connection.sendall(b"hello\\n")
connection.recv(1)
if os.fork() == 0:
    time.sleep(600.0)
"""

CONNECTS_TWICE = """
import os, socket
first, second = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
first.connect(os.environ["COMMSCHED_ELASTIC"])
first.sendall(b"hello\\n")
first.recv(1)
second.connect(os.environ["COMMSCHED_ELASTIC"])
second.sendall(b'{"kind": "Asked"}\\n')
answer = second.makefile("rb").read()
first.sendall(answer)
first.recv(1)
"""

HAS_A_CHILD = """
import os, socket, subprocess, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ["COMMSCHED_ELASTIC"])
connection.sendall(b"hello\\n")
child = [sys.executable, "-c", "import commsched; commsched.init()"]
ended = subprocess.run(child, stderr=subprocess.PIPE, timeout=60)
connection.sendall(ended.stderr.splitlines()[-1] + b"\\n")
connection.recv(1)
sys.exit(3)
"""


def fails_to_fork(*arguments: object, **keywords: object) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[LocalMachine]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    directory = tmp_path / "job"
    directory.mkdir()
    environ = {**os.environ, "TOLD": str(tmp_path / "told"), "COMMSCHED_TOKEN": "a token of this test"}
    command = [sys.executable, str(script), "3"]
    made = LocalMachine(str(directory), 4, 2, "10.0.0.2", command, environ, standby=True)
    yield made
    made.close()
    assert made._guard.stdin is not None
    made._guard.stdin.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def next_report(machine: LocalMachine) -> Any:
    while True:
        report = machine.reported(machine.events.get(timeout=60.0))
        if report is not None:
            return report


def is_zombie(pid: int) -> bool:
    """Whether the process, a child of this one, has ended, but was not reaped."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def lines(machine: LocalMachine, tmp_path: Path) -> list[list[str]]:
    return [line.split() for line in (tmp_path / "told").read_text().splitlines()]


def test_a_process_on_standby_takes_the_place_of_a_rank(machine: LocalMachine, tmp_path: Path) -> None:
    machine.do(KeepReady())
    machine.do(KeepReady())
    assert machine.is_empty
    assert machine._standby is not None
    pid = machine._standby[0]
    machine.do(StartMember(0, 3, 1))
    assert next_report(machine) == Started(0, pid)
    assert next_report(machine) == Ended(0, 3)
    assert lines(machine, tmp_path) == [["3", "3", "1", str(pid)]]
    machine.do(StartMember(1, 2, 0))
    started = next_report(machine)
    assert started.pid != pid
    assert next_report(machine) == Ended(1, 3)
    assert lines(machine, tmp_path)[1:] == [["3", "2", "0", str(started.pid)]]


def test_one_that_was_killed_is_not_taken(machine: LocalMachine) -> None:
    machine.do(KeepReady())
    assert machine._standby is not None
    pid = machine._standby[0]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    machine.do(StartMember(0, 3, 1))
    report = next_report(machine)
    assert isinstance(report, Started)
    assert report.pid != pid
    assert next_report(machine) == Ended(0, 3)


def test_nothing_is_kept_of_a_process_that_has_ended(machine: LocalMachine, tmp_path: Path) -> None:
    def listeners() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("commsched-member-")]

    before = os.listdir("/proc/self/fd")
    for member in range(3):
        machine.do(StartMember(member, 3, 1))
        (thread,) = listeners()
        started = next_report(machine)
        assert next_report(machine) == Ended(member, 3)
        thread.join(60.0)
        assert not thread.is_alive()
        assert not is_zombie(started.pid)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert os.listdir(tmp_path / "job") == []


def test_a_start_is_reported_before_what_the_process_says(
    machine: LocalMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(CONNECTS)
    early: list[Any] = []

    def watch(pid: int) -> None:
        with suppress(Empty):  # the process has time to say something
            early.append(machine.events.get(timeout=1.0))

    monkeypatch.setattr(machine, "_watch_in_thread", watch)
    machine.do(StartMember(0, 3, 1))
    assert early == []
    assert isinstance(next_report(machine), Started)
    assert next_report(machine) == MemberSaid(0, "hello\n")


def test_a_child_that_holds_the_connection_of_a_process_that_has_ended_does_not_keep_its_thread(
    machine: LocalMachine, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(CONNECTS)
    machine.do(StartMember(0, 3, 1))
    (thread,) = [each for each in threading.enumerate() if each.name == "commsched-member-0"]
    started = next_report(machine)
    assert next_report(machine) == MemberSaid(0, "hello\n")
    machine.do(Tell(0, "and goodbye"))
    assert next_report(machine) == Ended(0, 0)
    thread.join(60.0)
    assert not thread.is_alive()
    assert is_zombie(started.pid)  # until the job is over: else nothing could end its child safely


def test_servers_of_the_last_generation_end_with_it_and_are_reaped(machine: LocalMachine) -> None:
    before = len(os.listdir("/proc/self/fd"))
    machine.serve(1, 1)
    (first,) = machine._servers
    machine.serve(0, 2)
    assert machine.reported(machine.events.get(timeout=60.0)) is None
    assert not is_zombie(first)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_server_that_ends_with_its_generation_under_way_is_reported(machine: LocalMachine) -> None:
    machine.serve(1, 7)
    (pid,) = machine._servers
    os.kill(pid, signal.SIGKILL)
    assert machine.reported(machine.events.get(timeout=60.0)) == ServerEnded(f"server 0 (pid {pid}) has ended", 7)


def test_an_order_after_a_signal_starts_nothing(machine: LocalMachine) -> None:
    machine._pass_on(signal.SIGTERM, None)
    machine.do(StartMember(0, 3, 1))
    assert next_report(machine) == Signalled(signal.SIGTERM)
    assert next_report(machine) == NotStarted(0)


def test_a_second_signal_shortens_the_time_on_all_machines(machine: LocalMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    grace: list[int] = []
    monkeypatch.setattr(machine, "_end_soon", lambda number=0: grace.append(number))
    machine.do(EndAll(signal.SIGTERM))
    machine.do(EndAll(signal.SIGINT))
    assert grace == [signal.SIGTERM, 0]
    machine._pass_on(signal.SIGTERM, None)
    machine._pass_on(signal.SIGINT, None)
    assert grace[2:] == [signal.SIGTERM, 0]
    assert [next_report(machine), next_report(machine)] == [Signalled(signal.SIGTERM), Signalled(signal.SIGINT)]


def test_orders_for_a_process_that_is_not_there(machine: LocalMachine) -> None:
    machine.do(KillMember(9))
    assert machine.is_empty


def test_a_child_of_a_rank_that_asks_for_a_place_of_its_own_is_refused(machine: LocalMachine, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CONNECTS_TWICE)
    machine.do(StartMember(0, 3, 1))
    assert isinstance(next_report(machine), Started)
    assert next_report(machine) == MemberSaid(0, "hello\n")
    machine.do(Tell(0, "!"))
    said = next_report(machine)
    assert isinstance(said, MemberSaid)
    assert from_line(said.line) == Refused(_HAS_ITS_PLACE)
    machine.do(Tell(0, "!"))
    assert next_report(machine) == Ended(0, 0)


def test_what_such_a_child_ends_with_is_no_consequence_of_another_rank(machine: LocalMachine, tmp_path: Path) -> None:
    """Else the rank would be started again and again if it fails since its child does."""
    (tmp_path / "train.py").write_text(HAS_A_CHILD)
    machine.do(StartMember(0, 3, 1))
    assert isinstance(next_report(machine), Started)
    assert next_report(machine) == MemberSaid(0, "hello\n")
    assert next_report(machine) == MemberSaid(0, f"commsched.core.errors.ConfigError: {_HAS_ITS_PLACE}\n")
    machine.do(Tell(0, "!"))
    assert next_report(machine) == Ended(0, 3)


def test_a_process_that_nobody_can_hear_finds_its_connection_broken(
    machine: LocalMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(CONNECTS_TWICE)
    no_thread(monkeypatch, "-says")
    machine.do(StartMember(0, 3, 1))
    assert isinstance(next_report(machine), Started)
    assert isinstance(next_report(machine), Ended)


def no_thread(patch: pytest.MonkeyPatch, name: str) -> None:
    """The system gives no further thread of this name."""
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if name in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", fails)


@pytest.mark.parametrize("of", ["the process", "commsched-member-", "commsched-watch-"])
def test_a_replacement_that_cannot_be_started_is_a_lost_rank(
    machine: LocalMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], of: str
) -> None:
    machine.do(StartMember(0, 3, 1))
    assert isinstance(next_report(machine), Started)
    assert next_report(machine) == Ended(0, 3)
    monkeypatch.setattr("commsched.cli.elastic.machine._PAUSE_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        if of == "the process":
            patch.setattr(subprocess, "Popen", fails_to_fork)
        else:
            no_thread(patch, of)
        machine.do(StartMember(1, 3, 1))
    assert machine.is_empty
    assert next_report(machine) == Ended(1, 1)
    why = "Resource temporarily unavailable" if of == "the process" else "can't start new thread"
    assert why in capfd.readouterr().err
    assert os.listdir(tmp_path / "job") == []
    machine.do(StartMember(2, 3, 1))
    assert isinstance(next_report(machine), Started)
    assert next_report(machine) == Ended(2, 3)


def test_a_first_rank_that_cannot_be_started_ends_the_job(machine: LocalMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", fails_to_fork)
    with pytest.raises(TransportError, match="cannot be started: Resource temporarily unavailable"):
        machine.do(StartMember(0, 3, 1))


@pytest.mark.parametrize("of", ["the process", "commsched-watch-"])
def test_a_job_goes_on_without_a_process_on_standby(
    machine: LocalMachine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], of: str
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        if of == "the process":
            patch.setattr(subprocess, "Popen", fails_to_fork)
        else:
            no_thread(patch, of)
        machine.do(KeepReady())
        machine.do(KeepReady())
    assert machine.is_empty
    assert capfd.readouterr().err.count("there is no process on standby any more: ") == 1
    assert len(os.listdir("/proc/self/fd")) == before
    machine.do(StartMember(0, 3, 1))
    assert isinstance(next_report(machine), Started)
    assert next_report(machine) == Ended(0, 3)
