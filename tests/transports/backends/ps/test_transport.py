"""PsTransport over real networks; its ranks are threads."""

import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import monotonic

import grpc
import numpy as np
import pytest

from commsched.cli.launch import free_port
from commsched.core.core import Core
from commsched.core.errors import ClosedError, CommschedError, ConfigError, PeerLost, PeerTimeout
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.norms import NormsOf
from commsched.core.plan import Partition
from commsched.core.scheduler import SchedulerConfig
from commsched.core.task import CommTask
from commsched.net.rpc import Call, make_channel
from commsched.testing.check_transport import check_averages, check_back_to_back, check_leaver, check_results, check_transport
from commsched.testing.checked_world import Threads, world_of
from commsched.transports.backends.ps import grpc_lane as grpc_port
from commsched.transports.backends.ps import lane as lane_module
from commsched.transports.backends.ps import open_transport, tcp_lane
from commsched.transports.backends.ps import transport as ps_transport
from commsched.transports.backends.ps.frame import MAX_MESSAGE_BYTES, Frame, FrameKind, WorkerHello, encode, json_frame
from commsched.transports.backends.ps.grpc_lane import METHOD
from commsched.transports.backends.ps.lane import RemoteLane
from commsched.transports.backends.ps.right_of_way import RightOfWay, Yielding
from commsched.transports.backends.ps.send_queue import SendQueue
from commsched.transports.backends.ps.server import Shard
from commsched.transports.backends.ps.service import Service
from commsched.transports.backends.ps.stream import Stream, StreamOptions, open_port, open_streams
from commsched.transports.backends.ps.transport import PsTransport

from ...worlds import TOKEN, a_context, a_shard, embedded_world, open_ps, separate_world

MANIFEST = Manifest((TensorSpec("weight", (256,), "float32"),))


class Failures:
    """An OnFailure that can be waited for."""

    def __init__(self) -> None:
        self._errors: list[CommschedError] = []
        self._changed = threading.Condition()

    def __call__(self, error: CommschedError) -> None:
        with self._changed:
            self._errors.append(error)
            self._changed.notify_all()

    def first(self) -> CommschedError:
        with self._changed:
            assert self._changed.wait_for(lambda: self._errors, 60), "no failure was told"
            return self._errors[0]

    def none(self) -> bool:
        return not self._errors


class Ended:
    """A Completion that can be waited for."""

    def __init__(self) -> None:
        self.sent, self.done = threading.Event(), threading.Event()

    def on_sent(self, task: CommTask) -> None:
        assert not self.done.is_set()
        self.sent.set()

    def on_done(self, task: CommTask) -> None:
        self.done.set()


def make_task(
    partition: int = 0,
    step: int = 0,
    value: float = 1.0,
    *,
    data: memoryview | None = None,
    dtype: str = "float32",
    server: int = 0,
) -> CommTask:
    if data is None:
        data = memoryview(bytearray(np.full(64, value, np.float32).tobytes()))
    where = Partition(partition, dtype, len(data) * partition, len(data) * (partition + 1), (0,), server)
    return CommTask(0, step, where, data)


@pytest.fixture(params=["tcp", "grpc"])
def lane(request) -> str:
    return request.param


@pytest.fixture
def server(lane):
    """A server of one worker that no rank hosts."""
    shard = a_shard(None, Failures(), lane=lane)
    yield shard
    shard.close()


def connect(address: str, lane: str, on_failure=None, *, rank=0, world_size=1, token=TOKEN, within=60.0) -> PsTransport:
    on_failure = on_failure or Failures()
    context = a_context(rank, world_size, on_failure, lane=lane, join_within=within)
    return open_ps(replace(context, token=token), [address])


def test_conformance_embedded(lane):
    sizes, rounds = ((1, 2, 3, 5), 40) if lane == "tcp" else ((2, 4), 20)
    check_transport(partial(embedded_world, lane=lane), world_sizes=sizes, rounds=rounds)


def test_conformance_with_several_flows():
    check_transport(world_of(open_transport, flows=3), world_sizes=(1, 2, 3), rounds=20)


