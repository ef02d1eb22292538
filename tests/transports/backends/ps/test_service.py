"""What a parameter server accepts and refuses, stream by stream; the streams are fed by hand, without a network."""

import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from commsched.core.errors import CommschedError, ManifestMismatch, PeerLost, ProtocolError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.norms import NormsOf
from commsched.core.scheduler import LAST_KEY
from commsched.transports.backend import Contributors
from commsched.transports.backends.ps.frame import RAW, Damaged, Frame, FrameKind, WorkerHello, json_frame
from commsched.transports.backends.ps.send_queue import SendQueue
from commsched.transports.backends.ps.service import Service, ServiceContext
from commsched.transports.backends.ps.stream import Allocate, Altered, StreamBroken

MANIFEST = Manifest((TensorSpec("embedding", (8,), "float32"),))


class Peer:
    """One worker, and the stream by which the service hears it: a payload is put where the service says."""

    def __init__(self, service: Service, name: str = "10.0.0.9:4711", job: str = "") -> None:
        self.peer = name
        self.outbox = SendQueue()
        self._said: queue.SimpleQueue[Frame | Exception | threading.Event | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=service.serve, args=(self, job), daemon=True)
        self.thread.start()

    def frames(self, place: Allocate) -> Iterator[Frame]:
        while (item := self._said.get(timeout=60)) is not None:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, threading.Event):
                item.set()
                continue
            if item.kind in RAW:
                memory = place(item._replace(payload=b""))
                memory[:] = item.payload
                item = item._replace(payload=memory)
                del memory
            yield item
            del item  # as a stream must: see the test of memory

    def send(self, *frames: Frame) -> None:
        """Returns when the service has handled them."""
        for frame in frames:
            self._said.put(frame)
        handled = threading.Event()
        self._said.put(handled)
        assert handled.wait(60)

    def send_last(self, item: Frame | Exception | None) -> list[Frame]:
        """Send what ends the stream; returns what the service still had to say."""
        self._said.put(item)
        heard = self.heard()
        self.thread.join(60)  # with it all is told to others too
        return heard

    def end(self, error: Exception | None = None) -> list[Frame]:
        return self.send_last(error)

    def receive(self) -> Frame:
        return next(self.outbox).frame

    def heard(self) -> list[Frame]:
        return [parcel.frame for parcel in self.outbox]


class World:
    """A service of two ranks, and what it says."""

    def __init__(self, world_size: int | None = 2) -> None:
        self.failures: list[CommschedError] = []
        self.hellos: list[WorkerHello] = []
        self.all_left = threading.Event()
        self.service = Service(
            ServiceContext(
                "server 1",
                self.failures.append,
                None if world_size is None else Contributors.all_ranks(world_size),
                on_first_hello=self.hellos.append,
                on_all_left=self.all_left.set,
            )
        )
        self.peers: list[Peer] = []

    def connect(self, rank: int, world_size: int = 2) -> Peer:
        """A peer that was welcomed and has announced its tensors."""
        peer = Peer(self.service)
        self.peers.append(peer)
        peer.send(hello(rank, world_size), json_frame(FrameKind.GROUP, MANIFEST.to_record()))
        assert peer.receive().kind is FrameKind.HELLO
        return peer

    def close(self) -> None:
        self.service.close()
        for peer in self.peers:
            peer.end()
            peer.thread.join(60)
            assert not peer.thread.is_alive()


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def hello(rank: int, world_size: int = 2, flow: int = 0, flows: int = 1) -> Frame:
    greeting = WorkerHello(rank, world_size, 1, "10.0.0.1:29600", flow=flow, flows=flows)
    return json_frame(FrameKind.HELLO, greeting.to_record())


def push(partition: int, step: int = 0, value: float = 1.0) -> Frame:
    start = partition * 4
    payload = np.float32(value).tobytes()
    return Frame(FrameKind.PUSH, 0, step, partition, "float32", start, start + 4, payload, order=partition)


def the_error(frames: list[Frame]) -> str:
    [error] = [frame.json() for frame in frames if frame.kind is FrameKind.ERROR]
    return f"{error['type']}: {error['message']}"


def test_replies_leave_in_order_of_priority(world):
    first, second = world.connect(0), world.connect(1)
    first.send(*[push(partition) for partition in (5, 0, 3)])
    second.send(*[push(partition, value=3.0) for partition in (3, 5, 0)])
    for peer in (first, second):
        got = [peer.receive() for _ in range(3)]
        assert [(frame.kind, frame.partition, frame.order) for frame in got] == [(FrameKind.RESULT, n, n) for n in (0, 3, 5)]
        assert {np.frombuffer(frame.payload, np.float32)[0] for frame in got} == {2.0}


