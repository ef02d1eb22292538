"""PsTransport over real gRPC; its ranks are threads."""

import threading
from functools import partial
from time import monotonic

import grpc
import numpy as np
import pytest

from commsched.core.errors import ClosedError, CommschedError, ConfigError, PeerLost, PeerTimeout
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import Partition
from commsched.core.task import CommTask
from commsched.rpc import DaemonExecutor, bind, make_channel, make_server, token_metadata
from commsched.testing.check_transport import check_averages, check_back_to_back, check_transport
from commsched.transports.ps import shard as shard_module
from commsched.transports.ps.frame import MAX_MESSAGE_BYTES, Frame, Kind, decode, encode, json_frame
from commsched.transports.ps.grpc_lane import METHOD
from commsched.transports.ps.hello import Hello
from commsched.transports.ps.shard import Shard
from commsched.transports.ps.transport import PsTransport

from ..worlds import TOKEN, embedded_world, separate_world

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
            assert self._changed.wait_for(lambda: self._errors, 20), "no failure was told"
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


def make_task(partition: int = 0, step: int = 0, value: float = 1.0) -> CommTask:
    data = memoryview(bytearray(np.full(64, value, np.float32).tobytes()))
    return CommTask(0, step, Partition(partition, "float32", 256 * partition, 256 * (partition + 1), (0,)), data)


@pytest.fixture
def server():
    """A server of one worker that no rank hosts."""
    shard = Shard("127.0.0.1:0", TOKEN, None, on_failure=Failures(), name="the server")
    yield shard
    shard.close()


def connect(address: str, on_failure=None, *, rank=0, world_size=1, token=TOKEN, within=20.0) -> PsTransport:
    on_failure = on_failure or Failures()
    return PsTransport(rank, world_size, [address], token, on_failure=on_failure, connect_within_seconds=within)


def test_conformance_embedded():
    check_transport(embedded_world)


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_conformance_with_separate_servers(servers):
    check_transport(partial(separate_world, servers=servers), rounds=50)


def test_averages_over_a_capped_link():
    check_averages(partial(embedded_world, rate_bytes_per_second=20e6), 3)


@pytest.mark.parametrize("world", [embedded_world, separate_world])
def test_many_rounds_with_a_slow_rank(world):
    check_back_to_back(world, 2000, world_size=3, timeout_seconds=50)


def test_a_capped_link_is_not_faster_than_its_rate():
    numel, rate = 100_000, 8e6
    manifest = Manifest((TensorSpec("weight", (numel,), "float32"),))
    failures = [Failures(), Failures()]
    with embedded_world(failures, rate_bytes_per_second=rate) as transports:
        for transport in transports:
            transport.add_group(0, manifest)
        began = monotonic()
        ends = [Ended(), Ended()]
        for transport, ended in zip(transports, ends):
            partition = Partition(0, "float32", 0, 4 * numel, (0,))
            transport.start(CommTask(0, 0, partition, memoryview(bytearray(4 * numel))), ended)
        for ended in ends:
            assert ended.done.wait(20)
        # Rank 1 pushes to rank 0's shard, and is then sent the average: its bytes cross two links one after another.
        assert monotonic() - began >= 2 * 4 * numel / rate


def test_credit_comes_back_before_the_other_rank_has_started(server):
    transport = connect(server.address, world_size=2)
    transport.add_group(0, MANIFEST)
    ended = Ended()
    transport.start(make_task(), ended)
    assert ended.sent.wait(20)
    assert not ended.done.is_set()
    transport.close()


def test_another_token_is_one_clear_line(server):
    with pytest.raises(ConfigError) as raised:
        connect(server.address, token="guess")
    assert str(raised.value) == f"server 0 at {server.address} has another token; set the same COMMSCHED_TOKEN everywhere"
    assert "guess" not in str(raised.value)


