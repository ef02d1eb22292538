"""A parameter server in a process of its own: each job, from the first hello to the last goodbye."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import commsched
from commsched.core.errors import CommschedError, ConfigError, PeerLost
from commsched.core.interfaces import OnFailure
from commsched.core.manifest import Manifest, TensorSpec
from commsched.transports.backends.ps.frame import FrameKind, WorkerHello, json_frame
from commsched.transports.backends.ps.reserve import reserve
from commsched.transports.backends.ps.server import Server
from commsched.transports.backends.ps.service import Service
from commsched.transports.backends.ps.stream import StreamOptions, open_streams
from commsched.transports.backends.ps.transport import PsTransport

from ...worlds import TOKEN, a_context, open_ps
from .test_transport import Ended, Failures, make_task

MANIFEST = Manifest((TensorSpec("weight", (256,), "float32"),))


class FakeMembership:
    """A place in a control channel that writes down what it is told, and takes it for the first cause."""

    def __init__(self) -> None:
        self.reported: list[CommschedError] = []
        self.closed = False
        self.on_failure: OnFailure = print

    def report(self, error: CommschedError) -> None:
        self.reported.append(error)
        self.on_failure(error)

    def close(self) -> None:
        self.closed = True


class Serving:
    """A ``Server`` in a thread, for so many ``jobs``; ``outcome`` is how the next of them has ended."""

    def __init__(
        self,
        join: Callable[[WorkerHello, str, OnFailure], FakeMembership] | None = None,
        lane: str = "tcp",
        jobs: int = 1,
    ) -> None:
        self.options = StreamOptions(TOKEN, lane)
        self._server = Server("127.0.0.1:0", self.options)
        self._jobs = jobs
        self.membership = FakeMembership()
        self.joined: queue.SimpleQueue[tuple[WorkerHello, OnFailure]] = queue.SimpleQueue()
        self._join = join or self._accept
        self._outcome: queue.SimpleQueue[CommschedError | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.address = self._server.address

    def _accept(self, hello: WorkerHello, job: str, on_failure: OnFailure) -> FakeMembership:
        self.membership.on_failure = on_failure
        self.joined.put((hello, on_failure))
        return self.membership

    def _serve(self) -> None:
        for _ in range(self._jobs):
            try:
                self._server.serve_job(self._join)
                self._outcome.put(None)
            except CommschedError as error:
                self._outcome.put(error)

    def outcome(self) -> CommschedError | None:
        outcome = self._outcome.get(timeout=60)
        self._jobs -= 1
        if self._jobs:
            return outcome
        self._thread.join(60)
        self._server.close()
        for thread in threading.enumerate():
            if thread.name.startswith("commsched-ps"):  # it may be at its very last instruction
                thread.join(60)
                assert not thread.is_alive(), f"{thread.name} is left behind"
        return outcome


def connect(
    address: str,
    rank: int,
    on_failure: OnFailure,
    world_size: int = 2,
    lane: str = "tcp",
    job: str = "",
    control_address: str = "h:1",
) -> PsTransport:
    context = a_context(rank, world_size, on_failure, lane=lane, join_within=60.0)
    transport = open_ps(replace(context, control_address=control_address, job=job), [address])
    transport.add_group(0, MANIFEST)
    return transport


def test_a_job_from_the_first_hello_to_the_last_goodbye():
    server = Serving()
    transports = [connect(server.address, rank, pytest.fail) for rank in range(2)]
    assert server.joined.get(timeout=60)[0] == WorkerHello(0, 2, 0, "h:1")
    ends = [Ended(), Ended()]
    for transport, ended in zip(transports, ends):
        transport.start(make_task(), ended)
    for ended in ends:
        assert ended.done.wait(60)
    for transport in transports:
        transport.close()
    assert server.outcome() is None
    assert server.membership.closed
    assert server.membership.reported == []


def test_a_failure_elsewhere_ends_the_server_and_reaches_its_workers():
    server, failures = Serving(), Failures()
    transport = connect(server.address, 0, failures)
    _, on_failure = server.joined.get(timeout=60)
    on_failure(PeerLost("rank 3 (host h, pid 9) is gone"))
    assert str(server.outcome()) == "rank 3 (host h, pid 9) is gone"
    assert str(failures.first()) == "rank 3 (host h, pid 9) is gone"
    transport.close()


def test_a_control_channel_that_cannot_be_joined_ends_the_server_and_reaches_its_workers():
    def join(hello: WorkerHello, job: str, on_failure: OnFailure) -> FakeMembership:
        raise ConfigError("the control channel has another token")

    server = Serving(join)
    with pytest.raises(ConfigError, match="the control channel has another token"):
        connect(server.address, 0, Failures())
    assert str(server.outcome()) == "the control channel has another token"


def test_a_taken_port_is_one_clear_line():
    server = Serving()
    with pytest.raises(ConfigError, match=f"cannot listen at {server.address}: the port is taken"):
        Server(server.address, StreamOptions(TOKEN))
    transport = connect(server.address, 0, pytest.fail, world_size=1)
    transport.close()
    assert server.outcome() is None


def start_process(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process that prints a line when it is ready, and stays until it is killed."""
    root = Path(commsched.__file__).parents[1]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, env=environ)
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