def test_rows_of_norms_leave_before_averages_although_they_are_asked_for_last(world):
    rows = Manifest((TensorSpec("row", (3,), "float64"),), norms=NormsOf(0, 0, (2.0,)))
    asked = Frame(FrameKind.PUSH, 1, 0, 0, "float64", 0, 24, bytes(24), order=LAST_KEY)
    peers = [world.connect(0), world.connect(1)]
    for peer in peers:
        peer.send(json_frame(FrameKind.GROUP, rows.to_record(), 1))
    for peer in peers:
        peer.send(push(3, value=4.0), push(5, value=3.0), asked)
    for peer in peers:
        got = [peer.receive() for _ in range(3)]
        assert [(frame.group, frame.partition, frame.order) for frame in got] == [(1, 0, 0), (0, 3, 3), (0, 5, 5)]
        assert np.frombuffer(got[0].payload).tolist() == [0, 2, 25]  # step 0, two elements, 9 + 16


def test_a_row_of_norms_that_is_to_leave_keeps_back_later_pushes_of_the_group_that_it_measures(world):
    rows = Manifest((TensorSpec("row", (3,), "float64"),), norms=NormsOf(0, 0, (2.0,)))
    asked = Frame(FrameKind.PUSH, 1, 4, 0, "float64", 0, 24, bytes(24), order=LAST_KEY)
    for peer in (world.connect(0), world.connect(1)):
        peer.send(json_frame(FrameKind.GROUP, rows.to_record(), 1), asked)
    way = world.service.right_of_way
    assert not way.is_free_for_push((0, 5))
    assert way.is_free_for_push((0, 4))
    assert way.is_free_for_push((1, 5))


def test_all_workers_are_sent_the_same_memory_which_is_none_of_the_next_step(world):
    peers = [world.connect(0), world.connect(1)]
    frames = []
    for step in range(3):
        for peer in peers:
            peer.send(push(0, step, value=step))
        results = [peer.receive() for peer in peers]
        assert results[0].payload is results[1].payload
        frames.append(results[0])
    assert [np.frombuffer(frame.payload, np.float32)[0] for frame in frames] == [0.0, 1.0, 2.0]


def test_memory_is_used_again_once_all_were_sent_its_average(world):
    peers = [world.connect(0), world.connect(1)]
    for step in range(50):
        for peer in peers:
            peer.send(push(0, step))
        for peer in peers:
            peer.receive()
    assert world.service.aggregator.buffers._most_bytes <= 4 * 4  # of the 200 payloads of 4 bytes


def test_no_memory_is_held_while_nothing_comes():
    world = World(1)
    peer = world.connect(0, 1)
    peer.send(push(0))
    assert peer.receive().payload
    assert len(world.service.aggregator.buffers._returned) == 1
    world.close()


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (hello(0, 3), "ConfigError: rank 0 says there are 3 ranks; this job has 2"),
        (hello(2, 2), "ConfigError: rank 2 is not below its world size of 2"),
        (
            json_frame(FrameKind.HELLO, WorkerHello(0, 2, 1, None, (0, 4), 5).to_record()),
            "ConfigError: rank 0 says that the members are (0, 4) of 5; they are (0, 1) of 2",
        ),
        (hello(1), "ConfigError: rank 1 is connected already; two processes claim to be it"),
        (
            json_frame(FrameKind.HELLO, WorkerHello(1, 2, 0, "10.0.0.1:29600").to_record()),
            "ConfigError: servers 1 and 0 are one process: it is named twice in servers",
        ),
        (
            json_frame(FrameKind.HELLO, WorkerHello(1, 2, 1, "10.0.0.1:5").to_record()),
            "ConfigError: rank 1 is connected already; two processes claim to be it, or two jobs without names were given one "
            "server: rank 0 of one is at 10.0.0.1:29600, of the other at 10.0.0.1:5",
        ),
    ],
)
def test_a_worker_of_another_job_is_refused_and_this_job_goes_on(world, greeting, why):
    mine = world.connect(1)
    assert the_error(Peer(world.service).send_last(greeting)) == why
    mine.send(push(0))
    assert world.failures == []


