"""The order in which messages leave on one stream."""

import queue
import threading
from time import monotonic, sleep

import pytest

from commsched.transports.backends.ps import right_of_way
from commsched.transports.backends.ps.frame import HEADER_BYTES, Frame, FrameKind
from commsched.transports.backends.ps.right_of_way import RightOfWay
from commsched.transports.backends.ps.send_queue import SendQueue

ACK = Frame(FrameKind.ACK, step=1)


def outbox_with(*orders: int) -> SendQueue:
    outbox = SendQueue()
    for order in orders:
        put(outbox, order)
    return outbox


def put(
    outbox: SendQueue, order: int, partition: int = 0, kind: FrameKind = FrameKind.PUSH, group: int = 0, step: int = 0
) -> None:
    outbox.put(Frame(kind, group, step, partition, "uint8", stop=10, payload=bytes(10), order=order))


def orders(outbox: SendQueue, count: int) -> list[int]:
    return [next(outbox).frame.order for _ in range(count)]


def test_gradients_leave_in_the_order_given():
    assert orders(outbox_with(3, 1, 2), 3) == [1, 2, 3]


def test_those_of_equal_order_leave_as_they_came():
    outbox = SendQueue()
    for number in (3, 1, 2):
        put(outbox, 0, partition=number)
    assert [next(outbox).frame.partition for _ in range(3)] == [3, 1, 2]


def test_each_is_chosen_only_when_it_is_asked_for():
    outbox = outbox_with(3, 2)
    assert orders(outbox, 1) == [2]
    put(outbox, 0)
    assert orders(outbox, 2) == [0, 3]


def test_control_messages_go_first_and_in_order():
    outbox = outbox_with(7)
    frames = [Frame(FrameKind.ACK, step=step) for step in range(3)]
    for frame in frames:
        outbox.put_control(frame)
    assert [next(outbox).frame for _ in range(3)] == frames
    assert orders(outbox, 1) == [7]


def test_what_to_call_when_it_has_left_comes_with_a_message():
    outbox = SendQueue()
    outbox.put(Frame(FrameKind.PUSH), print)
    outbox.put_control(ACK)
    assert [next(outbox).sent for _ in range(2)] == [None, print]


def test_finish_sends_what_is_small_and_drops_gradients():
    outbox = outbox_with(0)
    outbox.put_control(ACK)
    outbox.finish()
    outbox.put_control(Frame(FrameKind.GOODBYE))
    put(outbox, 1)
    assert [parcel.frame for parcel in outbox] == [ACK]
    assert list(outbox) == []


def test_abort_drops_everything():
    outbox = outbox_with(0)
    outbox.put_control(ACK)
    outbox.abort()
    assert list(outbox) == []


@pytest.mark.parametrize("end", [SendQueue.finish, SendQueue.abort])
def test_the_end_wakes_who_waits(end):
    outbox, got = SendQueue(), queue.SimpleQueue()

    def take() -> None:
        for parcel in outbox:
            got.put(parcel.frame.order)
        got.put("end")

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    put(outbox, 7)
    assert got.get(timeout=60) == 7
    end(outbox)
    assert got.get(timeout=60) == "end"
    thread.join(60)


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
    outbox = SendQueue(pacer)
    put(outbox, 4)
    outbox.put_control(ACK)
    assert pacer.charged == HEADER_BYTES
    assert next(outbox).frame == ACK
    assert "0 ready" in repr(outbox)
    [(priority, nbytes, release)] = pacer.waiting
    assert (priority, nbytes) == (4, HEADER_BYTES + 10)
    release()
    assert orders(outbox, 1) == [4]


def test_a_pacer_lets_pushes_pass_before_replies():
    pacer = FakePacer()
    outbox = SendQueue(pacer)
    put(outbox, 0, kind=FrameKind.RESULT)
    put(outbox, 2**32 - 1)
    put(outbox, 0, step=1)
    reply, push, later = (priority for priority, _, _ in pacer.waiting)
    assert push < reply < later  # replies of an earlier step do not wait for a rank that is ahead


