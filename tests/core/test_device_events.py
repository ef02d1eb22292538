"""Events of a device become calls, in order, in one thread."""

import threading

import pytest

from commsched.core.device_events import EventWatcher


class Manual(threading.Event):
    """An event that the test lets happen."""

    def synchronize(self) -> None:
        assert self.wait(60)


class Broken:
    def synchronize(self) -> None:
        raise RuntimeError("the device is lost")


def never(error: Exception) -> None:
    raise AssertionError(error)


def settle(watcher: EventWatcher) -> None:
    settled = threading.Event()
    watcher.when_settled(settled.set)
    assert settled.wait(60)


@pytest.fixture
def watcher():
    watcher = EventWatcher("commsched-test-events")
    yield watcher
    assert watcher.close()


def test_calls_come_after_their_event_and_in_order(watcher: EventWatcher) -> None:
    called: list[int] = []
    first, second = Manual(), Manual()
    watcher.call_after(first, lambda: called.append(1), never)
    watcher.call_after(second, lambda: called.append(2), never)
    second.set()
    assert called == []
    first.set()
    settle(watcher)
    assert called == [1, 2]


def test_a_failed_event_is_told_and_those_after_it_go_on(watcher: EventWatcher) -> None:
    told: list[str] = []
    watcher.call_after(Broken(), lambda: told.append("called"), lambda error: told.append(str(error)))
    happened = Manual()
    happened.set()
    watcher.call_after(happened, lambda: told.append("next"), never)
    settle(watcher)
    assert told == ["the device is lost", "next"]


def test_what_a_call_raises_is_told(watcher: EventWatcher) -> None:
    told: list[str] = []
    happened = Manual()
    happened.set()
    watcher.call_after(happened, lambda: [][0], lambda error: told.append(type(error).__name__))
    settle(watcher)
    assert told == ["IndexError"]


def test_close_calls_what_was_given_and_ends_the_thread() -> None:
    watcher, event, called = EventWatcher("commsched-test-events"), Manual(), threading.Event()
    watcher.call_after(event, called.set, never)
    assert not watcher.close(0.01)  # the event has not happened
    event.set()
    assert watcher.close()
    assert called.is_set()
    assert watcher.close()


def test_after_close_nothing_is_waited_for_or_called() -> None:
    watcher, called = EventWatcher("commsched-test-events"), threading.Event()
    event = Manual()
    watcher.call_after(event, lambda: None, never)
    assert not watcher.close(0.01)
    settled = threading.Event()
    watcher.when_settled(settled.set)  # at once, though the event has not happened
    assert settled.is_set()
    watcher.call_after(Manual(), called.set, never)
    event.set()
    assert watcher.close()
    assert not called.is_set()


def test_a_call_about_a_failure_that_raises_is_logged_and_those_after_it_go_on(
    watcher: EventWatcher, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(error: Exception) -> None:
        raise ValueError("a mistake")

    watcher.call_after(Broken(), lambda: None, raises)
    settle(watcher)
    assert caplog.records[0].getMessage() == "a call after an event of a device failed"
    assert "ValueError: a mistake" in caplog.text
