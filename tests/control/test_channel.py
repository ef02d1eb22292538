"""Server and clients over real gRPC on loopback, members as threads."""

from __future__ import annotations

import logging
import queue
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from commsched.control import client as client_module
from commsched.control import messages
from commsched.control import stream as stream_module
from commsched.control.client import ControlClient
from commsched.control.messages import METHOD, SERVICE, Failed, Member, decode, encode
from commsched.control.roster import Roster
from commsched.control.server import ControlServer, MemberConnection
from commsched.core import timeouts
from commsched.core.errors import (
    ClosedError,
    CommschedError,
    ConfigError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    TransportError,
    UnsupportedError,
    from_record,
)
from commsched.core.interfaces import OnFailure
from commsched.core.ports import free_port
from commsched.net.rpc import Call, DaemonExecutor, make_channel
from commsched.version import __version__

from .world import PATIENCE_SECONDS, TOKEN, Recorder, joining, results, running

SLOW = {"fail_after_seconds": 10.0, "join_within_seconds": 30.0}


# --- joining ---


def test_ranks_join_gather_and_leave() -> None:
    with running(3) as job:
        for tag in ("first", "second", "third"):
            values = job.on_all(lambda rank, tag=tag: job.clients[rank].gather(tag, {"rank": rank, "é\ud83d": [1.5, None]}))
            assert values == [[{"rank": rank, "é\ud83d": [1.5, None]} for rank in range(3)]] * 3
        job.leave()
        left = [{job.listeners[rank].next("leave") for _ in range(2)} for rank in range(3)]
        assert left == [{1, 2}, {0, 2}, {0, 1}]
        with pytest.raises(ClosedError, match="the control channel is closed"):
            job.clients[0].gather("late", 0)
    assert all(listener.calls.empty() for listener in job.listeners)


def test_who_knows_sooner_that_the_job_cannot_begin_ends_the_joining() -> None:
    server = ControlServer("127.0.0.1:0", TOKEN, 2, **SLOW)
    losing: queue.SimpleQueue[OnFailure] = queue.SimpleQueue()
    errors: queue.SimpleQueue[CommschedError] = queue.SimpleQueue()

    def join(address: str) -> None:
        with pytest.raises(PeerLost) as caught:
            ControlClient(address, TOKEN, Member.rank(1, 2), when_lost=losing.put, **SLOW)
        errors.put(caught.value)

    for address in (server.address, f"127.0.0.1:{free_port()}"):  # rank 0 waits for others as well; nobody listens
        joins = threading.Thread(target=join, args=(address,))
        joins.start()
        lost = PeerLost("rank 0 is gone")
        losing.get(timeout=PATIENCE_SECONDS)(lost)
        assert errors.get(timeout=PATIENCE_SECONDS) is lost
        joins.join(PATIENCE_SECONDS)
    server.close()


def test_a_member_that_does_not_wait_for_rank_0_ends_when_nobody_listens() -> None:
    """A server, which is told of rank 0 by a rank that had joined it."""
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(PeerLost, match=rf"^rank 0 is gone: nobody listens at {address} any more$"):
        ControlClient(address, TOKEN, Member.server(0), fail_after_seconds=600.0, join_within_seconds=600.0, waits=False)


def leave(client: ControlClient) -> None:
    client.leave()
    client.wait_until_all_left()


def test_a_rank_that_nobody_waits_for_need_not_wait_for_the_others() -> None:
    with running(3, fail_after_seconds=1.0, direct=True) as job:
        ending = job.start(leave, job.clients[1])
        releases = []
        for rank in (0, 2):
            assert job.listeners[rank].next("leave") == 1
            leaver, release = job.listeners[rank].next("parting")
            assert leaver == 1
            releases.append(release)
        releases[0]()
        assert not ending.done()
        releases[1]()
        ending.result(PATIENCE_SECONDS)
        job.clients[1].close()
        assert not threading.Event().wait(1.6)  # more than fail_after: its silence is no failure
        job.clients[2].send_to_rank_0("t", "still here")
        assert job.listeners[0].next("told") == (2, "still here")
        results([job.start(leave, job.clients[rank]) for rank in (0, 2)])
        assert [job.listeners[0].next("leave"), job.listeners[2].next("leave")] == [2, 0]
    assert all(listener.calls.empty() for listener in job.listeners)


