"""Who is believed when a job fails, and how a process ends that a library keeps waiting in a failed job."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from commsched.core import timeouts
from commsched.core.errors import CommschedError, PeerLost
from commsched.transports.collective.failures import DeferredFailure, exit_if_job_fails

FIRST, SECOND = PeerLost("the first"), PeerLost("the second")


_SECONDS = 60.0


class Job:
    """What has failed, as the control channel would say it."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[CommschedError], None]] = []
        self.told: list[CommschedError] = []
        self.heard = threading.Event()

    def on_failure(self, error: CommschedError) -> None:
        self.told.append(error)
        self.heard.set()

    def verdict(self, grace_seconds: float) -> DeferredFailure:
        return DeferredFailure(self.on_failure, self.callbacks.append, grace_seconds)

    def fail(self) -> None:
        for callback in self.callbacks:
            callback(PeerLost("rank 1 is gone"))


@pytest.fixture
def job() -> Job:
    return Job()


def test_the_first_error_is_told_when_nobody_knows_better(job: Job) -> None:
    verdict = job.verdict(0.01)
    verdict.report(FIRST)
    verdict.report(SECOND)
    assert job.heard.wait(60)
    verdict.report(SECOND)
    verdict.close()
    assert job.told == [FIRST]


def test_an_error_is_told_at_once_where_no_thread_can_be_started(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    verdict = job.verdict(_SECONDS)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    verdict.report(FIRST)
    assert job.told == [FIRST]
    verdict.report(SECOND)
    verdict.close()
    assert job.told == [FIRST]


@pytest.mark.parametrize("order", ["before", "after"])
def test_an_error_is_not_told_when_the_job_knows_its_cause(job: Job, order: str) -> None:
    verdict = job.verdict(1000.0)
    if order == "before":
        job.fail()
        verdict.report(FIRST)
    else:
        verdict.report(FIRST)
        job.fail()
    verdict.close()
    assert job.told == []


def test_nothing_is_told_after_close_and_no_thread_is_left(job: Job) -> None:
    verdict = job.verdict(1000.0)
    verdict.report(FIRST)
    assert [each.daemon for each in threading.enumerate() if each.name == "commsched-verdict"] == [True]
    verdict.close()
    verdict.close()
    verdict.report(SECOND)
    assert job.told == []
    assert "commsched-verdict" not in [each.name for each in threading.enumerate()]


# --- a process that is stuck ---


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