def taken_in_a_thread(outbox: SendQueue) -> tuple[threading.Thread, queue.SimpleQueue]:
    """What ``outbox`` gives until it ends; None is its end."""
    taken: queue.SimpleQueue = queue.SimpleQueue()

    def take() -> None:
        for parcel in outbox:
            taken.put(parcel.frame)
        taken.put(None)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread, taken


def test_replies_that_give_way_leave_when_it_is_free_and_small_messages_at_any_time():
    way, outbox = RightOfWay(), SendQueue()
    outbox.yield_to(way)
    way.push_begins((0, 0))
    way.push_begins((0, 0))
    thread, taken = taken_in_a_thread(outbox)
    for order in (3, 1, 2):
        put(outbox, order, kind=FrameKind.RESULT)
    outbox.put_control(ACK)
    assert taken.get(timeout=60) == ACK
    way.push_left()
    outbox.put_control(ACK)
    assert taken.get(timeout=60) == ACK  # and still nothing else
    way.push_left()
    assert [taken.get(timeout=60).order for _ in range(3)] == [1, 2, 3]
    way.push_begins((0, 0))
    put(outbox, 4, kind=FrameKind.RESULT)
    outbox.put_control(ACK)
    assert taken.get(timeout=60) == ACK
    way.push_left()
    assert taken.get(timeout=60).order == 4
    outbox.finish()
    assert taken.get(timeout=60) is None
    thread.join(60)
    outbox.stop_yielding()
    assert repr(way) == "<RightOfWay 0 pushes and replies to 0 receivers to leave, 0 streams give way>"


def test_replies_of_an_earlier_step_do_not_give_way():
    way, outbox = RightOfWay(), SendQueue()
    outbox.yield_to(way)
    way.push_begins((0, 1))
    way.push_begins((1, 0))
    thread, taken = taken_in_a_thread(outbox)
    put(outbox, 0, kind=FrameKind.RESULT, group=1, step=0)  # of another group, whose steps are its own
    outbox.put_control(ACK)
    assert taken.get(timeout=60) == ACK  # and nothing else
    way.push_begins((1, 1))
    assert taken.get(timeout=60).group == 1
    put(outbox, 0, kind=FrameKind.RESULT, step=1)
    outbox.put_control(ACK)
    assert taken.get(timeout=60) == ACK
    way.push_begins((0, 2))
    assert taken.get(timeout=60).step == 1
    way.push_begins((0, 1))  # a push of an earlier step may come later: another thread made it
    put(outbox, 0, kind=FrameKind.RESULT, step=1)
    assert taken.get(timeout=60).step == 1
    outbox.finish()
    thread.join(60)


def test_pushes_give_way_to_replies_of_earlier_steps_only():
    way, replies, pushes = RightOfWay(), SendQueue(), SendQueue()
    replies.yield_to(way)
    pushes.yield_to(way)
    thread, taken = taken_in_a_thread(pushes)
    put(replies, 1, kind=FrameKind.RESULT, step=3)
    put(replies, 2, kind=FrameKind.RESULT, step=3)
    put(pushes, 7, step=3)
    assert taken.get(timeout=60).step == 3
    put(pushes, 7, group=1, step=4)  # of another group, whose steps are its own
    assert taken.get(timeout=60).group == 1
    put(pushes, 7, step=4)
    put(pushes, 8, step=3)  # behind the other: pushes keep their order
    pushes.put_control(ACK)
    assert taken.get(timeout=60) == ACK
    assert orders(replies, 2) == [1, 2]
    pushes.put_control(ACK)
    assert taken.get(timeout=60) == ACK  # the last reply is leaving
    assert replies.next_now() is None
    assert [taken.get(timeout=60).step for _ in range(2)] == [4, 3]
    pushes.finish()
    thread.join(60)
    assert repr(way) == "<RightOfWay 0 pushes and replies to 0 receivers to leave, 0 streams give way>"