SERVER = """
import sys
from commsched.transports.backends.ps.server import Server
from commsched.transports.backends.ps.stream import StreamOptions
class Membership:
    def report(self, error): pass
    def close(self): pass
join = lambda hello, job, on_failure: Membership()
server = Server("127.0.0.1:0", StreamOptions(sys.argv[1], sys.argv[2]))
print(server.address, flush=True)
server.serve_job(join)
"""

WORKER = """
import sys, threading
from commsched.core.world import World
from commsched.settings import Settings
from commsched.transports.backends.ps.stream import StreamOptions
from commsched.transports.backends.ps.transport import PsTransport
from commsched.transports.backend import TransportContext
token, address, lane = sys.argv[1:]
context = TransportContext(World(1, 2), Settings(lane=lane), "127.0.0.1", token, "h:1", list, print, lambda callback: None)
transport = PsTransport(context, StreamOptions(token, lane), [address])
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_a_killed_server_is_named_to_its_workers_at_once(lane):
    process = start_process(SERVER, TOKEN, lane)
    try:
        address = process.stdout.readline().strip()
        failures = Failures()
        transport = connect(address, 0, failures, lane=lane)
        ended = Ended()
        transport.start(make_task(), ended)
        assert ended.sent.wait(60)
    finally:
        kill(process)
    assert isinstance(failures.first(), PeerLost)
    assert str(failures.first()).startswith(f"server 0 at {address} is gone: ")
    with pytest.raises(PeerLost, match=f"server 0 at {address} is gone: "):
        transport.start(make_task(partition=1), Ended())
    transport.close()


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_a_killed_worker_ends_the_server_and_is_named_to_the_other_worker(lane):
    server, failures = Serving(lane=lane), Failures()
    process = start_process(WORKER, TOKEN, server.address, lane)
    try:
        transport = connect(server.address, 0, failures, lane=lane)
        assert process.stdout.readline() == "ready\n"
        server.joined.get(timeout=60)
    finally:
        kill(process)
    error = server.outcome()
    assert isinstance(error, PeerLost)
    assert str(error) == f"rank 1 is gone: its connection to the server at {server.address} broke"
    assert str(failures.first()) == str(error)
    assert [str(reported) for reported in server.membership.reported] == [str(error)]
    assert server.membership.closed
    transport.close()


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_a_reserved_server_serves_that_job_and_no_earlier_one(lane):
    """The workers of an elastic job's last generation, which were frozen, must not get it before those of the next."""
    server = Serving(lane=lane)
    assert reserve(server.address, server.options, "generation 1", 60.0, print) == ""
    assert reserve(server.address, server.options, "generation 2", 60.0, print) == ""
    with pytest.raises(ConfigError, match="rank 0 belongs to job 'generation 1'; this server serves job 'generation 2'"):
        connect(server.address, 0, Failures(), 1, lane, "generation 1")
    connect(server.address, 0, pytest.fail, 1, lane, "generation 2").close()
    assert server.outcome() is None


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_a_server_is_free_again_when_its_launcher_has_ended(lane, monkeypatch):
    """Interrupted between the reservation and the first worker, for example. Its connection ends with it."""
    streams, freed = queue.SimpleQueue(), threading.Event()
    server = Serving(lane=lane)

    def watch(stream, frames, when_ended):
        streams.put(stream)

    monkeypatch.setattr(sys.modules[reserve.__module__], "_watch", watch)
    assert reserve(server.address, server.options, "generation 1", 60.0, freed.set) == ""
    streams.get(timeout=60).close()
    for _ in range(1000):
        with suppress(ConfigError):  # the end of the connection is on its way
            connect(server.address, 0, pytest.fail, 1, lane, "another job").close()
            break
    assert server.outcome() is None


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_who_has_reserved_a_server_hears_of_its_end(lane):
    """The ranks may still have to connect, and would wait for it."""
    server, ended = Serving(lane=lane), threading.Event()
    assert reserve(server.address, server.options, "generation 1", 60.0, ended.set) == ""
    connect(server.address, 0, pytest.fail, 1, lane, "generation 1").close()
    assert server.outcome() is None
    assert ended.wait(60)


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_a_server_is_reserved_when_the_job_in_hand_has_ended(lane):
    server, reserved = Serving(lane=lane, jobs=2), queue.SimpleQueue[str]()
    transport = connect(server.address, 0, print, 2, lane, "generation 1")
    _, on_failure = server.joined.get(timeout=60)
    asking = threading.Thread(target=lambda: reserved.put(reserve(server.address, server.options, "generation 2", 60.0, print)))
    asking.start()
    on_failure(PeerLost("rank 1 is gone"))
    assert str(server.outcome()) == "rank 1 is gone"
    assert reserved.get(timeout=60) == ""
    asking.join()
    transport.close(graceful=False)
    connect(server.address, 0, pytest.fail, 1, lane, "generation 2").close()
    assert server.outcome() is None