def test_averages_and_norms_with_a_separate_server_and_several_flows():
    check_results(lambda: Threads(partial(separate_world, flows=2), 2), rounds=10)
    check_leaver(partial(separate_world, flows=2))


def test_flows_connect_to_the_addresses_of_a_server_in_turn(monkeypatch):
    tried = []
    monkeypatch.setattr(tcp_lane.TcpStream, "_connect", lambda stream: tried.append(stream._address))
    for stream in open_streams("a server", "10.0.0.9:1+10.1.0.9:2", StreamOptions(TOKEN), "a job", flows=4):
        list(stream.frames(memoryview))
    assert tried == ["10.0.0.9:1", "10.1.0.9:2"] * 2


def test_a_server_listens_at_each_of_its_addresses():
    both = "127.0.0.1:0+127.0.0.2:0"
    shard = a_shard(2, Failures(), address=both)
    try:
        first, second = shard.address.split("+")
        assert (first.rpartition(":")[0], second.rpartition(":")[0]) == ("127.0.0.1", "127.0.0.2")
        with ThreadPoolExecutor(2) as threads:  # a server welcomes its ranks when all have come
            ranks = [threads.submit(connect, each, "tcp", rank=rank, world_size=2) for rank, each in enumerate((first, second))]
        for rank in ranks:
            rank.result().close()
        with pytest.raises(ConfigError, match="the port is taken"):
            a_shard(2, pytest.fail, address=f"127.0.0.3:0+{shard.address}")
    finally:
        shard.close()


def test_several_addresses_over_grpc_are_refused():
    with pytest.raises(ConfigError, match="is several addresses, which need lane='tcp'"):
        a_shard(1, pytest.fail, address="127.0.0.1:0+127.0.0.2:0", lane="grpc")
    with pytest.raises(ConfigError, match="is several addresses, which need lane='tcp'"):
        open_ps(a_context(0, 1, pytest.fail, lane="grpc"), ["127.0.0.1:1+127.0.0.2:1"])


def test_conformance_with_a_separate_server():
    check_transport(partial(separate_world, servers=1), world_sizes=(1, 2, 3), rounds=20)


@pytest.mark.parametrize(("servers", "lane"), [(5, "tcp"), (2, "grpc")])
def test_averages_with_several_separate_servers(servers, lane):
    for world_size in (2, 3):
        check_results(lambda size=world_size: Threads(partial(separate_world, lane=lane, servers=servers), size), rounds=10)
    check_leaver(partial(separate_world, lane=lane, servers=servers))


def test_averages_over_a_capped_link(lane):
    check_averages(lambda: Threads(partial(embedded_world, lane=lane, rate_bytes_per_second=20e6), 3))


@pytest.mark.parametrize("world", [embedded_world, separate_world])
def test_many_rounds_with_a_slow_rank(world):
    check_back_to_back(lambda: Threads(world, 3, 300.0), 500)


def test_a_capped_link_is_not_faster_than_its_rate(lane):
    numel, rate = 100_000, 8e6
    manifest = Manifest((TensorSpec("weight", (numel,), "float32"),))
    failures = [Failures(), Failures()]
    with embedded_world(failures, lane=lane, rate_bytes_per_second=rate) as transports:
        for transport in transports:
            transport.add_group(0, manifest)
        began = monotonic()
        ends = [Ended(), Ended()]
        for transport, ended in zip(transports, ends):
            partition = Partition(0, "float32", 0, 4 * numel, (0,))
            transport.start(CommTask(0, 0, partition, memoryview(bytearray(4 * numel))), ended)
        for ended in ends:
            assert ended.done.wait(60)
        # Rank 1 pushes to rank 0's shard, and is then sent the average: its bytes cross two links one after another.
        assert monotonic() - began >= 2 * 4 * numel / rate


