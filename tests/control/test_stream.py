from __future__ import annotations

import threading

import pytest

from commsched.control.messages import Heartbeat, decode
from commsched.control.stream import BEAT, MessageQueue


def test_what_was_put_comes_in_order_and_then_it_ends() -> None:
    outbox = MessageQueue(60, BEAT)
    outbox.put(b"1")
    outbox.put(b"2")
    outbox.close()
    outbox.put(b"too late")
    outbox.close()
    assert list(outbox) == [b"1", b"2"]


def test_a_heartbeat_when_nothing_was_put() -> None:
    assert decode(next(MessageQueue(0.001, BEAT))) == Heartbeat()


def test_nothing_more_after_discard() -> None:
    outbox = MessageQueue(60, BEAT)
    outbox.put(b"1")
    outbox.close(discard=True)
    assert list(outbox) == []


def test_close_ends_a_wait() -> None:
    outbox = MessageQueue(60, BEAT, thread_name="test-outbox")
    thread = threading.Thread(target=lambda: list(outbox), daemon=True)
    thread.start()
    outbox.close()
    thread.join(60)
    assert not thread.is_alive()
    assert outbox.thread is thread
    assert thread.name == "test-outbox"


def test_a_put_ends_a_wait() -> None:
    outbox = MessageQueue(60, BEAT)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(next(outbox)), daemon=True)
    thread.start()
    outbox.put(b"1")
    thread.join(60)
    assert got == [b"1"]
    outbox.close()
    with pytest.raises(StopIteration):
        next(outbox)