def test_another_world_size_is_one_clear_line(server):
    first = connect(server.address, world_size=2)
    with pytest.raises(ConfigError, match="rank 1 says there are 3 ranks; this job has 2"):
        connect(server.address, rank=1, world_size=3)
    first.close()


def test_a_server_that_does_not_come_up_is_named():
    probe = Shard("127.0.0.1:0", TOKEN, 1, on_failure=Failures())
    probe.close()
    with pytest.raises(PeerTimeout, match=f"server 0 at {probe.address} did not answer within 0 s"):
        connect(probe.address, within=0.3)


def test_a_server_may_come_up_after_its_workers():
    probe = Shard("127.0.0.1:0", TOKEN, 1, on_failure=Failures())
    probe.close()
    late: list[Shard] = []
    starter = threading.Timer(0.3, lambda: late.append(Shard(probe.address, TOKEN, 1, on_failure=Failures())))
    starter.start()
    connect(probe.address).close()
    starter.join()
    late[0].close()


def test_a_taken_port_is_one_clear_line(server):
    with pytest.raises(ConfigError, match=f"cannot listen at {server.address}: the port is taken"):
        Shard(server.address, TOKEN, 1, on_failure=Failures())


def test_a_server_that_closes_while_a_rank_waits_is_lost(server):
    failures = Failures()
    transport = connect(server.address, failures, world_size=2)
    transport.add_group(0, MANIFEST)
    ended = Ended()
    transport.start(make_task(step=3), ended)
    assert ended.sent.wait(20)
    server.close()
    assert isinstance(failures.first(), PeerLost)
    assert str(failures.first()).startswith(f"server 0 at {server.address} closed while <CommTask step 3 partition 0")
    transport.close()


def test_a_server_that_closes_while_nobody_waits_is_lost_to_the_next_push(server):
    failures = Failures()
    transport = connect(server.address, failures)
    transport.add_group(0, MANIFEST)
    done = Ended()
    transport.start(make_task(), done)
    assert done.done.wait(20)
    server.close()
    transport._lanes[0]._reader.join(20)
    assert failures.none()
    with pytest.raises(PeerLost, match=f"server 0 at {server.address} has closed"):
        transport.start(make_task(step=1), Ended())
    transport.close()


def test_a_failure_of_the_server_reaches_every_worker_with_its_cause(server):
    failures = [Failures(), Failures()]
    transports = [connect(server.address, failures[rank], rank=rank, world_size=2) for rank in range(2)]
    server.service.fail(PeerLost("rank 5 (host h, pid 77) is gone"))
    assert [str(told.first()) for told in failures] == ["rank 5 (host h, pid 77) is gone"] * 2
    for transport in transports:
        transport.close()


def test_a_closed_transport_starts_nothing(server):
    transport = connect(server.address)
    transport.add_group(0, MANIFEST)
    transport.close()
    transport.close()
    with pytest.raises(ClosedError, match="this transport is closed"):
        transport.start(make_task(), Ended())


def test_more_groups_than_the_wire_can_number_are_refused(server):
    transport = connect(server.address)
    with pytest.raises(ConfigError, match="group 65536 is one too many: a job may have 65536 groups"):
        transport.add_group(2**16, MANIFEST)
    transport.close()


class RawWorker:
    """Rank 0 as an enemy might be it: authenticated, and free to send any bytes."""

    def __init__(self, address: str, token: str = TOKEN) -> None:
        self._channel = make_channel(address, 10.0, MAX_MESSAGE_BYTES)
        self._messages = [encode(json_frame(Kind.HELLO, Hello(0, 2, 0).to_record()))]
        self._token = token

    def exchange(self, *messages: bytes) -> tuple[list[bytes], grpc.StatusCode]:
        """Send the hello and ``messages``, wait for the end of the stream; what came back, and how it ended."""
        end, replies = threading.Event(), []

        def requests():
            yield from (*self._messages, *messages)
            end.wait(20)

        call = self._channel.stream_stream(METHOD)(requests(), metadata=token_metadata(self._token), timeout=30)
        try:
            replies.extend(call)
        except grpc.RpcError:
            pass
        end.set()
        self._channel.close()
        return replies, call.code()