def test_replies_give_way_while_a_push_of_their_rank_waits_for_a_receiver_and_leave_after_it(monkeypatch):
    big_bytes = 2**26  # more than the kernel holds
    manifest = Manifest((TensorSpec("front", (256,), "uint8"), TensorSpec("big", (big_bytes,), "uint8")))
    stopped, resumed, gave_way = threading.Event(), threading.Event(), threading.Event()
    place, is_free_for = Service._place, RightOfWay.is_free_for_reply

    def place_when_resumed(service, worker, frame):
        if frame.partition == 1 and not resumed.is_set():
            stopped.set()
            assert resumed.wait(60)
        return place(service, worker, frame)

    def watched(way: RightOfWay, of: Yielding, step: tuple[int, int]) -> bool:
        free = is_free_for(way, of, step)
        if way is transports[0]._way and not free:
            gave_way.set()
        return free

    def front() -> CommTask:
        return CommTask(0, 0, Partition(0, "uint8", 0, 256, (0,)), memoryview(bytearray(256)))

    def big() -> CommTask:
        return CommTask(0, 0, Partition(1, "uint8", 256, 256 + big_bytes, (1,), server=1), memoryview(bytearray(big_bytes)))

    monkeypatch.setattr(Service, "_place", place_when_resumed)
    failures = [Failures(), Failures()]
    with embedded_world(failures) as transports:
        monkeypatch.setattr(RightOfWay, "is_free_for_reply", watched)
        for transport in transports:
            transport.add_group(0, manifest)
        bigs, fronts = [Ended(), Ended()], [Ended(), Ended()]
        transports[0].start(big(), bigs[0])
        assert stopped.wait(60)  # rank 1's shard has the header, and reads no more
        for transport, ended in zip(transports, fronts):
            transport.start(front(), ended)
        assert fronts[0].done.wait(60)
        assert gave_way.wait(60)  # the reply to rank 1 was about to leave
        assert not fronts[1].done.is_set()
        assert not bigs[0].sent.is_set()
        resumed.set()
        assert fronts[1].done.wait(60)
        assert bigs[0].sent.is_set()
        transports[1].start(big(), bigs[1])
        assert all(ended.done.wait(60) for ended in bigs)
    assert all(told.none() for told in failures)


def test_a_rank_that_is_behind_gets_its_average_while_a_push_of_a_later_step_waits(monkeypatch):
    big_bytes = 2**26  # more than the kernel holds
    manifest = Manifest((TensorSpec("front", (256,), "uint8"), TensorSpec("big", (big_bytes,), "uint8")))
    stopped, resumed = threading.Event(), threading.Event()
    place = Service._place

    def place_when_resumed(service, worker, frame):
        if frame.partition == 1 and not resumed.is_set():
            stopped.set()
            assert resumed.wait(60)
        return place(service, worker, frame)

    def front() -> CommTask:
        return CommTask(0, 0, Partition(0, "uint8", 0, 256, (0,)), memoryview(bytearray(256)))

    def big() -> CommTask:
        return CommTask(0, 1, Partition(1, "uint8", 256, 256 + big_bytes, (1,), server=1), memoryview(bytearray(big_bytes)))

    monkeypatch.setattr(Service, "_place", place_when_resumed)
    failures = [Failures(), Failures()]
    with embedded_world(failures) as transports:
        for transport in transports:
            transport.add_group(0, manifest)
        bigs, fronts = [Ended(), Ended()], [Ended(), Ended()]
        transports[0].start(front(), fronts[0])
        transports[0].start(big(), bigs[0])
        assert stopped.wait(60)  # rank 1's shard has the header, and reads no more
        transports[1].start(front(), fronts[1])
        assert fronts[1].done.wait(60)
        assert not bigs[0].sent.is_set()
        resumed.set()
        transports[1].start(big(), bigs[1])
        assert all(ended.done.wait(60) for ended in bigs)
    assert all(told.none() for told in failures)