def test_a_rank_0_that_nobody_waits_for_ends_the_channel_for_all() -> None:
    with running(2, direct=True) as job:
        ending = job.start(leave, job.clients[0])
        assert job.listeners[1].next("leave") == 0
        job.listeners[1].next("parting")[1]()
        ending.result(PATIENCE_SECONDS)
        job.clients[0].close()
        job.server.close()
        one = job.clients[1]
        with pytest.raises(PeerLost, match=r"rank 0 \(host .*\) left, and rank 1 .* cannot go on without it"):
            one.gather("late", 1)
        one.send_to_rank_0("t", "nobody hears it")
        one.propose({})
        leave(one)
        assert job.listeners[1].calls.empty()
        error = PeerLost("what comes after the end")
        one.report(error)
        assert job.listeners[1].next("failure") is error


def test_a_rank_whose_last_session_others_are_still_in_waits_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse, refused = Roster._refuse, []
    monkeypatch.setattr(Roster, "_refuse", lambda *event: refused.append(event) or refuse(*event))
    with running(2, direct=True) as job:
        ending = job.start(leave, job.clients[1])
        assert job.listeners[0].next("leave") == 1
        job.listeners[0].next("parting")[1]()
        ending.result(PATIENCE_SECONDS)
        job.clients[1].close()
        with pytest.raises(PeerTimeout, match=r"could not join .* within 2 s: the job that listens there is about to end"):
            ControlClient(
                job.server.address,
                TOKEN,
                Member.rank(1, 2),
                fail_after_seconds=10.0,
                join_within_seconds=2.0,
            )
        assert len(refused) > 1  # it has asked again
        leave(job.clients[0])


def test_a_rank_may_start_before_rank_0_listens() -> None:
    address = f"127.0.0.1:{free_port()}"
    refused = threading.Event()

    class Early(ControlClient):
        def _stream_ended(self, error: grpc.RpcError | None) -> bool:
            again = super()._stream_ended(error)
            refused.set()
            return again

    executor = DaemonExecutor("test")
    early = executor.submit(Early, address, TOKEN, Member.rank(1, 2), **SLOW)
    assert refused.wait(PATIENCE_SECONDS)
    server = ControlServer(address, TOKEN, 2, **SLOW)
    clients = [ControlClient(address, TOKEN, Member.rank(0, 2), **SLOW), early.result(PATIENCE_SECONDS)]
    gathers = [executor.submit(client.gather, "g", rank) for rank, client in enumerate(clients)]
    assert results(gathers) == [[0, 1], [0, 1]]
    for client in clients:
        client.close()
    server.close()
    executor.shutdown()


@pytest.mark.parametrize(
    ("thread", "has_reached_rank_0"),
    [("commsched-control-watch", False), ("commsched-control-receive", False), ("commsched-control-calls", True)],
)
def test_a_rank_that_can_start_no_thread_ends_at_once_and_says_so_to_whom_it_has_reached(
    monkeypatch: pytest.MonkeyPatch, thread: str, has_reached_rank_0: bool
) -> None:
    start = threading.Thread.start
    this_rank = threading.local()

    def start_or_not(started: threading.Thread) -> None:
        if started.name == thread and hasattr(this_rank, "has_no_threads"):
            raise RuntimeError("can't start new thread")
        start(started)

    def join_without_threads(rank: int) -> ControlClient:
        this_rank.has_no_threads = True
        return job.join_rank(rank)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    with joining(2) as job:
        joined = job.start(job.join_rank, 0) if has_reached_rank_0 else None
        with pytest.raises(RuntimeError, match="can't start new thread"):
            job.start(join_without_threads, 1).result(PATIENCE_SECONDS)
        if joined is not None:  # rank 0 hears of it when it has joined, or just before
            raised = joined.exception(PATIENCE_SECONDS)
            assert re.match(r"rank 1 \(.*\) is gone: it closed before", str(raised or job.listeners[0].failure()))


def test_a_rank_for_which_grpc_can_start_no_thread_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Threadless(Call):
        def __iter__(self) -> Any:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(stream_module, "Call", Threadless)
    with joining(2) as job, pytest.raises(TransportError, match="cannot be joined: can't start new thread"):
        job.join_rank(1)