@pytest.mark.parametrize("next_job", [("a job", "h:2"), ("another job", "h:1")])
@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_the_next_job_waits_while_one_that_has_failed_is_ended(lane, next_job):
    """Until the control channel has said what the first cause was, which takes long if rank 0 is frozen. A rank of the failed
    job that comes late hears of the failure."""
    server = Serving(lane=lane, jobs=2)
    reported = queue.SimpleQueue()
    server.membership.report = reported.put
    transports = [connect(server.address, rank, print, 3, lane, "a job") for rank in range(2)]
    _, on_failure = server.joined.get(timeout=60)
    transports[1].close(graceful=False)
    assert str(reported.get(timeout=60)).startswith("rank 1 is gone")
    connected = queue.SimpleQueue()
    asking = threading.Thread(target=lambda: connected.put(connect(server.address, 0, pytest.fail, 1, lane, *next_job)))
    asking.start()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        connect(server.address, 2, print, 3, lane, "a job")
    with pytest.raises(queue.Empty):
        connected.get(timeout=0.5)
    on_failure(PeerLost("rank 1 is gone"))
    assert str(server.outcome()) == "rank 1 is gone"
    connected.get(timeout=60).close()
    assert server.outcome() is None
    for transport in transports:
        transport.close(graceful=False)


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "over"])
@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_the_next_job_may_come_while_the_last_one_ends(lane, fails, monkeypatch):
    """It has connected when the job ends, and says hello afterwards."""
    server = Serving(lane=lane, jobs=2)
    transport = connect(server.address, 0, print, 1, lane)
    _, on_failure = server.joined.get(timeout=60)
    comes, may_be_heard = threading.Event(), threading.Event()
    greet = Service._greet

    def late(service, worker, hello):
        comes.set()
        assert may_be_heard.wait(60)
        greet(service, worker, hello)

    monkeypatch.setattr(Service, "_greet", late)
    connected = queue.SimpleQueue()
    asking = threading.Thread(target=lambda: connected.put(connect(server.address, 0, pytest.fail, 1, lane, "", "h:2")))
    asking.start()
    assert comes.wait(60)
    if fails:
        on_failure(PeerLost("rank 1 is gone"))
    else:
        transport.close()
    assert str(server.outcome()) == ("rank 1 is gone" if fails else "None")
    may_be_heard.set()
    connected.get(timeout=60).close()
    assert server.outcome() is None
    transport.close(graceful=False)


def test_a_worker_that_has_died_does_not_begin_its_job_again(monkeypatch):
    """It had greeted the server between two jobs. (The hello of a gRPC call that has ended is not read.)"""
    came, sent = queue.SimpleQueue(), threading.Event()
    serve = Server._serve

    def seen(server, stream, job):
        came.put(stream)
        serve(server, stream, job)

    monkeypatch.setattr(Server, "_serve", seen)
    server = Server("127.0.0.1:0", StreamOptions(TOKEN))
    [dead] = open_streams("the server", server.address, StreamOptions(TOKEN), "a job")
    dead.outbox.put(json_frame(FrameKind.HELLO, WorkerHello(0, 1, 0, "h:1").to_record()), sent.set)
    reading = threading.Thread(target=lambda: list(dead.frames(pytest.fail)))
    reading.start()
    stream = came.get(timeout=60)
    assert sent.wait(60)
    assert not stream.has_ended
    dead.abort()
    reading.join(60)
    dead.close()
    while not stream.has_ended:
        time.sleep(0.01)
    jobs = queue.SimpleQueue()

    def join(hello, job, on_failure):
        jobs.put(job)
        return FakeMembership()

    serving = threading.Thread(target=server.serve_job, args=(join,))
    serving.start()
    connect(server.address, 0, pytest.fail, 1, job="the next job").close()
    serving.join(60)
    server.close()
    assert jobs.get(timeout=60) == "the next job"


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_why_a_server_is_not_reserved(lane):
    server = Serving(lane=lane)
    assert "has another token" in reserve(server.address, StreamOptions("another token", lane), "a job", 60.0, print)
    transport = connect(server.address, 0, print, 1, lane)
    why = reserve(server.address, server.options, "another job", 0.2, print)
    assert why == "it did not answer within 0.2 s; it may be stopped, or serve another job"
    transport.close()
    assert server.outcome() is None
    assert reserve(server.address, server.options, "a job", 60.0, print) == "nobody answers there"