def test_a_push_of_a_later_step_waits_for_an_average_whose_receiver_is_behind(monkeypatch):
    big_bytes = 2**26  # more than the kernel holds
    manifest = Manifest((TensorSpec("big", (big_bytes,), "uint8"), TensorSpec("other", (256,), "uint8")))
    receives, resumed, gave_way = threading.Event(), threading.Event(), threading.Event()
    pushed: list[tuple[int, int]] = []
    destination, push, is_free_for = PsTransport.destination, Service._push, RightOfWay.is_free_for_push

    def destination_when_resumed(transport, server, frame):
        if transport is transports[1] and frame.partition == 0:
            receives.set()
            assert resumed.wait(60)
        return destination(transport, server, frame)

    def noted(service, worker, rank, frame):
        if rank == 0:
            pushed.append((frame.step, frame.partition))
        push(service, worker, rank, frame)

    def watched(way: RightOfWay, step: tuple[int, int]) -> bool:
        free = is_free_for(way, step)
        if way is transports[0]._way and not free:
            gave_way.set()
        return free

    def big() -> CommTask:
        return CommTask(0, 0, Partition(0, "uint8", 0, big_bytes, (0,)), memoryview(bytearray(big_bytes)))

    def other() -> CommTask:
        at = Partition(1, "uint8", big_bytes, big_bytes + 256, (1,), server=1)
        return CommTask(0, 1, at, memoryview(bytearray(256)))

    monkeypatch.setattr(PsTransport, "destination", destination_when_resumed)
    monkeypatch.setattr(Service, "_push", noted)
    failures = [Failures(), Failures()]
    with embedded_world(failures) as transports:
        monkeypatch.setattr(RightOfWay, "is_free_for_push", watched)
        for transport in transports:
            transport.add_group(0, manifest)
        bigs, others = [Ended(), Ended()], [Ended(), Ended()]
        for transport, ended in zip(transports, bigs):
            transport.start(big(), ended)  # rank 0 averages it
        assert receives.wait(60)  # rank 1 has the header of the average, and reads no more
        assert bigs[0].done.wait(60)
        transports[0].start(other(), others[0])
        assert gave_way.wait(60)
        assert not pushed
        resumed.set()
        assert bigs[1].done.wait(60)
        transports[1].start(other(), others[1])
        assert all(ended.done.wait(60) for ended in others)
        assert pushed == [(1, 1)]
    assert all(told.none() for told in failures)


@pytest.mark.parametrize("flows", [1, 2])
def test_a_row_of_norms_is_pushed_as_a_message_of_the_group_that_it_measures(monkeypatch, flows):
    rows = Manifest((TensorSpec("a", (3,), "float64"), TensorSpec("b", (3,), "float64")), norms=NormsOf(0, 0, (2.0,)))
    put, about, began = SendQueue.put, [], []

    def noted(outbox, frame, *args, **options):
        about.append((frame.kind, frame.group, options.get("about")))
        put(outbox, frame, *args, **options)

    def row() -> CommTask:
        return CommTask(1, 0, Partition(1, "float64", 24, 48, (1,), server=1), memoryview(bytearray(24)))

    monkeypatch.setattr(SendQueue, "put", noted)
    monkeypatch.setattr(RightOfWay, "push_begins", lambda way, step: began.append(step))
    monkeypatch.setattr(RightOfWay, "push_left", lambda way: None)
    failures, ended = [Failures(), Failures()], [Ended(), Ended()]
    with embedded_world(failures, flows=flows) as transports:
        for transport in transports:
            transport.add_group(0, MANIFEST)
            transport.add_group(1, rows)
        for transport, each in zip(transports, ended):
            transport.start(row(), each)
        assert all(each.done.wait(60) for each in ended)
        assert began == [(0, 0)]  # of rank 0: rank 1 has that shard itself
        assert about == [(FrameKind.PUSH, 1, 0)] * flows + [(FrameKind.RESULT, 1, 0)]
        for transport in transports:
            transport.release(1)
            transport.add_group(2, MANIFEST)
        assert transports[0]._lanes[1]._rows == {}
    assert all(told.none() for told in failures)