@pytest.mark.parametrize("ended", ["before it leaves", "while it leaves"])
def test_nobody_waits_for_replies_to_a_peer_that_is_gone(ended):
    way, replies, pushes = RightOfWay(), SendQueue(), SendQueue()
    replies.yield_to(way)
    pushes.yield_to(way)
    thread, taken = taken_in_a_thread(pushes)
    put(replies, 1, kind=FrameKind.RESULT)
    if ended == "while it leaves":
        next(replies)
    put(pushes, 7, step=1)
    pushes.put_control(ACK)
    assert taken.get(timeout=60) == ACK
    replies.finish()
    replies.stop_yielding()
    assert taken.get(timeout=60).step == 1
    assert replies.next_now() is None  # it does not count a second time
    pushes.finish()
    thread.join(60)
    assert repr(way) == "<RightOfWay 0 pushes and replies to 0 receivers to leave, 0 streams give way>"


def test_a_row_of_norms_counts_as_its_groups_message():
    way, replies, pushes = RightOfWay(), SendQueue(), SendQueue()
    replies.yield_to(way)
    pushes.yield_to(way)
    row = Frame(FrameKind.RESULT, 1, 4, 0, "uint8", stop=10, payload=bytes(10))
    replies.put(row, about=0)
    put(pushes, 7, step=5)
    way.push_begins((0, 5))  # the rank has not asked for its row of that step yet
    assert pushes.next_now() is None
    assert next(replies).frame is row
    assert replies.next_now() is None
    assert orders(pushes, 1) == [7]


def test_a_push_of_one_stream_and_a_reply_do_not_keep_each_other_back():
    way, outbox = RightOfWay(), SendQueue()
    outbox.yield_to(way)
    way.push_begins((0, 1))
    put(outbox, 0, kind=FrameKind.RESULT, step=1)
    row = Frame(FrameKind.PUSH, 1, 1, 0, "uint8", stop=10, payload=bytes(10), order=9)
    outbox.put(row, only_here=True, about=0)
    assert next(outbox).frame is row
    way.push_left()
    assert orders(outbox, 1) == [0]


def test_nothing_is_kept_of_replies_that_have_left():
    way, replies = RightOfWay(), SendQueue()
    replies.yield_to(way)
    for step in range(100):
        way.push_begins((0, step))
        way.push_left()
        put(replies, 1, kind=FrameKind.RESULT, step=step)
        put(replies, 2, kind=FrameKind.RESULT, step=step)
        assert orders(replies, 2) == [1, 2]
        assert replies.next_now() is None
    assert way._replies == {}
    assert replies._gradients.waiting == {}


def test_replies_of_a_group_that_was_released_give_way_to_no_push():
    way, replies = RightOfWay(), SendQueue()
    replies.yield_to(way)
    thread, taken = taken_in_a_thread(replies)
    way.push_begins((0, 0))
    way.push_begins((1, 0))
    put(replies, 1, kind=FrameKind.RESULT)
    replies.put_control(ACK)
    assert taken.get(timeout=60) == ACK
    way.release(0)
    assert taken.get(timeout=60).order == 1
    replies.finish()
    thread.join(60)


#: A lead of two messages with so many bytes is allowed, and is larger than the least that is allowed.
LARGE_BYTES = 100_000


def to_receivers(*counts: int, nbytes: int = LARGE_BYTES) -> tuple[RightOfWay, list[SendQueue]]:
    """The way and the receivers, for each of which so many replies wait."""
    way, receivers = RightOfWay(), [SendQueue() for _ in counts]
    for outbox, count in zip(receivers, counts):
        outbox.yield_to(way)
        put_replies(outbox, count, nbytes)
    return way, receivers