def test_an_error_of_this_rank_is_not_taken_for_rank_0s_end(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = threading.Event()

    class Wrong(Call):
        def __iter__(self) -> Any:
            for data in super().__iter__():
                if wrong.is_set():
                    raise RuntimeError("dictionary changed size during iteration")
                yield data

    with joining(2, fail_after_seconds=1.0) as job:
        first = job.start(job.join_rank, 0)
        monkeypatch.setattr(stream_module, "Call", Wrong)
        job.join_rank(1)
        first.result(PATIENCE_SECONDS)
        wrong.set()  # the next heartbeat is its last
        failure = job.listeners[1].failure()
        assert str(failure).startswith("rank 1 (host host-1")
        assert str(failure).endswith("cannot read the control channel: dictionary changed size during iteration")


def test_missing_ranks_are_named_to_those_who_wait() -> None:
    with joining(4, join_within_seconds=2.0) as job:
        joins = [job.start(job.join_rank, rank) for rank in (0, 2)]
        for join in joins:
            with pytest.raises(PeerTimeout, match=r"^ranks 1, 3 of 4 did not join within 2 s$"):
                join.result(PATIENCE_SECONDS)
    assert all(listener.calls.empty() for listener in job.listeners)  # told by the exception, and not twice


def test_who_waits_in_vain_is_told_of_who_was_turned_away() -> None:
    with joining(2, join_within_seconds=3.0) as job:
        first = job.start(job.join_rank, 0)
        with pytest.raises(ConfigError, match="refuses this token"):
            job.join(Member.rank(1, 2), token="another-secret")
        refused = (
            r"rank 1 of 2 did not join within 3 s; rank 0 refused a call from ipv[46]:.*: it does not prove this job's token"
        )
        with pytest.raises(PeerTimeout, match=refused):
            first.result(PATIENCE_SECONDS)


def test_a_rank_that_does_not_come_to_a_gather_is_named_and_ends_the_job_after_the_limit() -> None:
    with running(3) as job:
        job.clients[0]._stall_after_seconds = 0.2
        waiting = job.start(job.clients[0].gather, "g", 0)
        job.start(job.clients[2].gather, "g", 2)
        limit = r"rank 1 has not come to gather 'g'; rank 0 \(.*\) has waited \d s for it, and stall_after is 0.2 s"
        with pytest.raises(PeerTimeout, match=limit):
            waiting.result(PATIENCE_SECONDS)
        failure = job.listeners[1].failure()
        assert "rank 1 has not come to gather 'g'" in str(failure)
        assert failure.rank == 1


def test_nobody_listens() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(PeerTimeout, match=f"rank 1 .* could not join rank 0 at {address} within 2 s: .*refused"):
        ControlClient(address, TOKEN, Member.rank(1, 2), fail_after_seconds=10, join_within_seconds=2.0)


def test_somebody_listens_who_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(PeerTimeout, match=f"could not join rank 0 at {address} within 0.5 s"):
            ControlClient(address, TOKEN, Member.rank(1, 2), fail_after_seconds=10, join_within_seconds=0.5)


def test_another_service_listens() -> None:
    executor = DaemonExecutor("test")
    other = grpc.server(executor)
    address = f"127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
    other.start()
    with pytest.raises(ConfigError, match=f"the program that listens at {address} is not commsched's control channel"):
        ControlClient(address, TOKEN, Member.rank(1, 2), **SLOW)
    other.stop(None)
    executor.shutdown()


def test_a_wrong_token_is_refused_with_one_clear_line_and_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with running(1) as job:
        with pytest.raises(ConfigError) as refusal:
            job.join(Member.rank(1, 2), token="another-secret")
        assert str(refusal.value) == (
            f"rank 0 at {job.server.address} refuses this token; set the same COMMSCHED_TOKEN on every rank"
        )
        assert job.clients[0].gather("g", 1) == [1]  # the job goes on
    assert "does not prove this job's token" in caplog.text
    assert "another-secret" not in caplog.text
    assert TOKEN not in caplog.text


def test_a_member_of_another_job_is_refused_by_name_and_this_job_forms() -> None:
    with joining(2) as job:
        first = job.start(job.join_rank, 0)
        with pytest.raises(ConfigError) as refusal:
            job.join(Member.rank(1, 2), job="that job")
        assert str(refusal.value) == (
            f"rank 0 at {job.server.address} refuses this process: it serves a job without a name, and this is job 'that job'; "
            "give each job an address of its own"
        )
        job.join_rank(1)
        first.result(PATIENCE_SECONDS)


@contextmanager
def stranger(handler: grpc.RpcMethodHandler) -> Iterator[str]:
    """The address of another program's server, which answers the control channel's calls."""
    executor = DaemonExecutor("test")
    server = grpc.server(executor)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)
    executor.shutdown()