def test_partitions_are_spread_over_all_servers(monkeypatch):
    pushed: Counter[tuple[int, int]] = Counter()
    push = PsTransport.start

    def noted(transport, task, completion):
        pushed[transport.rank, task.partition.server] += task.nbytes
        push(transport, task, completion)

    monkeypatch.setattr(PsTransport, "start", noted)
    failures = [Failures(), Failures()]
    with embedded_world(failures) as transports:
        cores = [Core(transport, SchedulerConfig(1000, 10_000)) for transport in transports]
        manifest = Manifest((TensorSpec("w", (10_000,), "uint8"),))
        for core in cores:
            group = core.add_group(core.cut(manifest, core.config), {"uint8": memoryview(bytearray(10_000))})
            group.begin_step()
            group.notify_ready(0)
        for core in cores:
            core.drain()
            core.close()
    assert pushed == {(rank, server): 5000 for rank in range(2) for server in range(2)}


def test_a_partition_of_a_server_that_is_not_there_is_refused(server, lane):
    transport = connect(server.address, lane)
    transport.add_group(0, MANIFEST)
    with pytest.raises(ValueError, match=r"partition 0 .* is for server 1 of 1: its plan is for other servers"):
        transport.start(make_task(server=1), Ended())
    transport.close()


def test_credit_comes_back_before_the_other_rank_has_started(server, lane):
    transport = connect(server.address, lane, world_size=2)
    transport.add_group(0, MANIFEST)
    ended = Ended()
    transport.start(make_task(), ended)
    assert ended.sent.wait(60)
    assert not ended.done.is_set()
    transport.close()


def test_another_token_is_one_clear_line(server, lane):
    with pytest.raises(ConfigError) as raised:
        connect(server.address, lane, token="guess")
    assert str(raised.value) == f"server 0 at {server.address} has another token; set the same COMMSCHED_TOKEN everywhere"
    assert "guess" not in str(raised.value)


def test_another_world_size_is_one_clear_line(server, lane):
    first = connect(server.address, lane, world_size=2)
    with pytest.raises(ConfigError, match="rank 1 says there are 3 ranks; this job has 2"):
        connect(server.address, lane, rank=1, world_size=3)
    first.close()


def test_a_server_that_does_not_come_up_is_named(lane):
    probe = a_shard(1, Failures(), lane=lane)
    probe.close()
    with pytest.raises(PeerTimeout) as raised:
        connect(probe.address, lane, within=0.0)
    assert (
        str(raised.value)
        == f"server 0 at {probe.address} did not answer within 0 s (is it up, with the same lane and security?)"
    )


def test_why_a_rank_cannot_start_is_told_before_its_other_connections_end(lane):
    heard, told = Failures(), []
    reached = a_shard(2, heard, lane=lane)
    refuses = a_shard(2, Failures(), token="another token", lane=lane)
    context = a_context(1, 2, Failures(), lane=lane)
    context = replace(context, could_not_start=lambda error: told.append((type(error), heard.none())))
    with pytest.raises(ConfigError, match=r"server 1 at .* has another token"):
        open_ps(context, [reached.address, refuses.address])
    assert told == [(ConfigError, True)]
    assert isinstance(heard.first(), PeerLost)  # the connection did end
    reached.close()
    refuses.close()


def test_a_rank_over_grpc_asks_whether_a_server_over_tcp_has_its_lane():
    server = a_shard(1, pytest.fail)
    with pytest.raises(PeerTimeout, match=r"\(is it up, with the same lane and security\?\)"):
        connect(server.address, "grpc", within=0.0)
    server.close()


def test_a_server_may_come_up_after_its_workers(lane, monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    late: list[Shard] = []
    wait_connected = RemoteLane.wait_connected

    def start_and_wait(self: RemoteLane, within_seconds: float) -> None:  # the lane has begun to connect
        late.append(a_shard(1, Failures(), address=address, lane=lane))
        wait_connected(self, within_seconds)

    monkeypatch.setattr(RemoteLane, "wait_connected", start_and_wait)
    connect(address, lane).close()
    late[0].close()


def test_a_frozen_connection_may_live_for_as_long_as_one_likes(lane):
    server = a_shard(1, pytest.fail, lane=lane, fail_after=1e9)
    transport = open_ps(a_context(0, 1, pytest.fail, lane=lane, fail_after=1e9), [server.address])
    transport.add_group(0, MANIFEST)
    ended = Ended()
    transport.start(make_task(), ended)
    assert ended.done.wait(60)
    transport.close()
    server.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("can't start new thread")])