def test_without_the_token_nothing_is_read(server):
    assert RawWorker(server.address, "guess").exchange(b"x") == ([], grpc.StatusCode.UNAUTHENTICATED)


def test_a_garbage_stream_fails_the_job_and_names_its_sender():
    failures = Failures()
    shard = Shard("127.0.0.1:0", TOKEN, 2, on_failure=failures, name="the server")
    replies, _ = RawWorker(shard.address).exchange(b"\x80\x04cos\nsystem\n" + bytes(100))
    assert f"the server at {shard.address} got from rank 0 (ipv4:127.0.0.1:" in str(failures.first())
    assert "begins with b'\\x80\\x04co'" in str(failures.first())
    assert b"ProtocolError" in replies[-1]
    shard.close()


def test_a_message_beyond_the_limit_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(shard_module, "MAX_MESSAGE_BYTES", 100_000)
    failures = Failures()
    shard = Shard("127.0.0.1:0", TOKEN, 2, on_failure=failures, name="the server")
    payload = bytes(200_000)
    message = encode(Frame(Kind.PUSH, 0, 0, 0, "uint8", 0, len(payload), payload))
    _, code = RawWorker(shard.address).exchange(message)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(failures.first()) == f"rank 0 is gone: its connection to the server at {shard.address} broke"
    shard.close()


class FakeServer:
    """A server that welcomes its one worker and answers the first push with the messages it was made with."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = answers
        self._executor = DaemonExecutor("fake-server")
        self._server = make_server(self._executor, TOKEN, 10.0, MAX_MESSAGE_BYTES)
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1:0')}"
        _, package, method = METHOD.split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._exchange)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(package, {method: handler}),))
        self._server.start()

    def _exchange(self, requests, context):
        yield encode(json_frame(Kind.HELLO, {}))
        for message in requests:
            if decode(message).kind is Kind.PUSH:
                yield from self._answers
                return

    def close(self) -> None:
        self._server.stop(0).wait()
        self._executor.shutdown()


def answer(kind=Kind.RESULT, step=0, partition=0, start=0, stop=256) -> bytes:
    payload = bytes(stop - start) if kind is Kind.RESULT else b""
    return encode(Frame(kind, 0, step, partition, "float32", start, stop, payload))


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([b"garbage"], "broke the protocol: a message of 7 bytes is shorter than a header"),
        ([answer(start=256, stop=512)], "broke the protocol: float32 bytes 256 to 512 are no average of <CommTask step 0"),
        ([answer(step=1)], "broke the protocol: an answer to step 1, partition 0, which waits for none there"),
        ([answer(), answer()], "broke the protocol: an answer to step 0, partition 0, which waits for none there"),
        ([answer(Kind.ACK, partition=1)], "broke the protocol: an answer to step 0, partition 1, which waits for none"),
        ([encode(json_frame(Kind.HELLO, {}))], "broke the protocol: HELLO out of turn"),
        ([encode(json_frame(Kind.ERROR, ["x"]))], "broke the protocol: an ERROR message does not hold an error"),
        ([encode(json_frame(Kind.ERROR, {"type": 1}))], "broke the protocol: an ERROR message does not hold an error"),
        ([encode(Frame(Kind.PUSH, 0, 0, 0, "uint8", 0, 1, b"x"))], "broke the protocol: PUSH out of turn"),
        ([], "ended the stream without a goodbye"),
    ],
)
def test_a_server_that_answers_wrongly_is_named(answers, why):
    server, failures = FakeServer(*answers), Failures()
    transport = connect(server.address, failures)
    transport.add_group(0, MANIFEST)
    transport.start(make_task(), Ended())
    assert str(failures.first()).startswith(f"server 0 at {server.address} {why}")
    transport.close()
    server.close()