def put_replies(outbox: SendQueue, count: int, nbytes: int = LARGE_BYTES, **more: int) -> None:
    for order in range(count):
        payload = memoryview(bytearray(nbytes))
        frame = {"group": 0, "step": 0, **more}
        outbox.put(Frame(FrameKind.RESULT, partition=0, dtype="uint8", stop=nbytes, payload=payload, order=order, **frame))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody stops waiting for a receiver that is behind."""
    monkeypatch.setattr(right_of_way, "_PATIENCE_SECONDS", 1e6)


@pytest.mark.usefixtures("patient")
def test_no_receiver_is_far_ahead_of_the_last():
    way, (a, b, c) = to_receivers(5, 5, 5)
    assert orders(a, 3) == [0, 1, 2]
    assert a.next_now() is None  # three have left
    assert orders(b, 3) == [0, 1, 2]
    assert a.next_now() is None  # all of ``c`` wait
    assert orders(c, 2) == [0, 1]  # the first has left
    assert orders(a, 1) == [3]
    assert a.next_now() is None
    assert orders(c, 3) == [2, 3, 4]
    assert c.next_now() is None
    assert orders(b, 2) == [3, 4]
    assert orders(a, 1) == [4]
    assert (a.next_now(), b.next_now()) == (None, None)
    assert repr(way).startswith("<RightOfWay 0 pushes and replies to 0 receivers to leave")


@pytest.mark.usefixtures("patient")
def test_small_replies_leave_together():
    _, (a, b) = to_receivers(1000, 1000, nbytes=1000)
    assert orders(a, 120) == list(range(120))
    (thread, taken), count = taken_in_a_thread(a), 0
    a.put_control(ACK)
    while taken.get(timeout=60) != ACK:  # it leaves first, and then what may still leave
        count += 1
    a.put_control(ACK)
    while taken.get(timeout=60) != ACK:
        count += 1
    assert 120 + count <= 128
    assert orders(b, 40) == list(range(40))
    a.put_control(ACK)
    assert taken.get(timeout=60) == ACK  # and nothing else
    assert orders(b, 40) == list(range(40, 80))
    assert [taken.get(timeout=60).order for _ in range(30)] == list(range(120 + count, 150 + count))
    a.finish()
    thread.join(60)


@pytest.mark.usefixtures("patient")
def test_all_who_are_ahead_go_on_when_the_last_comes_nearer():
    _, (a, b, c) = to_receivers(5, 5, 5)
    others = [taken_in_a_thread(each) for each in (a, b)]
    for outbox, (_, taken) in zip((a, b), others):
        assert [taken.get(timeout=60).order for _ in range(3)] == [0, 1, 2]
        outbox.put_control(ACK)
        assert taken.get(timeout=60) == ACK  # and nothing else
    assert orders(c, 5) == [0, 1, 2, 3, 4]
    for outbox, (thread, taken) in zip((a, b), others):
        assert [taken.get(timeout=60).order for _ in range(2)] == [3, 4]
        outbox.finish()
        thread.join(60)


@pytest.mark.usefixtures("patient")
def test_the_lead_counts_from_who_has_most_to_come_whoever_got_replies_last():
    way, (a, b) = to_receivers(0, 5)
    put_replies(a, 1)
    assert a.next_now() is None
    assert orders(b, 3) == [0, 1, 2]
    assert orders(a, 1) == [0]
    assert repr(way).startswith("<RightOfWay 0 pushes and replies to 2 receivers to leave")


@pytest.mark.usefixtures("patient")
def test_nobody_waits_for_a_receiver_that_is_gone():
    """It goes while a reply to it leaves, and has replies of two steps."""
    way, (a, b) = to_receivers(5, 5)
    put_replies(b, 5, step=1)
    thread, taken = taken_in_a_thread(a)
    assert [taken.get(timeout=60).order for _ in range(3)] == [0, 1, 2]
    a.put_control(ACK)
    assert taken.get(timeout=60) == ACK
    next(b)
    b.finish()
    b.stop_yielding()
    assert b.next_now() is None  # it does not count a second time
    assert [taken.get(timeout=60).order for _ in range(2)] == [3, 4]
    a.finish()
    thread.join(60)
    a.stop_yielding()
    assert repr(way) == "<RightOfWay 0 pushes and replies to 0 receivers to leave, 0 streams give way>"


def test_a_receiver_that_is_gone_leaves_the_replies_to_others_alone():
    way, (a, b) = to_receivers(2, 2)
    put_replies(a, 1, step=1)  # ``b`` has none of that step
    b.finish()
    gone = b._gradients
    b.stop_yielding()
    assert repr(way) == "<RightOfWay 0 pushes and replies to 2 receivers to leave, 0 streams give way>"
    way.reply_left(gone, (0, 0), LARGE_BYTES)  # another thread was about to say it
    assert sorted(orders(a, 3)) == [0, 0, 1]
    assert a.next_now() is None
    assert repr(way) == "<RightOfWay 0 pushes and replies to 0 receivers to leave, 0 streams give way>"


def test_nobody_waits_long_for_a_receiver_that_takes_nothing(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(right_of_way, "monotonic", lambda: now[0])
    way, (a, b) = to_receivers(9, 9)
    assert orders(a, 3) == [0, 1, 2]
    now[0] += 0.15
    assert a.next_now() is None
    assert way.seconds_to_wait(a._gradients, [], [(0, 0)]) == pytest.approx(0.05)
    assert orders(b, 2) == [0, 1]  # the first has left
    assert orders(a, 1) == [3]
    now[0] += 0.15
    assert a.next_now() is None
    now[0] += 0.1
    assert orders(a, 4) == [4, 5, 6, 7]


def test_who_waits_for_a_receiver_that_takes_nothing_asks_again_by_itself(monkeypatch):
    monkeypatch.setattr(right_of_way, "_PATIENCE_SECONDS", 0.01)
    _, (a, _) = to_receivers(5, 5)
    thread, taken = taken_in_a_thread(a)
    assert [taken.get(timeout=60).order for _ in range(5)] == [0, 1, 2, 3, 4]
    a.finish()
    thread.join(60)


@pytest.mark.parametrize("freed", ["by the last push", "by a push of the next step", "by the end of the group"])
def test_nobody_is_impatient_while_replies_give_way_to_pushes(freed, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(right_of_way, "monotonic", lambda: now[0])
    way, (a, b) = to_receivers(9, 9)
    way.push_begins((0, 0))
    assert (a.next_now(), b.next_now()) == (None, None)
    now[0] += 10.0
    if freed == "by the last push":
        way.push_left()
    elif freed == "by a push of the next step":
        way.push_begins((0, 1))
    else:
        way.release(0)
        way.push_left()
    assert orders(a, 3) == [0, 1, 2]
    assert a.next_now() is None


@pytest.mark.usefixtures("patient")
def test_a_small_urgent_reply_may_be_as_far_ahead_as_large_ones():
    _, (a, b) = to_receivers(8, 8, nbytes=10**6)
    assert orders(a, 2) == [0, 1]
    assert orders(b, 1) == [0]
    for outbox in (a, b):
        outbox.put(Frame(FrameKind.RESULT, 0, 0, 0, "uint8", stop=1000, payload=bytes(1000), order=0))
    assert a.next_now().frame.stop == 1000


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("first", ["the push leaves", "the last comes nearer"])
def test_who_is_ahead_gives_way_to_pushes_too(first):
    way, (a, b) = to_receivers(5, 5)
    thread, taken = taken_in_a_thread(a)
    assert [taken.get(timeout=60).order for _ in range(3)] == [0, 1, 2]
    a.put_control(ACK)
    assert taken.get(timeout=60) == ACK
    if first == "the last comes nearer":
        b_takes = orders(b, 4)
        assert taken.get(timeout=60).order == 3
        way.push_begins((0, 0))
        assert b_takes == [0, 1, 2, 3]
        put_replies(a, 1)
        a.put_control(ACK)
        while (got := taken.get(timeout=60)) != ACK:
            assert got.order == 4  # it was faster than the push
        way.push_left()
        b.next_now()
    else:
        way.push_begins((0, 0))
        a.put_control(ACK)
        assert taken.get(timeout=60) == ACK
        way.push_left()
        a.put_control(ACK)
        assert taken.get(timeout=60) == ACK  # it is still ahead
        assert orders(b, 5) == [0, 1, 2, 3, 4]
        assert taken.get(timeout=60).order == 3
    a.finish()
    thread.join(60)


@pytest.mark.usefixtures("patient")
def test_receivers_of_other_steps_and_groups_are_no_measure():
    way, (a, b) = to_receivers(5, 5)
    for other in ({"step": 1}, {"group": 1}):
        put_replies(a, 5, **other)
    assert orders(b, 1) == [0]
    taken = [next(a).frame for _ in range(13)]
    assert [frame.order for frame in taken if (frame.group, frame.step) == (0, 0)] == [0, 1, 2]
    assert a.next_now() is None
    assert repr(way).startswith("<RightOfWay 0 pushes and replies to 2 receivers to leave")


@pytest.mark.usefixtures("patient")
def test_several_flows_to_a_receiver_count_together():
    _, (a, b) = to_receivers(8, 8)
    second = SendQueue(beside=a)
    assert orders(a, 2) == [0, 1]
    assert orders(second, 2) == [2, 3]  # two have left, and two are leaving
    assert (a.next_now(), second.next_now()) == (None, None)
    assert orders(b, 6) == list(range(6))
    assert sorted([*orders(a, 2), *orders(second, 2)]) == [4, 5, 6, 7]


@pytest.mark.parametrize("group", [0, 1])
def test_a_reply_that_gives_way_does_not_keep_back_others(group):
    """A push waits for the second one. If the first one kept it back, all would wait for ever."""
    way, replies = RightOfWay(), SendQueue()
    replies.yield_to(way)
    for each in range(2):
        way.push_begins((each, 5))
    put(replies, 1, kind=FrameKind.RESULT, group=group, step=5)
    put(replies, 2, kind=FrameKind.RESULT, step=4)
    assert orders(replies, 1) == [2]
    assert replies.next_now() is None
    way.push_left()
    assert replies.next_now() is None
    way.push_left()
    assert orders(replies, 1) == [1]


def test_an_outbox_that_gives_way_still_ends():
    way, outbox = RightOfWay(), SendQueue()
    outbox.yield_to(way)
    way.push_begins((0, 0))
    _, taken = taken_in_a_thread(outbox)
    put(outbox, 1, kind=FrameKind.RESULT)
    outbox.finish()
    assert taken.get(timeout=60) is None


def test_who_keeps_the_way_again_waits_for_nobody():
    way, outbox = RightOfWay(), SendQueue()
    outbox.yield_to(way)
    way.push_begins((0, 0))
    put(outbox, 1, kind=FrameKind.RESULT)
    outbox.stop_yielding()
    assert orders(outbox, 1) == [1]


def test_nothing_is_lost_when_the_way_changes_all_the_time():
    way, outbox = RightOfWay(), SendQueue()
    outbox.yield_to(way)
    _, taken = taken_in_a_thread(outbox)
    for number in range(2000):
        way.push_begins((0, 0))
        put(outbox, number, kind=FrameKind.RESULT)
        way.push_left()
    assert sorted(taken.get(timeout=60).order for _ in range(2000)) == list(range(2000))


def test_repr_counts_what_waits():
    outbox = outbox_with(1, 2)
    outbox.put_control(ACK)
    assert repr(outbox).startswith("<SendQueue 1 control, 2 ready")
    outbox.finish()
    assert repr(outbox).endswith(", finished>")


def test_an_error_that_comes_while_a_reply_is_kept_back_is_sent():
    outbox, way = SendQueue(), RightOfWay()
    outbox.yield_to(way)
    way.push_begins((0, 0))
    put(outbox, 1, kind=FrameKind.RESULT)

    class Reasons(queue.SimpleQueue):
        def get(self, timeout=None):
            if self.empty():  # the sender has found nothing, and another thread comes just before it waits
                outbox.put_control(ACK)
                outbox.finish()
            return super().get(timeout=timeout)

    outbox._reasons = Reasons()
    assert [parcel.frame for parcel in outbox] == [ACK]


# --- several streams to one peer ---


def streams(count: int) -> list[SendQueue]:
    first = SendQueue()
    return [first, *(SendQueue(beside=first) for _ in range(count - 1))]


def test_each_stream_takes_the_most_urgent_gradient_when_it_is_free():
    a, b = streams(2)
    for order in (3, 1, 2, 0):
        put(a, order)
    assert [next(stream).frame.order for stream in (a, b, b, a)] == [0, 1, 2, 3]
    assert (a.next_now(), b.next_now()) == (None, None)


def test_control_messages_are_of_one_stream():
    a, b = streams(2)
    put(a, 1)
    a.put_control(ACK)
    assert next(b).frame.order == 1
    assert next(a).frame == ACK


def test_a_gradient_wakes_one_stream_that_waits_and_the_next_one_another():
    a, b = streams(2)
    threads, taken = zip(*map(taken_in_a_thread, (a, b)))
    until(lambda: len(a._gradients.idle) == 2)
    put(a, 1)
    until(lambda: sum(each.qsize() for each in taken) == 1)
    for number in range(1000):
        put(b, number)
    a.put_control(ACK)
    b.put_control(ACK)
    until(lambda: sum(each.qsize() for each in taken) == 1003)
    a.finish()
    b.finish()
    for thread in threads:
        thread.join(60)
    frames = [[each.get() for _ in range(each.qsize())][:-1] for each in taken]
    assert [each.count(ACK) for each in frames] == [1, 1]
    assert sorted(frame.order for each in frames for frame in each if frame != ACK) == sorted([1, *range(1000)])


def until(is_so) -> None:
    deadline = monotonic() + 60
    while not is_so():
        assert monotonic() < deadline
        sleep(0.001)


def test_a_gradient_for_one_stream_waits_there_for_the_more_urgent_ones_of_all():
    a, b = streams(2)
    put(a, 1)
    for each in (a, b):
        each.put(Frame(FrameKind.PUSH, order=5), only_here=True)
    put(b, 9)
    assert [next(b).frame.order for _ in range(3)] == [1, 5, 9]
    assert next(a).frame.order == 5
    assert a.next_now() is None


def test_a_stream_may_begin_to_share_while_its_sender_waits():
    first, later = SendQueue(), SendQueue()
    thread, taken = taken_in_a_thread(later)
    until(lambda: later._idle)
    later.share_with(first)
    put(first, 7)
    assert taken.get(timeout=60).order == 7
    put(later, 8)
    assert taken.get(timeout=60).order == 8
    later.put_control(ACK)
    later.finish()
    assert taken.get(timeout=60) == ACK
    thread.join(60)


def test_all_streams_give_way_and_none_is_forgotten_when_it_is_free():
    way, (a, b) = RightOfWay(), streams(2)
    a.yield_to(way)
    way.push_begins((0, 0))
    threads, taken = zip(*map(taken_in_a_thread, (a, b)))
    put(a, 1, kind=FrameKind.RESULT)
    put(a, 2, kind=FrameKind.RESULT)
    until(lambda: len(a._gradients.idle) == 2)
    way.push_left()
    until(lambda: sum(each.qsize() for each in taken) == 2)
    for each in (a, b):
        each.finish()
    for thread in threads:
        thread.join(60)


def test_the_end_of_one_stream_drops_the_gradients_of_all_and_nothing_else():
    a, b = streams(2)
    put(a, 1)
    b.put(Frame(FrameKind.PUSH, order=5), only_here=True)
    b.put_control(ACK)
    a.abort()
    put(b, 2)
    assert list(a) == []
    assert next(b).frame == ACK
    b.finish()
    assert list(b) == []