def test_what_ends_the_connecting_leaves_no_lane(server, lane, monkeypatch, error):
    opened = []

    def open_once(*arguments):
        if opened:
            raise error
        opened.append(open_streams(*arguments))
        return opened[0]

    monkeypatch.setattr(ps_transport, "open_streams", open_once)
    with pytest.raises(type(error)):
        open_ps(a_context(0, 1, pytest.fail, lane=lane), [server.address] * 2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("commsched-lane-")]


def test_a_taken_port_is_one_clear_line(server, lane):
    with pytest.raises(ConfigError, match=f"cannot listen at {server.address}: the port is taken"):
        a_shard(1, Failures(), address=server.address, lane=lane)


def test_a_server_that_closes_while_a_rank_waits_is_lost(server, lane):
    failures = Failures()
    transport = connect(server.address, lane, failures, world_size=2)
    transport.add_group(0, MANIFEST)
    ended = Ended()
    transport.start(make_task(step=3), ended)
    assert ended.sent.wait(60)
    server.close()
    assert isinstance(failures.first(), PeerLost)
    assert str(failures.first()).startswith(
        f"server 0 at {server.address} closed while <CommTask all_reduce step 3 partition 0"
    )
    transport.close()


def test_a_server_that_closes_while_nobody_waits_is_lost_to_the_next_push(server, lane):
    failures = Failures()
    transport = connect(server.address, lane, failures)
    transport.add_group(0, MANIFEST)
    done = Ended()
    transport.start(make_task(), done)
    assert done.done.wait(60)
    server.close()
    transport._lanes[0]._readers[0].join(60)
    assert failures.none()
    with pytest.raises(PeerLost, match=f"server 0 at {server.address} has closed"):
        transport.start(make_task(step=1), Ended())
    transport.close()


def test_a_failure_of_the_server_reaches_every_worker_with_its_cause(server, lane):
    failures = [Failures(), Failures()]
    transports = [connect(server.address, lane, failures[rank], rank=rank, world_size=2) for rank in range(2)]
    server.service.fail(PeerLost("rank 5 (host h, pid 77) is gone"))
    assert [str(told.first()) for told in failures] == ["rank 5 (host h, pid 77) is gone"] * 2
    for transport in transports:
        transport.close()


def test_a_closed_transport_starts_nothing(server, lane):
    transport = connect(server.address, lane)
    transport.add_group(0, MANIFEST)
    transport.close()
    transport.close()
    with pytest.raises(ClosedError, match="this transport is closed"):
        transport.start(make_task(), Ended())


def test_more_groups_than_the_wire_can_number_are_refused(server, lane):
    transport = connect(server.address, lane)
    with pytest.raises(ConfigError, match="group 4294967296 is one too many: a job may have 4294967296 groups"):
        transport.add_group(2**32, MANIFEST)
    transport.close()


class RawWorker:
    """Rank 0 as an enemy might be it: authenticated, and free to send any bytes over gRPC."""

    def __init__(self, address: str, token: str = TOKEN) -> None:
        self._channel = make_channel(address, 10.0, MAX_MESSAGE_BYTES)
        self._messages = [encode(json_frame(FrameKind.HELLO, WorkerHello(0, 2, 0).to_record()))]
        self._token = token

    def exchange(self, *messages: bytes) -> tuple[list[bytes], grpc.StatusCode]:
        """Send the hello and ``messages``, wait for the end of the stream; what came back, and how it ended."""
        end, replies = threading.Event(), []

        def requests():
            yield from (*self._messages, *messages)
            end.wait(60)

        code = grpc.StatusCode.OK
        try:
            replies.extend(Call(self._channel, METHOD, requests(), self._token, ""))
        except grpc.RpcError as error:
            code = error.code()
        end.set()
        self._channel.close()
        return replies, code


