"""Witnesses of real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from commsched.control import witness as witness_module
from commsched.control import witnessed
from commsched.control.witness import is_stopped, runs
from commsched.control.witnessed import Doubts, Witness, process_runs
from tests.jobs.job import gone

from .world import PATIENCE_SECONDS

WATCHED = """
import sys
from commsched.control.witnessed import Witness
witness = Witness("127.0.0.1")
print(witness.address, witness.process_id, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def watched() -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A process, the address of its witness and the witness's number."""
    process = subprocess.Popen([sys.executable, "-c", WATCHED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address, number = process.stdout.readline().split()
        yield process, address, int(number)
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


def test_a_witness_knows_who_runs_and_who_is_stopped_and_ends_with_its_process(
    watched: tuple[subprocess.Popen[str], str, int],
) -> None:
    process, address, number = watched
    assert process_runs(address, PATIENCE_SECONDS)
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as to the whole group: the process may go on
        os.kill(number, sent)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # which a busy machine may take a moment for
    assert not process_runs(address, PATIENCE_SECONDS)
    process.send_signal(signal.SIGCONT)
    assert process_runs(address, PATIENCE_SECONDS)
    process.kill()
    assert gone(number)
    assert not process_runs(address, PATIENCE_SECONDS)


def test_strangers_that_connect_and_stay_do_not_keep_others_from_asking(
    watched: tuple[subprocess.Popen[str], str, int],
) -> None:
    _, address, _ = watched
    host, _, port = address.rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(200)]
    assert process_runs(address, PATIENCE_SECONDS)
    for stranger in strangers:
        stranger.close()


def test_a_closed_witness_is_gone() -> None:
    witness = Witness("127.0.0.1")
    assert process_runs(witness.address, PATIENCE_SECONDS)
    witness.close()
    witness.close()
    assert not process_runs(witness.address, PATIENCE_SECONDS)


def test_without_a_place_to_listen_there_is_no_witness(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Witness("203.0.113.1").address == ""
    monkeypatch.setattr(sys, "executable", "")
    assert Witness("127.0.0.1").address == ""


def test_what_answers_otherwise_is_no_witness() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"

        def answer() -> None:
            with other.accept()[0] as asked:
                asked.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert not process_runs(address, PATIENCE_SECONDS)
        thread.join()
        assert not process_runs(address, 0.1)  # which takes the connection and says nothing
    assert not process_runs("nonsense", 0.1)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("State:\tR (running)\nCoreDumping:\t0\n", (True, False)),
        ("State:\tD (disk sleep)\nCoreDumping:\t1\n", (False, False)),
        ("State:\tT (stopped)\nCoreDumping:\t0\n", (False, True)),
        ("State:\tt (tracing stop)\nCoreDumping:\t0\n", (False, False)),
        ("State:\tZ (zombie)\n", (False, False)),
        ("", (False, False)),
    ],
)
def test_a_process_that_is_being_dumped_or_has_ended_neither_runs_nor_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str, expected: tuple[bool, bool]
) -> None:
    path = tmp_path / "status"
    path.write_text(status)
    monkeypatch.setattr(witness_module, "open", lambda name: path.open(), raising=False)
    assert (runs(1), is_stopped(1)) == expected


def test_a_peer_is_asked_once_at_a_time_and_the_log_says_that_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: SimpleQueue[str] = SimpleQueue()
    answer, heard = threading.Event(), threading.Event()

    def process_runs(address: str, within_seconds: float) -> bool:
        asked.put(address)
        return answer.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(witnessed, "process_runs", process_runs)
    doubts: Doubts[int] = Doubts(1.0, lambda peer: heard.set())
    doubts.ask(6, "rank 6", "")  # it has none
    for _ in range(3):
        doubts.ask(7, "rank 7", "h:1")
    answer.set()
    assert heard.wait(PATIENCE_SECONDS)
    doubts.close()
    doubts._executor.shutdown()
    assert asked.get_nowait() == "h:1"
    assert asked.empty()
    assert not caplog.messages or caplog.messages[0].startswith("rank 7 does not answer, but its process runs")


def test_the_log_says_of_each_peer_once_in_fail_after_that_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    doubts: Doubts[int] = Doubts(10.0, lambda peer: None)
    for clock[0], peer in ((100.0, 7), (100.5, 7), (101.0, 8), (109.9, 7), (110.0, 7)):
        doubts._warn(peer, f"rank {peer}")
    doubts.close()
    assert [message[:6] for message in caplog.messages] == ["rank 7", "rank 8", "rank 7"]


def test_a_peer_whose_witness_says_no_is_not_taken_for_one_that_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = threading.Event()
    monkeypatch.setattr(witnessed, "process_runs", lambda address, within_seconds: bool(asked.set()))
    heard: list[int] = []
    doubts: Doubts[int] = Doubts(1.0, heard.append)
    doubts.ask(7, "rank 7", "h:1")
    assert asked.wait(PATIENCE_SECONDS)
    doubts.close()
    doubts._executor.shutdown()
    assert heard == []
    assert caplog.messages == []


def test_a_frozen_program_is_not_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    witness = Witness("127.0.0.1")
    try:
        assert (witness.address, witness.process_id) == ("", None)
    finally:
        witness.close()