def test_who_listens_at_rank_0s_address_and_has_no_token_is_believed_nothing() -> None:
    heard = []

    def answer(requests: Any, context: grpc.ServicerContext) -> Any:
        if "commsched-proof-bin" not in dict(context.invocation_metadata()):
            context.set_trailing_metadata((("commsched-challenge-bin", bytes(72)),))
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "")
        yield encode(messages.Welcome("an impostor", 1))
        heard.extend(requests)

    with stranger(grpc.stream_stream_rpc_method_handler(answer)) as address:
        with pytest.raises(ConfigError) as refusal:
            ControlClient(address, TOKEN, Member.rank(1, 2), **SLOW)
    assert str(refusal.value) == (
        f"the program that listens at {address} does not prove that it has this job's token; another program may listen there"
    )
    assert heard == []


def test_what_a_stranger_says_is_one_line_of_printable_characters() -> None:
    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.INTERNAL, "no\nrank 7 \x1b[2Jis lost")
        raise AssertionError

    with stranger(grpc.unary_unary_rpc_method_handler(answer)) as address:
        with pytest.raises(TransportError) as refusal:
            ControlClient(address, TOKEN, Member.rank(1, 2), **SLOW)
    assert str(refusal.value) == f"rank 0 at {address} cannot be joined: INTERNAL: no rank 7  [2Jis lost"


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="the job's token is empty"):
        ControlServer("127.0.0.1:0", "", 1, **SLOW)


def test_versions_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "__version__", "9.9.9")
    with joining(2) as job:
        with pytest.raises(ProtocolError, match=rf"rank 1 .* runs commsched 9\.9\.9, but rank 0 .* {__version__}; install"):
            job.join_rank(1)


def test_protocols_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PROTOCOL", messages.PROTOCOL + 1)
    with joining(2) as job:
        ours, theirs = messages.PROTOCOL, messages.PROTOCOL + 1
        with pytest.raises(ProtocolError, match=rf"protocol {theirs}\), but rank 0 runs .*protocol {ours}\)"):
            job.join_rank(1)


def test_two_processes_claim_one_rank() -> None:
    with joining(2) as job:
        joins = [job.start(job.join, Member.rank(1, 2, host)) for host in ("here", "there")]
        for join in joins:
            with pytest.raises(ConfigError, match=r"two processes say that they are rank 1: one on host .*here, .*here, pid"):
                join.result(PATIENCE_SECONDS)


def test_world_sizes_differ() -> None:
    with joining(2) as job:
        with pytest.raises(ConfigError, match=r"rank 1 .* says there are 3 ranks, but rank 0 says 2"):
            job.join(Member.rank(1, 3))


def test_the_port_is_taken() -> None:
    with joining(1) as job:
        with pytest.raises(ConfigError, match=f"cannot listen at {job.server.address}: the port is taken by another process"):
            ControlServer(job.server.address, TOKEN, 1, **SLOW)


# --- gather ---


def test_a_gather_with_a_leaver_raises_on_all_and_is_told() -> None:
    with running(2) as job:
        gather = job.start(job.clients[0].gather, "g", 1)
        job.clients[1].leave()
        lost = r"^rank 1 \(host host-1, pid \d+\) left, but 'g' waits for it$"
        with pytest.raises(PeerLost, match=lost):
            gather.result(PATIENCE_SECONDS)
        with pytest.raises(PeerLost, match=lost):
            job.clients[1].wait_until_all_left()
        assert [str(listener.failure()) for listener in job.listeners] == [str(gather.exception())] * 2