@pytest.fixture
def grpc_shard():
    """A server of two workers over gRPC, and its failures."""
    failures = Failures()
    shard = a_shard(2, failures, lane="grpc")
    yield shard, failures
    shard.close()


def test_without_the_token_no_call_is_read(grpc_shard):
    shard, _ = grpc_shard
    assert RawWorker(shard.address, "guess").exchange(b"x") == ([], grpc.StatusCode.UNAUTHENTICATED)


def test_a_garbage_call_fails_the_job_and_names_its_sender(grpc_shard):
    shard, failures = grpc_shard
    replies, _ = RawWorker(shard.address).exchange(b"\x80\x04cos\nsystem\n" + bytes(100))
    assert f"the server at {shard.address} got from rank 0 (ipv4:127.0.0.1:" in str(failures.first())
    assert "begins with b'\\x80\\x04co'" in str(failures.first())
    assert b"ProtocolError" in replies[-1]


def test_a_grpc_push_is_acknowledged_before_the_other_rank_has_pushed(grpc_shard):
    shard, _ = grpc_shard
    group = encode(json_frame(FrameKind.GROUP, MANIFEST.to_record()))
    push = encode(Frame(FrameKind.PUSH, 0, 0, 3, "float32", 0, 4, bytes(4)))
    replies, _ = RawWorker(shard.address).exchange(group, push, b"the end")
    assert replies[1] == encode(Frame(FrameKind.ACK, 0, 0, 3))


def test_a_grpc_message_beyond_the_limit_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(grpc_port, "MAX_MESSAGE_BYTES", 100_000)
    failures = Failures()
    shard = a_shard(2, failures, lane="grpc")
    payload = bytes(200_000)
    message = encode(Frame(FrameKind.PUSH, 0, 0, 0, "uint8", 0, len(payload), payload))
    _, code = RawWorker(shard.address).exchange(message)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(failures.first()) == f"rank 0 is gone: its connection to the server at {shard.address} broke"
    shard.close()


class FakeServer:
    """A server that welcomes its one worker and answers the first push with the messages it was made with."""

    def __init__(self, lane: str, *answers: Frame) -> None:
        self._answers = answers
        self._port = open_port("127.0.0.1:0", StreamOptions(TOKEN, lane))
        self.address = self._port.address
        self._port.serve(self._serve)

    def _serve(self, stream: Stream, job: str) -> None:
        stream.outbox.put_control(json_frame(FrameKind.HELLO, {}))
        for frame in stream.frames(lambda frame: memoryview(bytearray(frame.stop - frame.start))):
            if frame.kind is FrameKind.PUSH:
                for answer in self._answers:
                    stream.outbox.put_control(answer)
                break
        stream.outbox.finish()

    def close(self) -> None:
        self._port.close(False)


def answer(kind=FrameKind.RESULT, step=0, partition=0, start=0, stop=256) -> Frame:
    return Frame(kind, 0, step, partition, "float32", start, stop, bytes(stop - start) if kind is FrameKind.RESULT else b"")


def require_blamed(lane, answers, why):
    """A worker that gets ``answers`` to its push fails, and says that it was the server, and why."""
    server, failures = FakeServer(lane, *answers), Failures()
    transport = connect(server.address, lane, failures)
    transport.add_group(0, MANIFEST)
    transport.start(make_task(), Ended())
    assert str(failures.first()).startswith(f"server 0 at {server.address} {why}")
    transport.close()
    server.close()


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (
            [answer(start=256, stop=512)],
            "broke the protocol: float32 bytes 256 to 512 are not an average of <CommTask all_reduce step 0",
        ),
        ([answer(step=1)], "broke the protocol: an answer to step 1, partition 0, which expects no answer there"),
        ([answer(), answer()], "broke the protocol: an answer to step 0, partition 0, which expects no answer there"),
        ([json_frame(FrameKind.HELLO, {})], "broke the protocol: HELLO out of turn"),
        ([json_frame(FrameKind.ERROR, ["x"])], "broke the protocol: an ERROR message does not hold an error"),
        ([json_frame(FrameKind.ERROR, {"type": 1})], "broke the protocol: an ERROR message does not hold an error"),
        ([Frame(FrameKind.PUSH, 0, 0, 0, "uint8", 0, 1, b"x")], "broke the protocol: PUSH out of turn"),
        ([], "is gone: it ended the stream without a goodbye"),
    ],
)
def test_a_server_that_answers_wrongly_is_named(answers, why, lane):
    require_blamed(lane, answers, why)


