"""What ranks tell rank 0, and what it announces: over gRPC, with rank 0's own stream, and among threads of one process."""

from __future__ import annotations

import itertools
import queue
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from commsched.control.messages import MAX_MESSAGE_BYTES, Announce, encode
from commsched.core.errors import ClosedError, CommschedError, PeerLost, ProtocolError, TransportError, UnsupportedError
from commsched.session.local import LocalControlWorld

from .world import PATIENCE_SECONDS, Recorder, running

#: Rank 0 over a socket, rank 0 beside its server, and no network at all.
WAYS = ["grpc", "direct", "local"]


class Ranks:
    """Controls and listeners of all ranks, whichever way they are connected."""

    def __init__(self, controls: list[Any], listeners: list[Recorder]) -> None:
        self.controls, self.listeners = controls, listeners

    def leave(self) -> None:
        for control in self.controls:
            control.leave()
        for control in self.controls:
            control.wait_until_all_left()


@contextmanager
def ranks(way: str, world_size: int) -> Iterator[Ranks]:
    if way == "local":
        controls, listeners = LocalControlWorld(world_size).ends, [Recorder() for _ in range(world_size)]
        for control, listener in zip(controls, listeners):
            control.listen(listener)
        try:
            yield Ranks(controls, listeners)
        finally:
            for control in controls:
                control.close()
    else:
        with running(world_size, direct=way == "direct") as job:
            yield Ranks(job.clients, job.listeners)


@pytest.mark.parametrize("way", WAYS)
def test_what_two_ranks_tell_and_rank_0_announces_arrives_in_order(way: str) -> None:
    count = 200
    with ranks(way, 3) as job:
        tellers = [
            threading.Thread(
                target=lambda rank=rank: [job.controls[rank].send_to_rank_0("t", {"n": n, "é": None}) for n in range(count)]
            )
            for rank in (1, 2)
        ]
        for teller in tellers:
            teller.start()
        for n in range(count):
            job.controls[0].announce("t", [n, 1.5])
        told = [job.listeners[0].next("told") for _ in range(2 * count)]
        for rank in (1, 2):
            assert [value for teller, value in told if teller == rank] == [{"n": n, "é": None} for n in range(count)]
            assert [job.listeners[rank].next("announced") for _ in range(count)] == [[n, 1.5] for n in range(count)]
        for teller in tellers:
            teller.join()
        job.leave()
        for rank, listener in enumerate(job.listeners):
            assert {listener.next("leave") for _ in range(2)} == {0, 1, 2} - {rank}
    assert all(listener.calls.empty() for listener in job.listeners)


@pytest.mark.parametrize("way", WAYS)
def test_all_that_a_rank_sent_comes_before_its_leave(way: str) -> None:
    with ranks(way, 3) as job:
        job.controls[1].send_to_rank_0("t", "last words")
        job.controls[1].leave()
        assert job.listeners[0].next("told") == (1, "last words")
        assert job.listeners[0].next("leave") == 1
        assert job.listeners[2].next("leave") == 1
        job.controls[0].announce("t", "farewell")
        job.controls[0].leave()
        assert [job.listeners[2].next("announced"), job.listeners[2].next("leave")] == ["farewell", 0]
        assert job.listeners[1].next("leave") == 0  # and nothing was announced to who has left
        job.controls[2].send_to_rank_0("t", "after rank 0 left")
        assert job.listeners[0].next("told") == (2, "after rank 0 left")


@pytest.mark.parametrize("way", WAYS)
def test_an_announcement_and_a_switch_keep_their_order(way: str) -> None:
    with ranks(way, 2) as job:
        for number in range(5):
            job.controls[0].announce("t", number)
            job.controls[0].propose({"number": number})
            for listener in job.listeners:
                kinds = ["announced", "hold", "switch"] if listener is job.listeners[1] else ["hold", "switch"]
                assert [listener.next(kind) for kind in kinds][-1] == ({"number": number}, {})


@pytest.mark.parametrize("way", WAYS)
def test_a_topic_goes_with_a_value_and_a_window_with_a_change(way: str) -> None:
    with ranks(way, 2) as job:
        heard: queue.Queue[Any] = queue.Queue()
        for listener in job.listeners:
            listener.on_message = lambda *about: heard.put(about)  # type: ignore[method-assign]
            listener.on_announced = lambda *about: heard.put(about)  # type: ignore[method-assign]
            listener.switch_at = lambda *about: heard.put(about)  # type: ignore[method-assign]
        job.controls[1].send_to_rank_0("this", [1])
        assert heard.get(timeout=PATIENCE_SECONDS) == (1, "this", [1])
        job.controls[0].announce("that", None)
        assert heard.get(timeout=PATIENCE_SECONDS) == ("that", None)
        job.controls[0].propose({"number": 1}, {"trial": 3})
        assert [heard.get(timeout=PATIENCE_SECONDS) for _ in range(2)] == [({"number": 1}, {}, {"trial": 3})] * 2