def test_a_rank_that_has_left_cannot_gather() -> None:
    with running(2) as job:
        job.clients[1].leave()
        job.clients[1].leave()
        with pytest.raises(ClosedError, match=r"rank 1 .* has left and cannot gather 'g'"):
            job.clients[1].gather("g", 1)


def test_a_large_value_travels_and_a_larger_one_is_refused_here() -> None:
    with running(2) as job:
        large = "x" * (8 * 2**20)
        assert job.on_all(lambda rank: job.clients[rank].gather("g", large)) == [[large, large]] * 2
        with pytest.raises(UnsupportedError, match=r"'h' would gather \d+ bytes from rank 0 .* at most 64 MiB of each rank"):
            job.clients[0].gather("h", "x" * messages.MAX_MESSAGE_BYTES)


def test_the_largest_value_fits_through_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commsched.control.end.MAX_MESSAGE_BYTES", 2**20)
    monkeypatch.setattr("commsched.control.server.MAX_WIRE_BYTES", 2**20 + 2**16)
    monkeypatch.setattr("commsched.control.stream.MAX_WIRE_BYTES", 2**20 + 2**16)
    room = 2**20 - len(encode(messages.Gather("g", '""')))
    value = "x" * room
    with running(1) as job:
        assert job.clients[0].gather("g", value) == [value]
        with pytest.raises(UnsupportedError, match="at most"):
            job.clients[0].gather("h", value + "x")


# --- failures ---


def test_a_report_is_told_to_every_member_once_and_ends_every_wait() -> None:
    with running(3) as job:
        server = Recorder()
        job.join(Member.server(0), server)
        gather = job.start(job.clients[0].gather, "g", 1)
        error = ValueError("boom")
        job.clients[1].report(error)
        job.clients[1].report(PeerLost("later"))
        expected = r"^user exception on rank 1 \(host host-1, pid \d+\): ValueError: boom$"
        with pytest.raises(TransportError, match=expected):
            gather.result(PATIENCE_SECONDS)
        told = [listener.next("failure") for listener in (*job.listeners, server)]
        assert {str(error) for error in told} == {str(gather.exception())}
        for client in job.clients:
            calls = (partial(client.gather, "h", 1), client.leave, client.wait_until_all_left, partial(client.propose, {}))
            for call in calls:
                with pytest.raises(TransportError, match=expected):
                    call()
            client.report(PeerLost("much later"))
    assert all(listener.calls.empty() for listener in (*job.listeners, server))


def test_the_reporter_is_told_of_its_own_error_object() -> None:
    with running(2) as job:
        error = PeerLost("rank 1's shard is gone")
        job.clients[0].report(error)
        assert job.listeners[0].next("failure") is error
        other = job.listeners[1].next("failure")
        assert (type(other), str(other)) == (PeerLost, "rank 1's shard is gone")


def test_of_two_failures_everybody_is_told_the_same() -> None:
    with running(3) as job:
        both = threading.Barrier(2)

        def report(rank: int) -> None:
            both.wait(PATIENCE_SECONDS)
            job.clients[rank].report(PeerLost(f"said by rank {rank}"))

        results([job.start(report, rank) for rank in (1, 2)])
        assert len({str(listener.next("failure")) for listener in job.listeners}) == 1


def test_a_very_long_message_is_cut() -> None:
    with running(2) as job:
        error = PeerLost("x" * 10**6)
        job.clients[0].report(error)
        assert job.listeners[0].next("failure") is error
        assert len(str(job.listeners[1].next("failure"))) == 10_000


def test_a_report_made_just_before_close_is_still_told() -> None:
    with running(2) as job:
        job.clients[1].report(ValueError("boom"))
        job.clients[1].close()
        assert "ValueError: boom" in str(job.listeners[0].next("failure"))
    assert job.listeners[1].calls.empty()  # nothing is called back after close


def test_a_client_that_closes_without_leaving_is_lost() -> None:
    with running(3) as job:
        job.clients[1].close()
        for rank in (0, 2):
            error = job.listeners[rank].next("failure")
            assert isinstance(error, PeerLost)
            assert str(error).startswith("rank 1 (host host-1, pid ")
            assert str(error).endswith(") is gone: it closed before all ranks had left")
        with pytest.raises(ClosedError, match="the control channel is closed"):
            job.clients[1].gather("g", 1)