def test_an_average_from_a_server_that_does_not_make_it_is_refused(lane, server):
    """Partition 0 is the first server's: its average, from the second."""
    second, failures = FakeServer(lane, answer()), Failures()
    addresses = [server.address, second.address]
    transport = open_ps(a_context(0, 2, failures, lane=lane), addresses)
    transport.add_group(0, MANIFEST)
    first, other = Ended(), Ended()
    transport.start(make_task(), first)
    assert first.sent.wait(60)
    transport.start(make_task(1, server=1), other)
    assert str(failures.first()) == (
        f"server 1 at {second.address} broke the protocol: an answer to step 0, partition 0, which expects no answer there"
    )
    assert not first.done.is_set()
    transport.close()
    second.close()


@pytest.mark.parametrize(
    ("lane", "why"),
    [
        ("tcp", "broke the protocol: ACK out of turn"),
        ("grpc", "broke the protocol: an ACK of step 0, partition 1, which was not sent there"),
    ],
)
def test_an_acknowledgement_that_is_not_due_is_refused(lane, why):
    require_blamed(lane, [answer(FrameKind.ACK, partition=1)], why)


def test_few_streams_connect_at_a_time(monkeypatch):
    """With a shard on each of many ranks, handshakes would otherwise take longer than they may."""
    at_a_time, most, changed = 0, 0, threading.Condition()

    def attempt(stream: object, *where: object) -> None:
        nonlocal at_a_time, most
        with changed:
            at_a_time += 1
            most = max(most, at_a_time)
            changed.notify_all()
            if stream is not streams[-1]:
                changed.wait_for(lambda: most == 3, 60)
            at_a_time -= 1
            stream._aborted.set()

    monkeypatch.setattr(tcp_lane.TcpStream, "_attempt", attempt)
    options = StreamOptions(TOKEN, connecting=threading.Semaphore(3))
    streams = open_streams("a server", "127.0.0.1:1", options, "a job", flows=9)
    threads = [threading.Thread(target=list, args=(stream.frames(memoryview),)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 3


def test_servers_that_say_nothing_do_not_hold_up_the_end_of_the_streams_that_wait_to_connect(monkeypatch):
    """One stream holds the only place to connect, and the others wait for it, also those that are closed first."""
    monkeypatch.setattr(tcp_lane, "_ATTEMPT_SECONDS", 300.0)
    monkeypatch.setattr(lane_module, "_END_SECONDS", 20.0)
    context, began = a_context(2, 4, Failures(), join_within=0.2), monotonic()
    options = replace(StreamOptions.of(context.settings, context.token), connecting=threading.Semaphore(1))
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        with pytest.raises(PeerTimeout, match="did not answer"):
            PsTransport(context, options, [f"127.0.0.1:{server.getsockname()[1]}" for server in servers])
    assert monotonic() - began < 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("commsched-lane-")]


def test_a_rank_that_leaves_is_announced_by_itself_and_by_each_rank_to_its_own_shard(monkeypatch):
    """If each rank told all shards of each rank that leaves, an end took as many messages as the cube of the ranks."""
    told = []
    leave = RemoteLane.leave
    monkeypatch.setattr(RemoteLane, "leave", lambda lane, rank: (told.append(rank), leave(lane, rank)))

    def body(world, rank):
        with world.core(rank, SchedulerConfig()) as core:
            together.wait(60)
            core.prepare_leave()
            for other in {0, 1, 2} - {rank}:
                core.leave(other)
            together.wait(60)

    together = threading.Barrier(3)
    with Threads(embedded_world, 3) as world:
        world.run(body)
    assert sorted(told) == [0, 0, 1, 1, 2, 2]