@pytest.mark.parametrize("way", WAYS)
def test_a_proposal_is_answered_by_all_and_switched_at_the_largest_promise(way: str) -> None:
    with ranks(way, 3) as job:
        for listener, steps in zip(job.listeners, [{0: 5, 1: 2}, {0: 4, 1: 4, 2: 9}, {0: 3, 1: 3}]):
            listener.steps = steps
        job.controls[1].propose({"policy": "fifo"})
        for listener in job.listeners:
            listener.next("hold")
            assert listener.next("switch") == ({"policy": "fifo"}, {0: 5, 1: 4, 2: 9})


def test_what_happens_before_a_rank_listens_reaches_its_listener_in_order_and_once() -> None:
    late, other = LocalControlWorld(2).ends
    listeners = [Recorder({0: 4}), Recorder()]
    other.listen(listeners[1])
    other.send_to_rank_0("t", "first")
    other.propose({"number": 1})
    other.send_to_rank_0("t", "last")
    other.leave()
    listeners[1].next("hold")
    other.wait_for_callbacks()
    assert listeners[1].calls.empty()  # who does not listen promises nothing
    late.listen(listeners[0])
    assert listeners[1].next("switch") == ({"number": 1}, {0: 4})
    kinds = ["told", "hold", "told", "leave", "switch"]
    heard = [listeners[0].next(kind) for kind in kinds]
    assert heard == [(1, "first"), None, (1, "last"), 1, ({"number": 1}, {0: 4})]
    late.close()
    other.close()


@pytest.mark.parametrize("listens_first", [True, False])
def test_the_first_failure_is_told_once_and_to_the_listener_last(listens_first: bool) -> None:
    [control], listener, told = LocalControlWorld(1).ends, Recorder(), []
    first = PeerLost("the first")

    def tell(error: CommschedError) -> None:
        told.append(error)
        assert listener.calls.empty()

    control.when_failed(tell)
    if listens_first:
        control.listen(listener)
    assert control.failure is None
    control.report(first)
    control.report(TransportError("the second"))
    control.wait_for_callbacks()
    assert told == [first]
    assert control.failure is first
    if not listens_first:
        control.listen(listener)
    assert listener.next("failure") is first
    control.when_failed(tell)  # who asks late is told at once
    assert told == [first, first]
    control.close()
    assert listener.calls.empty()


def test_a_callback_that_fails_keeps_the_failure_from_nobody(caplog: pytest.LogCaptureFixture) -> None:
    [control], listener, told = LocalControlWorld(1).ends, Recorder(), []
    first = PeerLost("the first")

    def fail(error: CommschedError) -> None:
        raise ValueError("of this test")

    control.listen(listener)
    control.when_failed(fail)
    control.when_failed(told.append)
    control.report(first)
    control.wait_for_callbacks()
    assert told == [first]
    assert listener.next("failure") is first
    assert control.failure is first
    assert "ValueError: of this test" in caplog.text
    control.close()


def test_a_listener_that_comes_while_a_failure_is_told_hears_of_it_once() -> None:
    [control], listener = LocalControlWorld(1).ends, Recorder()
    first = PeerLost("the first")
    control.when_failed(lambda error: control.listen(listener))
    control.report(first)
    control.wait_for_callbacks()
    control.close()
    assert listener.next("failure") is first
    assert listener.calls.empty()


@pytest.mark.parametrize("way", WAYS)
def test_who_has_left_tells_nothing_more(way: str) -> None:
    with ranks(way, 2) as job:
        job.controls[1].leave()
        with pytest.raises(ClosedError, match=r"^rank 1( \(.*\))? has left and cannot send to rank 0$"):
            job.controls[1].send_to_rank_0("t", 1)