def test_closing_ends_a_wait_in_another_thread() -> None:
    with running(2) as job:
        gather = job.start(job.clients[1].gather, "g", 1)
        job.clients[1].close()
        job.clients[1].close()
        with pytest.raises((ClosedError, PeerLost)):
            gather.result(PATIENCE_SECONDS)


def test_a_server_that_closes_while_the_job_runs_says_so() -> None:
    with running(2) as job:
        job.server.close()
        for listener in job.listeners:
            assert str(listener.next("failure")) == "rank 0 closed the control channel before all ranks had left"


def test_a_server_closes_when_every_member_has_heard_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may end then: what a member had not read by that time might be lost."""
    monkeypatch.setattr(timeouts, "FAREWELL_SECONDS", 1000.0)
    with running(3, direct=True) as job:
        coming, read = threading.Event(), threading.Event()
        stream = job.clients[2]._stream
        on_data = stream._on_data

        def read_late(data: bytes) -> None:
            if isinstance(decode(data), Failed):
                coming.set()
                assert read.wait(PATIENCE_SECONDS)
            on_data(data)

        monkeypatch.setattr(stream, "_on_data", read_late)
        job.clients[0].report(PeerLost("rank 7 is gone"))
        job.clients[0].close()
        closing = job.start(job.server.close)
        assert coming.wait(PATIENCE_SECONDS)
        with pytest.raises(TimeoutError):
            closing.result(0.2)
        read.set()
        closing.result(PATIENCE_SECONDS)
        assert str(job.listeners[2].next("failure")) == "rank 7 is gone"


def test_a_server_that_closes_does_not_wait_for_who_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FAREWELL_SECONDS", 1000.0)
    with running(2, fail_after_seconds=0.5, direct=True) as job:
        stopped = threading.Event()
        stream = job.clients[1]._stream
        monkeypatch.setattr(job.clients[1]._liveness, "tick", lambda now: [])  # who is stopped gives nobody up
        monkeypatch.setattr(stream, "_on_data", lambda data: stopped.wait(PATIENCE_SECONDS))
        monkeypatch.setattr(stream._outbox, "_heartbeat_seconds", 1000.0)
        stream._outbox.put(encode(messages.Heartbeat()))  # ends the wait that has begun
        assert isinstance(job.listeners[0].next("failure"), PeerTimeout)
        job.clients[0].close()
        job.start(job.server.close).result(PATIENCE_SECONDS)
        stopped.set()


def test_without_a_verdict_the_reporter_tells_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "VERDICT_SECONDS", 0.2)
    with running(2) as job:
        monkeypatch.setattr(MemberConnection, "received", lambda self, data: None)
        error = PeerLost("rank 1's shard is gone")
        job.clients[1].report(error)
        assert job.listeners[1].next("failure") is error


@pytest.mark.parametrize(
    ("error", "is_a_consequence"), [(PeerLost("rank 1's shard is gone"), True), (ProtocolError("garbage"), False)]
)
def test_a_connection_that_breaks_before_the_verdict_tells_the_likeliest_cause(
    monkeypatch: pytest.MonkeyPatch, error: CommschedError, is_a_consequence: bool
) -> None:
    """Lanes that break belong to what ended rank 0; another error of our own does not."""
    monkeypatch.setattr(timeouts, "VERDICT_SECONDS", 1000.0)
    with running(2) as job:
        monkeypatch.setattr(MemberConnection, "received", lambda self, data: None)
        job.clients[1].report(error)
        job.server._server.stop(None)
        told = job.listeners[1].next("failure")
        assert ("the control connection to it broke" in str(told)) is is_a_consequence
        assert is_a_consequence or told is error
        assert "the control connection to it broke" in str(job.listeners[0].next("failure"))


@pytest.mark.parametrize(
    ("error", "is_a_consequence"), [(PeerLost("rank 2's shard has closed"), True), (ProtocolError("garbage"), False)]
)
def test_what_is_reported_to_a_frozen_rank_0_tells_the_likeliest_cause(
    monkeypatch: pytest.MonkeyPatch, error: CommschedError, is_a_consequence: bool
) -> None:
    """Whoever gives rank 0 up first ends, and its lanes break for the others."""
    monkeypatch.setattr(timeouts, "VERDICT_SECONDS", 0.2)  # over long before rank 0 is given up
    with running(2, fail_after_seconds=2.0) as job:
        monkeypatch.setattr(job.server, "_decide", lambda decision: None)
        monkeypatch.setattr(job.clients[0]._liveness, "tick", lambda now: [])  # who is frozen gives nobody up
        for outbox in job.server._outboxes.values():
            monkeypatch.setattr(outbox, "_heartbeat_seconds", 1000.0)
            outbox.put(encode(messages.Heartbeat()))  # ends the wait that has begun
        assert not threading.Event().wait(1.0)  # rank 0 is silent by now, and not given up
        job.clients[1].report(error)
        told = job.listeners[1].next("failure")
        assert isinstance(told, PeerTimeout) is is_a_consequence, told
        assert str(told).startswith("rank 0 (host ") if is_a_consequence else told is error


def test_a_listener_that_raises_fails_the_job() -> None:
    with running(2) as job:

        def raises() -> dict[int, int]:
            raise ValueError("boom")

        job.listeners[1].hold_steps = raises  # type: ignore[method-assign]
        job.clients[0].propose({})
        assert "user exception on rank 1 (host host-1" in str(job.listeners[0].failure())


def test_a_listener_may_report_and_close() -> None:
    with running(2) as job:
        closed = threading.Event()

        def on_leave(rank: int) -> None:
            job.clients[1].report(ValueError("no"))
            job.clients[1].close()
            closed.set()

        job.listeners[1].on_leave = on_leave  # type: ignore[method-assign]
        job.clients[0].leave()
        assert closed.wait(PATIENCE_SECONDS)
        assert "ValueError: no" in str(job.listeners[0].next("failure"))


def test_silence_of_a_member_is_told_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(2, fail_after_seconds=0.5) as job:
        outbox = job.clients[1]._stream._outbox
        monkeypatch.setattr(outbox, "_heartbeat_seconds", 1000.0)
        outbox.put(encode(messages.Heartbeat()))  # ends the wait that has begun
        for listener in job.listeners:
            error = listener.next("failure")
            assert isinstance(error, PeerTimeout)
            assert str(error).startswith("rank 1 (host host-1, pid ")
            assert str(error).endswith(" s; fail_after is 0.5 s")
        outbox.put(b"")  # let gRPC's thread go


def test_heartbeats_keep_an_idle_job_alive() -> None:
    with running(2, fail_after_seconds=1.0) as job:
        assert not threading.Event().wait(2.0)  # twice fail_after without a word of ours
        assert job.on_all(lambda rank: job.clients[rank].gather("g", rank)) == [[0, 1]] * 2


@pytest.mark.parametrize("garbage", [b"", b"\x80\x04garbage", b'{"message":"Left","rank":0}', b"[" * 100_000])
def test_garbage_with_the_token_is_turned_away_and_the_job_goes_on(garbage: bytes) -> None:
    with running(2) as job:
        channel = make_channel(job.server.address, 10.0, messages.MAX_WIRE_BYTES)
        [answer] = [decode(data) for data in Call(channel, f"/{SERVICE}/{METHOD}", iter([garbage]), TOKEN, "")]
        channel.close()
        assert isinstance(answer, Failed)
        assert isinstance(from_record(answer.error), ProtocolError)
        assert job.on_all(lambda rank: job.clients[rank].gather("g", rank)) == [[0, 1]] * 2


def test_garbage_of_a_member_fails_the_job_and_names_it() -> None:
    with running(2) as job:
        job.clients[1]._stream._outbox.put(b"\x80\x04garbage")
        error = job.listeners[0].next("failure")
        assert isinstance(error, ProtocolError)
        assert str(error).startswith("rank 1 (host host-1, pid ")
        assert "sent 9 bytes that are not a message of the control channel" in str(error)


def test_a_longer_message_than_allowed_ends_the_stream_and_names_the_member() -> None:
    with running(2) as job:
        job.clients[1]._stream._outbox.put(b"x" * (messages.MAX_WIRE_BYTES + 1))
        assert "rank 1 (host host-1" in str(job.listeners[0].next("failure"))


# --- servers ---


def test_a_server_hears_of_leaves_and_of_the_end_and_its_going_then_is_fine() -> None:
    with running(2) as job:
        listener = Recorder()
        server = job.join(Member.server(0), listener)
        job.leave()
        assert {listener.next("leave"), listener.next("leave")} == {0, 1}
        listener.next("end")
        server.close()
        assert [other.next("leave") for other in job.listeners] == [1, 0]
    assert all(other.calls.empty() for other in (*job.listeners, listener))


def test_a_lost_server_is_named() -> None:
    with running(2) as job:
        job.join(Member.server(3, "big")).close()
        assert str(job.listeners[0].next("failure")).startswith("server 3 (host big, pid ")


# --- agreeing on a step ---


def test_a_proposal_gives_the_largest_promise_of_every_group() -> None:
    with running(2) as job:
        job.listeners[0].steps, job.listeners[1].steps = {0: 7, 1: 3}, {0: 5, 1: 4, 2: 9}
        job.clients[1].propose({"partition_bytes": 1000, "policy": "fifo"})
        for listener in job.listeners:
            listener.next("hold")
            assert listener.next("switch") == ({"partition_bytes": 1000, "policy": "fifo"}, {0: 7, 1: 4, 2: 9})


class SteppingListener(Recorder):
    """Steps as fast as it may, and keeps what configuration each step used."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self.next_step = 0
        self.held_from: int | None = None
        self.switches: list[tuple[int, Any]] = []
        self.used: list[Any] = []
        self.wrong: list[str] = []

    def begin_step(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.held_from is None or self.next_step < self.held_from, PATIENCE_SECONDS)
            self.used.append(next((config for step, config in reversed(self.switches) if step <= self.next_step), None))
            self.next_step += 1

    def hold_steps(self) -> dict[int, int]:
        with self.changed:
            self.held_from = self.next_step + 1
            return {0: self.held_from}

    def switch_at(self, config: dict[str, Any], steps: dict[int, int], window: dict[str, Any]) -> None:
        with self.changed:
            if self.held_from is None or steps[0] < self.held_from:
                self.wrong.append(f"told step {steps[0]}, promised {self.held_from}")
            self.held_from = None
            self.switches.append((steps[0], config["number"]))
            self.changed.notify_all()


