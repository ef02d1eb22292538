"""How a process ends that a library keeps waiting in a failed job."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from commsched.core import timeouts
from commsched.core.errors import CommschedError, PeerLost
from commsched.transports.collective.exit_if_job_fails import exit_if_job_fails

_SECONDS = 10.0


class Job:
    """Fails when the test says."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[CommschedError], None]] = []

    def fail(self) -> None:
        for callback in self.callbacks:
            callback(PeerLost("rank 1 is gone"))


@pytest.fixture
def exited(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    event = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: event.set())
    return event


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "commsched-stuck"]


def test_a_process_that_is_stuck_says_why_and_ends(
    exited: threading.Event, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timeouts, "STUCK_LIBRARY_SECONDS", 0.01)
    job = Job()
    with exit_if_job_fails(job.callbacks.append):
        job.fail()
        assert exited.wait(_SECONDS)
    assert capsys.readouterr().err == "commsched: PeerLost: rank 1 is gone\n"


def test_one_that_comes_out_in_time_does_not(exited: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STUCK_LIBRARY_SECONDS", _SECONDS)
    job = Job()
    with exit_if_job_fails(job.callbacks.append):
        job.fail()
    for thread in threads():
        thread.join(_SECONDS)
    assert not exited.is_set()


def test_a_later_failure_starts_nothing(exited: threading.Event) -> None:
    job = Job()
    with exit_if_job_fails(job.callbacks.append):
        pass
    job.fail()
    assert threads() == []
    assert not exited.is_set()
