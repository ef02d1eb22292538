"""The bandwidth cap, in told time; and that its thread delivers, in real time."""

import queue
import threading
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.transports.backends.ps.send_queue import EmulatedLink, RateLimiter


class Clocked:
    """A link of 100 bytes per second whose messages are named."""

    def __init__(self) -> None:
        self.link = EmulatedLink(100.0)
        self.sent: list[str] = []

    def submit(self, name: str, nbytes: int, now: float, priority: int = 0) -> None:
        self.link.submit(priority, nbytes, lambda: self.sent.append(name), now)

    def advance(self, now: float) -> float | None:
        released, next_at = self.link.advance(now)
        for release in released:
            release()
        return next_at


def test_a_message_leaves_when_its_last_byte_would_have():
    clocked = Clocked()
    clocked.submit("a", 50, now=10.0)
    assert clocked.advance(10.0) == pytest.approx(10.5)
    assert clocked.advance(10.49) == pytest.approx(10.5)
    assert clocked.sent == []
    assert clocked.advance(10.5) is None
    assert clocked.sent == ["a"]


def test_the_link_carries_one_message_at_a_time():
    clocked = Clocked()
    clocked.submit("a", 100, now=0.0)
    clocked.submit("b", 100, now=0.0)
    assert clocked.advance(1.5) == pytest.approx(2.0)
    assert clocked.sent == ["a"]
    assert clocked.advance(2.0) is None
    assert clocked.sent == ["a", "b"]


def test_what_is_chosen_next_is_the_most_urgent_when_the_link_is_free():
    clocked = Clocked()
    clocked.submit("late layer", 100, now=0.0, priority=9)
    clocked.advance(0.0)
    clocked.submit("middle layer", 100, now=0.1, priority=5)
    clocked.submit("front layer", 100, now=0.2, priority=0)
    clocked.advance(3.0)
    assert clocked.sent == ["late layer", "front layer", "middle layer"]


def test_looking_late_does_not_cost_the_link_time():
    clocked = Clocked()
    for name in "abcd":
        clocked.submit(name, 100, now=0.0)
    assert clocked.advance(0.0) == pytest.approx(1.0)
    assert clocked.advance(1.7) == pytest.approx(2.0)
    assert clocked.advance(3.9) == pytest.approx(4.0)
    assert clocked.sent == ["a", "b", "c"]


def test_an_idle_link_saves_nothing_up():
    clocked = Clocked()
    clocked.submit("a", 100, now=0.0)
    clocked.advance(1.0)
    clocked.submit("b", 100, now=50.0)
    assert clocked.advance(50.0) == pytest.approx(51.0)


def test_what_was_queued_while_nobody_looked_begins_when_it_was_queued():
    clocked = Clocked()
    clocked.submit("a", 100, now=0.0)
    clocked.submit("b", 100, now=3.0)
    assert clocked.advance(3.5) == pytest.approx(4.0)


def test_small_messages_are_charged():
    clocked = Clocked()
    clocked.link.charge(50, now=0.0)
    clocked.submit("a", 100, now=0.0)
    assert clocked.advance(0.0) == pytest.approx(1.5)


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 2), st.floats(0, 3)), min_size=1, max_size=30))
def test_the_rate_is_never_exceeded_and_always_filled(messages):
    clocked, now, total, done_by = Clocked(), 0.0, 0, 0.0
    for nbytes, gap, lateness in messages:
        now += gap
        clocked.submit(str(nbytes), nbytes, now)
        total += nbytes
        done_by = max(done_by, now) + nbytes / 100
        now += lateness
        clocked.advance(now)
        assert sum(map(int, clocked.sent)) <= 100 * now + 1e-6
    clocked.advance(done_by + 1e-6)
    assert sum(map(int, clocked.sent)) == total


def test_the_pacer_delivers_in_its_own_thread_and_not_too_early():
    pacer = RateLimiter(1e6)
    try:
        arrived: queue.SimpleQueue[tuple[str, str, float]] = queue.SimpleQueue()
        began = monotonic()
        for name in "ab":
            pacer.submit(0, 20_000, lambda name=name: arrived.put((name, threading.current_thread().name, monotonic())))
        for number, name in enumerate("ab", start=1):
            got, thread, when = arrived.get(timeout=60)
            assert (got, thread) == (name, "commsched-pacer")
            assert when - began >= number * 0.02 - 1e-4
    finally:
        pacer.close()


def test_closing_drops_what_waits_and_ends_the_thread():
    pacer = RateLimiter(1.0)
    pacer.submit(0, 10**6, pytest.fail)
    pacer.close()
    pacer.close()
    assert "commsched-pacer" not in {thread.name for thread in threading.enumerate()}