@pytest.mark.parametrize("broken", [ProtocolError("no message"), Damaged(push(0), 4, 1, 2), Altered("a bit")])
def test_what_a_worker_of_another_job_sends_before_its_hello_does_not_end_this_job(broken: Exception) -> None:
    service = Service(ServiceContext("server 1", pytest.fail, Contributors.all_ranks(1), job="A"))
    Peer(service, job="B").end(broken)
    mine = Peer(service, job="A")
    mine.send(hello(0, 1))
    assert mine.receive().kind is FrameKind.HELLO
    service.close()
    mine.end()


@pytest.mark.parametrize("told", [None, "A"])
def test_a_server_takes_workers_of_one_job_only_the_first_if_none_was_said(told):
    service = Service(ServiceContext("server 1", pytest.fail, Contributors.all_ranks(2), job=told))
    mine = Peer(service, job="A")
    mine.send(hello(0))
    assert service.job == "A"
    for job, name in (("B", "job 'B'"), ("", "a job without a name")):
        assert the_error(Peer(service, job=job).send_last(hello(1))) == (
            f"ConfigError: rank 1 belongs to {name}; this server serves job 'A'"
        )
    other = Peer(service, job="A")
    other.send(hello(1))
    assert other.receive().kind is FrameKind.HELLO
    service.close()
    for each in (mine, other):
        each.end()
        each.thread.join(60)


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (WorkerHello(0, 3, 1, None, (4, 6, 8), 9), "ConfigError: rank 4 says there are 3 ranks; this job has 2"),
        (
            WorkerHello(0, 2, 1, None, (4, 7), 5),
            "ConfigError: rank 4 says that the members are (4, 7) of 5; they are (4, 6) of 5",
        ),
        (WorkerHello(1, 2, 1, None, (4, 6), 5), "ConfigError: rank 6 is connected already; two processes claim to be it"),
    ],
)
def test_a_host_is_called_by_the_rank_that_leads_it(greeting, why):
    service = Service(ServiceContext("server 1", pytest.fail, Contributors((4, 6), 5)))
    mine = Peer(service)
    mine.send(json_frame(FrameKind.HELLO, WorkerHello(1, 2, 1, None, (4, 6), 5).to_record()))
    assert the_error(Peer(service).send_last(json_frame(FrameKind.HELLO, greeting.to_record()))) == why
    service.close()
    mine.end()
    mine.thread.join(60)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (ProtocolError("a message begins with b'HTTP'"), "a message begins with b'HTTP'"),
        (hello(0), "HELLO out of turn"),
        (Frame(FrameKind.ACK), "ACK out of turn"),
        (push(1)._replace(kind=FrameKind.RESULT), "RESULT out of turn"),
        (json_frame(FrameKind.LEFT, 2), "'2' is not a rank"),
        (json_frame(FrameKind.LEFT, []), "'[]' is not a rank"),
        (json_frame(FrameKind.GROUP, {"a": 1}, group=1), "not a manifest"),
        (json_frame(FrameKind.RELEASED, [0, "1"]), "\"[0, '1']\" are not groups"),
        (json_frame(FrameKind.RELEASED, [1]), "rank 1 released group 1 without announcing the group"),
        (push(8), "rank 1 pushed float32 bytes 32 to 36 of step 0, but that buffer has 32 bytes"),
        (push(0), "rank 1 pushed partition 0 of step 0, tensor 'embedding', twice"),
    ],
)
def test_a_worker_that_breaks_the_protocol_is_named_to_all(world, message, why):
    good, bad = world.connect(0), world.connect(1)
    bad.send(push(0))
    told = [the_error(bad.send_last(message)), the_error(good.heard())]
    [failure] = world.failures
    assert isinstance(failure, ProtocolError)
    assert str(failure).startswith("server 1 got from rank 1 (10.0.0.9:4711): ")
    assert why in str(failure)
    assert told == [f"ProtocolError: {failure}"] * 2


@pytest.mark.parametrize("message", [ProtocolError("garbage"), push(0), Frame(FrameKind.GOODBYE)])
def test_the_first_message_must_be_a_hello(world, message):
    Peer(world.service).send_last(message)
    [failure] = world.failures
    assert isinstance(failure, ProtocolError)
    assert str(failure).startswith("server 1 got from 10.0.0.9:4711: ")