@pytest.mark.parametrize("way", WAYS)
def test_rank_0_may_announce_until_all_have_left_and_to_nobody(way: str) -> None:
    with ranks(way, 2) as job:
        job.controls[0].leave()
        assert job.listeners[1].next("leave") == 0
        job.controls[0].announce("t", "still here")
        assert job.listeners[1].next("announced") == "still here"
        job.controls[1].leave()
        job.controls[0].wait_until_all_left()
        job.controls[0].announce("t", "anybody?")
        assert job.listeners[0].next("leave") == 1
    assert all(listener.calls.empty() for listener in job.listeners)


@pytest.mark.parametrize("way", WAYS)
def test_after_a_failure_telling_raises_it(way: str) -> None:
    with ranks(way, 2) as job:
        job.controls[0].report(TransportError("boom"))
        for listener in job.listeners:
            assert str(listener.next("failure")) == "boom"
        with pytest.raises(TransportError, match=r"^boom$"):
            job.controls[0].announce("t", 1)
        with pytest.raises(TransportError, match=r"^boom$"):
            job.controls[1].send_to_rank_0("t", 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_listener_that_raises_when_told_fails_the_job(way: str) -> None:
    with ranks(way, 2) as job:

        def raises(rank: int, topic: str, value: Any) -> None:
            raise ValueError("no such thing")

        job.listeners[0].on_message = raises  # type: ignore[method-assign]
        job.controls[1].send_to_rank_0("t", 1)
        for listener in job.listeners:
            assert "ValueError: no such thing" in str(listener.failure())


@pytest.mark.parametrize("way", WAYS)
def test_after_close_telling_says_so(way: str) -> None:
    with ranks(way, 1) as job:
        job.controls[0].close()
        with pytest.raises(ClosedError, match=r"^the control channel is closed$"):
            job.controls[0].announce("t", 1)


@pytest.mark.parametrize("way", WAYS)
def test_an_announcement_of_another_rank_fails_the_job_and_names_it(way: str) -> None:
    with ranks(way, 3) as job:
        job.controls[1].announce("t", "me too")
        for listener in job.listeners:
            error = listener.next("failure")
            assert isinstance(error, ProtocolError)
            assert re.fullmatch(r"rank 1( \(host host-1, pid \d+\))? announced something; only rank 0 may", str(error))


def test_a_value_that_is_too_long_is_refused_here() -> None:
    with running(2) as job:
        with pytest.raises(UnsupportedError, match=r"a message to rank 0 would be \d+ bytes from rank 1 .* at most 64 MiB"):
            job.clients[1].send_to_rank_0("t", "x" * MAX_MESSAGE_BYTES)


# --- rank 0's own stream ---


def test_a_job_with_rank_0_beside_its_server_lives_gathers_and_ends() -> None:
    with running(3, direct=True, fail_after_seconds=1.0) as job:
        for tag in ("a", "b"):
            assert job.on_all(lambda rank, tag=tag: job.clients[rank].gather(tag, rank)) == [[0, 1, 2]] * 3
        assert not threading.Event().wait(2.0)  # twice fail_after without a word of ours
        assert job.clients[0].clock_offset_seconds == 0.0
        job.leave()


def test_told_all_the_time_rank_0_is_not_taken_for_silent() -> None:
    with running(2, direct=True, fail_after_seconds=1.0) as job:
        stop, numbers = threading.Event(), itertools.count()

        def send() -> None:
            while not stop.wait(0.005):
                job.clients[1].send_to_rank_0("t", next(numbers))

        teller = job.start(send)
        assert not threading.Event().wait(2.0)
        stop.set()
        teller.result(PATIENCE_SECONDS)
        assert job.on_all(lambda rank: job.clients[rank].gather("g", rank)) == [[0, 1]] * 2
        assert "failure" not in {kind for kind, _ in job.listeners[0].calls.queue}


@pytest.mark.parametrize("who", ["client", "server"])
def test_rank_0_that_closes_early_is_lost_to_the_others(who: str) -> None:
    with running(2, direct=True) as job:
        (job.clients[0] if who == "client" else job.server).close()
        error = job.listeners[1].next("failure")
        assert isinstance(error, PeerLost)
        assert "closed" in str(error)


def test_a_lost_member_is_told_to_rank_0() -> None:
    with running(2, direct=True) as job:
        job.clients[1].close()
        assert str(job.listeners[0].next("failure")).startswith("rank 1 (host host-1, pid ")


def test_garbage_of_a_member_reaches_rank_0_as_an_error() -> None:
    with running(2, direct=True) as job:
        job.clients[1]._stream._outbox.put(encode(Announce("t", "1"))[:-1])
        assert "that are not a message of the control channel" in str(job.listeners[0].next("failure"))
