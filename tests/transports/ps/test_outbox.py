"""The order in which messages leave on one stream."""

import queue
import threading

import pytest

from commsched.transports.ps.frame import Frame, Kind, encode
from commsched.transports.ps.outbox import Outbox

ACK = Frame(Kind.ACK, step=1)


def outbox_with(*orders: int) -> Outbox:
    outbox = Outbox()
    for order in orders:
        put(outbox, order)
    return outbox


def put(outbox: Outbox, order: int) -> None:
    outbox.put(order, 10, lambda: b"%d" % order)


def test_gradients_leave_in_the_order_given():
    outbox = outbox_with(3, 1, 2)
    assert [next(outbox) for _ in range(3)] == [b"1", b"2", b"3"]


def test_those_of_equal_order_leave_as_they_came():
    outbox = Outbox()
    for number in (3, 1, 2):
        outbox.put(0, 10, lambda number=number: b"%d" % number)
    assert [next(outbox) for _ in range(3)] == [b"3", b"1", b"2"]


def test_each_is_chosen_only_when_it_is_asked_for():
    outbox = outbox_with(3, 2)
    assert next(outbox) == b"2"
    put(outbox, 0)
    assert next(outbox) == b"0"
    assert next(outbox) == b"3"


def test_control_messages_go_first_and_in_order():
    outbox = outbox_with(0)
    frames = [Frame(Kind.ACK, step=step) for step in range(3)]
    for frame in frames:
        outbox.put_control(frame)
    assert [next(outbox) for _ in range(4)] == [*map(encode, frames), b"0"]


def test_the_bytes_are_made_when_they_leave():
    made: list[str] = []
    outbox = Outbox()
    for name in ("first", "second"):
        outbox.put(0, 10, lambda name=name: made.append(name) or name.encode())
    assert made == []
    next(outbox)
    assert made == ["first"]


def test_finish_sends_what_is_small_and_drops_gradients():
    outbox = outbox_with(0)
    outbox.put_control(ACK)
    outbox.finish()
    outbox.put_control(Frame(Kind.GOODBYE))
    put(outbox, 1)
    assert list(outbox) == [encode(ACK)]


def test_abort_drops_everything():
    outbox = outbox_with(0)
    outbox.put_control(ACK)
    outbox.abort()
    assert list(outbox) == []


@pytest.mark.parametrize("end", [Outbox.finish, Outbox.abort])
def test_the_end_wakes_who_waits(end):
    outbox, got = Outbox(), queue.SimpleQueue()

    def take() -> None:
        for message in outbox:
            got.put(message)
        got.put(b"end")

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    put(outbox, 7)
    assert got.get(timeout=20) == b"7"
    end(outbox)
    assert got.get(timeout=20) == b"end"
    thread.join(20)


class FakePacer:
    """A pacer under the test's control."""

    def __init__(self) -> None:
        self.waiting: list = []
        self.charged = 0

    def submit(self, priority, nbytes, release) -> None:
        self.waiting.append((priority, nbytes, release))

    def charge(self, nbytes) -> None:
        self.charged += nbytes


def test_paced_gradients_enter_when_released_and_small_messages_are_charged():
    pacer = FakePacer()
    outbox = Outbox(pacer)
    put(outbox, 4)
    outbox.put_control(ACK)
    assert pacer.charged == len(encode(ACK))
    assert next(outbox) == encode(ACK)
    assert "0 ready" in repr(outbox)
    [(priority, nbytes, release)] = pacer.waiting
    assert (priority, nbytes) == (4, 10)
    release()
    assert next(outbox) == b"4"


def test_repr_counts_what_waits():
    outbox = outbox_with(1, 2)
    outbox.put_control(ACK)
    assert repr(outbox).startswith("<Outbox 1 control, <Scheduler 2 ready")
    outbox.finish()
    assert repr(outbox).endswith(", finished>")