def test_proposals_racing_with_steps_over_the_network() -> None:
    world_size, rounds, proposals = 3, 150, 20
    with running(world_size) as job:
        steppers = [SteppingListener() for _ in range(world_size)]
        for client, stepper in zip(job.clients, steppers):
            client._listener = stepper  # they all joined with recorders
        barrier = threading.Barrier(world_size)
        choice = random.Random(0)
        when = {choice.randrange(rounds): number for number in range(proposals)}

        def train(rank: int) -> None:
            for step in range(rounds):
                steppers[rank].begin_step()
                if step in when and when[step] % world_size == rank:
                    job.clients[rank].propose({"number": when[step]})
                barrier.wait(PATIENCE_SECONDS)  # as averaging does

        job.on_all(train)
        job.on_all(lambda rank: job.clients[rank].gather("done", rank))
        for stepper in steppers:  # a switch may still be on its way
            with stepper.changed:
                assert stepper.changed.wait_for(lambda s=stepper: len(s.switches) == len(when), PATIENCE_SECONDS)
        assert [stepper.wrong for stepper in steppers] == [[]] * world_size
        assert [stepper.used for stepper in steppers] == [steppers[0].used] * world_size
        assert [stepper.switches for stepper in steppers] == [steppers[0].switches] * world_size


# --- clocks ---


def test_the_clock_offset_leads_to_rank_0s_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.monotonic
    with joining(2) as job:

        class AheadTime:
            monotonic = staticmethod(lambda: real() + 1000.0)

        zero = job.start(job.join_rank, 0)
        one = job.start(job.join_rank, 1)
        assert zero.result(PATIENCE_SECONDS).clock_offset_seconds == 0.0
        assert abs(one.result(PATIENCE_SECONDS).clock_offset_seconds) < 100.0  # half of a round trip, on a busy machine
        # A server's members after the fact see the clock of the day, so its estimate can be checked against a shifted one.
        monkeypatch.setattr("commsched.control.server.time", AheadTime)
        later = job.join(Member.server(0))
        assert abs(later.clock_offset_seconds - 1000.0) < 100.0