def test_differing_tensors_are_named_before_data_moves(world):
    peer, other = world.connect(0), Peer(world.service)
    other.send(hello(1))
    theirs = Manifest((TensorSpec("embedding", (9,), "float32"),))
    other.send_last(json_frame(FrameKind.GROUP, theirs.to_record()))
    [failure] = world.failures
    assert isinstance(failure, ManifestMismatch)
    assert str(failure) == "tensor 0 is 'embedding' float32[8] on rank 0 but 'embedding' float32[9] on rank 1"
    assert the_error(peer.heard()) == f"ManifestMismatch: {failure}"


@pytest.mark.parametrize("how", [None, StreamBroken("reset")])
def test_a_stream_that_ends_without_a_goodbye_is_a_lost_rank(world, how):
    good, lost = world.connect(0), world.connect(1)
    lost.end(how)
    assert the_error(good.heard()) == ("PeerLost: rank 1 is gone: its connection to server 1 broke")
    assert [type(failure) for failure in world.failures] == [PeerLost]


def test_a_stream_that_ends_before_its_hello_is_nobody(world):
    Peer(world.service).end(StreamBroken("reset"))
    assert world.failures == []


def test_a_goodbye_with_work_open_fails_those_who_wait(world):
    good, leaver = world.connect(0), world.connect(1)
    good.send(push(0))
    leaver.send_last(Frame(FrameKind.GOODBYE))
    assert "rank 1 left before its first step; the average of tensor 'embedding' of step 0 waits for it" in str(world.failures)


def test_that_a_rank_left_may_be_told_by_another(world):
    good, teller = world.connect(0), world.connect(1)
    good.send(push(0))
    teller.send(json_frame(FrameKind.LEFT, 1))
    assert "rank 1 left before its first step; the average of tensor 'embedding' of step 0 waits for it" in str(world.failures)


def test_the_job_ends_when_every_rank_has_said_goodbye(world):
    for rank in range(2):
        assert not world.all_left.is_set()
        assert world.connect(rank).send_last(Frame(FrameKind.GOODBYE)) == []
    assert world.all_left.wait(60)
    assert world.failures == []


def test_the_first_hello_says_how_many_ranks_there_are():
    world = World(world_size=None)
    world.connect(2, world_size=3)
    world.connect(0, world_size=3)
    assert world.hellos == [WorkerHello(2, 3, 1, "10.0.0.1:29600")]
    why = the_error(Peer(world.service).send_last(hello(1, 2)))
    assert why == "ConfigError: rank 1 says there are 2 ranks; this job has 3"
    world.close()


def test_ranks_are_named_by_what_the_first_hello_says_they_are():
    world = World(world_size=None)
    peers = []
    for rank in range(2):
        peers.append(Peer(world.service))
        world.peers.append(peers[-1])
        greeting = json_frame(FrameKind.HELLO, WorkerHello(rank, 2, 1, None, (3, 7), 8).to_record())
        peers[-1].send(greeting, json_frame(FrameKind.GROUP, MANIFEST.to_record()))
    peers[0].send(push(0, value=8.0))
    peers[1].send(push(0, value=16.0))
    assert peers[0].receive().kind is FrameKind.HELLO
    assert np.frombuffer(peers[0].receive().payload, np.float32)[0] == 3.0
    peers[1].end()
    assert str(world.failures[0]) == "rank 7 is gone: its connection to server 1 broke"
    world.close()


def test_a_failure_elsewhere_is_told_to_all_and_to_who_comes_later(world):
    peer = world.connect(0)
    world.service.fail(PeerLost("rank 7 is gone"))
    world.service.fail(PeerLost("rank 8 is gone"))
    assert the_error(peer.heard()) == "PeerLost: rank 7 is gone"
    assert the_error(Peer(world.service).send_last(hello(1))) == "PeerLost: rank 7 is gone"
    assert [str(failure) for failure in world.failures] == ["rank 7 is gone"]


def test_closing_says_goodbye_and_takes_no_more_streams(world):
    peer = world.connect(0)
    world.service.close()
    assert [frame.kind for frame in peer.heard()] == [FrameKind.GOODBYE]
    assert Peer(world.service).heard() == []
    peer.end()
    assert world.failures == []


# --- several flows of a rank ---


@pytest.fixture
def two_flows(world):
    """For each rank its two streams, which are welcomed and have announced its tensors."""
    ranks = [[Peer(world.service), Peer(world.service)] for _ in range(2)]
    for rank, peers in enumerate(ranks):
        world.peers += peers
        for flow in (1, 0):
            peers[flow].send(hello(rank, flow=flow, flows=2), json_frame(FrameKind.GROUP, MANIFEST.to_record()))
            assert peers[flow].receive().kind is FrameKind.HELLO
    return ranks


