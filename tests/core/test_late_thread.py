from __future__ import annotations

import threading

import pytest

from commsched.core import late_thread
from commsched.core.late_thread import LateThread


@pytest.fixture(params=[False, True], ids=["started late", "started early"])
def early(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(late_thread, "START_EARLY", request.param)
    return bool(request.param)


def test_it_calls_once_in_its_thread(early: bool) -> None:
    called: list[str] = []
    thread = LateThread("commsched-late")
    assert ("commsched-late" in [each.name for each in threading.enumerate()]) == early
    assert thread.run(lambda: called.append(threading.current_thread().name), 60)
    assert thread.run(lambda: called.append("again"), 60)
    assert called == ["commsched-late"]


def test_it_waits_no_longer_than_it_may(early: bool) -> None:
    go_on = threading.Event()
    thread = LateThread("commsched-late")
    assert not thread.run(lambda: go_on.wait(60), 0.01)
    go_on.set()
    assert thread.run(lambda: None, 60)


def test_one_that_was_started_early_needs_no_thread_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_thread, "START_EARLY", True)
    thread = LateThread("commsched-late")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    called: list[bool] = []
    assert thread.run(lambda: called.append(True), 60)
    assert called == [True]


def test_one_that_could_not_be_started_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_thread, "START_EARLY", False)
    thread = LateThread("commsched-late")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    called: list[bool] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                thread.run(lambda: called.append(False), 60)
    assert thread.run(lambda: called.append(True), 60)
    assert called == [True]


def test_one_that_is_forgotten_ends_without_a_call(early: bool) -> None:
    thread = LateThread("commsched-late")
    thread.forget()
    if early:
        thread._thread.join(60)
    assert not thread._thread.is_alive()