def test_pushes_on_any_flow_are_averaged_and_replies_leave_on_the_flow_that_is_free(world, two_flows):
    (a, b), (c, d) = two_flows
    a.send(push(0), push(5))
    b.send(push(3))
    d.send(*[push(partition, value=3.0) for partition in (5, 0, 3)])
    assert [peer.receive().partition for peer in (b, a, a)] == [0, 3, 5]
    assert [peer.receive().partition for peer in (d, c, d)] == [0, 3, 5]
    assert world.failures == []


def test_a_group_is_announced_on_each_flow_once(world, two_flows):
    (a, _), (c, _) = two_flows
    told = the_error(a.send_last(json_frame(FrameKind.GROUP, MANIFEST.to_record())))
    assert told.endswith("rank 0 announced group 0 twice")
    assert the_error(c.heard()) == told


def test_a_row_of_norms_is_made_when_its_push_has_come_on_all_flows(world, two_flows):
    rows = Manifest((TensorSpec("row", (3,), "float64"),), norms=NormsOf(0, 0, (2.0,)))
    asked = Frame(FrameKind.PUSH, 1, 0, 0, "float64", 0, 24, bytes(24), order=LAST_KEY)
    for peers in two_flows:
        for peer in peers:
            peer.send(json_frame(FrameKind.GROUP, rows.to_record(), 1))
    (a, b), (c, d) = two_flows
    for peer in (a, c, d):
        peer.send(asked)
    for peers in two_flows:  # rank 0's on the flow on which it has not asked yet, rank 1's on any
        peers[1].send(push(3, value=4.0))
    for peer in (a, c):
        assert peer.receive().partition == 3
        assert peer.outbox.next_now() is None
    b.send(asked)
    for peer in (b, d):
        got = peer.receive()
        assert got.group == 1
        assert np.frombuffer(got.payload).tolist() == [0, 1, 16]
    assert world.failures == []


def test_a_rank_has_left_when_it_has_said_so_on_all_flows(world, two_flows):
    (a, _), (c, d) = two_flows
    a.send(push(0))
    c.send(json_frame(FrameKind.LEFT, 1))
    d.send(push(0))
    assert a.receive().kind is FrameKind.RESULT
    a.send(push(1))
    assert world.failures == []
    d.send(json_frame(FrameKind.LEFT, 1))
    assert "rank 1 left after step 0; the average of tensor 'embedding' of step 0 waits for it" in str(world.failures)


def test_the_job_ends_when_every_rank_has_said_goodbye_on_all_flows(world, two_flows):
    *others, last = [peer for peers in two_flows for peer in peers]
    for peer in others:
        peer.send_last(Frame(FrameKind.GOODBYE))
        assert not world.all_left.is_set()
    last.send_last(Frame(FrameKind.GOODBYE))
    assert world.all_left.wait(60)
    assert world.failures == []


def test_a_lost_flow_is_a_lost_rank(world, two_flows):
    (a, b), (_, d) = two_flows
    d.end(StreamBroken("reset"))
    for peer in (a, b):
        assert the_error(peer.heard()) == "PeerLost: rank 1 is gone: its connection to server 1 broke"
    assert [type(failure) for failure in world.failures] == [PeerLost]


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (hello(1, flow=0, flows=3), "ConfigError: rank 1 has flows=3, but rank 0 has flows=2; give all ranks the same"),
        (hello(1), "ConfigError: rank 1 has flows=1, but rank 0 has flows=2; give all ranks the same"),
        (hello(0, flow=1, flows=2), "ConfigError: rank 0 is connected already; two processes claim to be it"),
    ],
)
def test_flows_that_do_not_fit_are_refused_and_this_job_goes_on(world, two_flows, greeting, why):
    assert the_error(Peer(world.service).send_last(greeting)) == why
    two_flows[0][0].send(push(0))
    assert world.failures == []


def test_a_second_process_with_the_rank_of_another_gets_no_flow_of_it(world):
    mine = Peer(world.service)
    world.peers.append(mine)
    mine.send(hello(1, flow=0, flows=2))
    other = WorkerHello(1, 2, 1, "10.0.0.1:5", flow=1, flows=2)
    assert "two processes claim to be it" in the_error(
        Peer(world.service).send_last(json_frame(FrameKind.HELLO, other.to_record()))
    )
    assert world.failures == []
