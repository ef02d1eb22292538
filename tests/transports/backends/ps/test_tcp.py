"""What only the TCP carrier has: the handshake, what strangers may cost, and connections that break anywhere."""

import errno
import itertools
import socket
import struct
import threading
from contextlib import closing, contextmanager, nullcontext, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched.core.errors import ConfigError, PeerLost, PeerTimeout, TransportError
from commsched.core.manifest import ITEMSIZE
from commsched.net.handshake import HandshakeRejected
from commsched.net.rpc import DaemonExecutor
from commsched.transports.backends.ps import lane as lanes
from commsched.transports.backends.ps import tcp_connection, tcp_lane
from commsched.transports.backends.ps.frame import (
    HEADER_BYTES,
    RAW,
    VERSION,
    Frame,
    FrameKind,
    WorkerHello,
    decode,
    encode,
    encode_header,
    json_frame,
)
from commsched.transports.backends.ps.lane import RemoteLane
from commsched.transports.backends.ps.send_queue import SendQueue
from commsched.transports.backends.ps.stream import StreamBroken, StreamOptions
from commsched.transports.backends.ps.tcp_connection import LANE, Answers, TcpConnection
from commsched.transports.backends.ps.tcp_lane import TcpPort, TcpStream

from ...worlds import TOKEN, a_shard
from .test_transport import MANIFEST, Ended, Failures, connect, make_task

#: More than any test may take.
NEVER_SECONDS = 1000.0

#: The first bytes of both ends.
GREETING = b"CST" + bytes([VERSION])

HELLO = json_frame(FrameKind.HELLO, WorkerHello(0, 2, 0).to_record())


@contextmanager
def socket_pair():
    left, right = socket.socketpair()
    with closing(left), closing(right):
        left.settimeout(60)
        right.settimeout(60)
        yield left, right


@pytest.fixture
def shard():
    """A server of two workers, and its failures."""
    failures = Failures()
    shard = a_shard(2, failures)
    yield shard, failures
    shard.close()


def dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def authenticated(address: str) -> socket.socket:
    connected = dial(address)
    LANE.connect(connected, "the server", TOKEN, "a job", 60)
    connected.settimeout(60)
    return connected


def exactly(connected: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes and (part := connected.recv(nbytes - len(received))):
        received += part
    return received


def everything_from(connected: socket.socket) -> bytes:
    received = b""
    try:
        while part := connected.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


# --- the handshake ---


def shake_hands(workers_token: str, servers_token: str, job: str = "") -> tuple[Exception | None, Exception | None, str]:
    """What the worker's part raised, and the server's; and of which job the server takes the worker to be."""
    raised: list[Exception | None] = [None, None]
    told = ["", ""]

    def part(index: int, call, *arguments) -> None:
        try:
            told[index] = call(*arguments)
        except Exception as error:
            raised[index] = error

    with socket_pair() as (worker, server):
        thread = threading.Thread(target=part, args=(1, LANE.accept, server, servers_token, 60))
        thread.start()
        part(0, LANE.connect, worker, "server 3", workers_token, job, 60)
        thread.join(60)
    return raised[0], raised[1], told[1]


@pytest.mark.parametrize("job", ["", "naïve job", "x" * 255])
def test_both_ends_accept_the_same_token_and_the_server_is_told_the_job(job):
    assert shake_hands("secret", "secret", job) == (None, None, job)


def test_another_token_is_refused_by_both_ends():
    worker, server, _ = shake_hands("guess", "secret")
    assert str(worker) == "server 3 has another token; set the same COMMSCHED_TOKEN everywhere"
    assert isinstance(worker, ConfigError)
    assert str(server) == "it does not have this job's token"
    assert isinstance(server, HandshakeRejected)


def recorded_admission(first: bytes) -> bytes:
    """What the server's part sends to who says ``first`` and no more."""
    with socket_pair() as (stranger, server):
        stranger.sendall(first)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(HandshakeRejected):
            LANE.accept(server, TOKEN, 60)
        server.close()
        return everything_from(stranger)


@given(st.binary(max_size=350) | st.binary(max_size=350).map(lambda rest: GREETING + rest))
@settings(max_examples=60)
def test_no_bytes_get_a_stranger_past_the_handshake_or_show_a_proof(said):
    assert len(recorded_admission(said)) <= 4 + 32 + 1  # the greeting, the challenge and a refusal


def test_an_old_proof_and_the_servers_own_prove_nothing():
    with socket_pair() as (worker, server):
        thread = threading.Thread(target=LANE.accept, args=(server, TOKEN, 60))
        thread.start()
        relay, inner = socket.socketpair()
        with closing(relay), closing(inner):
            introducing = threading.Thread(target=LANE.connect, args=(inner, "it", TOKEN, "j", 60))
            introducing.start()
            relay.sendall(exactly(worker, 36))
            answer = exactly(relay, 70)
            worker.sendall(answer)
            verdict = exactly(worker, 33)
            relay.sendall(verdict)
            introducing.join(60)
        thread.join(60)
    recorded_admission(answer)
    recorded_admission(answer[:36] + verdict[1:] + answer[68:])


def test_a_proof_for_one_job_is_none_for_another():
    with socket_pair() as (worker, server):
        admitting = threading.Thread(target=refuse, args=(server, "it does not have this job's token"))
        admitting.start()
        relay, inner = socket.socketpair()
        with closing(relay), closing(inner):
            introducing = threading.Thread(target=introduce_in_vain, args=(inner,))
            introducing.start()
            relay.sendall(exactly(worker, 36))
            worker.sendall(exactly(relay, 70)[:-1] + b"k")
            assert exactly(worker, 33) == b"-"
            relay.shutdown(socket.SHUT_WR)
            introducing.join(60)
        admitting.join(60)


def refuse(server: socket.socket, why: str) -> None:
    with pytest.raises(HandshakeRejected, match=why), closing(server):
        LANE.accept(server, TOKEN, 60)


@given(st.binary(max_size=80) | st.binary(max_size=80).map(lambda rest: GREETING + bytes(32) + b"+" + rest))
@settings(max_examples=60)
def test_a_worker_takes_no_bytes_for_a_server(said):
    with socket_pair() as (worker, stranger):
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises((ConfigError, StreamBroken)):
            LANE.connect(worker, "it", TOKEN, "j", 60)


def test_a_server_that_sends_the_workers_own_proof_back_proves_nothing():
    with socket_pair() as (worker, impostor):

        def reflect() -> None:
            impostor.sendall(GREETING + bytes(32))
            proof = exactly(impostor, 70)[36:68]
            impostor.sendall(b"+" + proof)

        reflecting = threading.Thread(target=reflect)
        reflecting.start()
        with pytest.raises(ConfigError, match="it has another token; set the same COMMSCHED_TOKEN everywhere"):
            LANE.connect(worker, "it", TOKEN, "j", 60)
        reflecting.join(60)


def introduce_in_vain(worker: socket.socket) -> None:
    with pytest.raises(StreamBroken):
        LANE.connect(worker, "it", TOKEN, "j", 60)


def test_the_token_does_not_travel():
    with socket_pair() as (worker, server):
        server.sendall(GREETING + bytes(32))
        thread = threading.Thread(target=introduce_in_vain, args=(worker,))
        thread.start()
        said = exactly(server, 70)
        server.shutdown(socket.SHUT_WR)
        thread.join(60)
    assert len(said) == 70
    assert TOKEN.encode() not in said


def test_who_says_nothing_is_sent_away_in_time():
    with socket_pair() as (_, server), pytest.raises(HandshakeRejected, match="timed out"):
        LANE.accept(server, TOKEN, 0.05)


def test_the_time_is_for_the_handshake_as_a_whole():
    """Each byte of a stranger's comes in time, and all of them do not: 185 of them, each after 0.02 s, take 3.7 s."""
    said = 0
    with socket_pair() as (stranger, server):
        ended = threading.Event()

        def dribble() -> None:
            nonlocal said
            stranger.sendall(GREETING)
            with suppress(OSError):
                while not ended.wait(0.02):
                    stranger.sendall(b"x")
                    said += 1

        dribbling = threading.Thread(target=dribble)
        dribbling.start()
        with pytest.raises(HandshakeRejected, match="timed out"):
            LANE.accept(server, TOKEN, 0.5)
        ended.set()
        dribbling.join(60)
    assert said < 150


# --- a server, and who connects to it ---


def test_strangers_are_sent_away_and_the_job_goes_on(shard):
    server, failures = shard
    for said in (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"", GREETING + bytes(64)):
        with closing(dial(server.address)) as stranger:
            with suppress(OSError):  # it may have been sent away already
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
            assert len(everything_from(stranger)) <= 37
    transport = connect(server.address, "tcp", world_size=2)
    transport.close()
    assert failures.none()


def test_strangers_that_say_nothing_keep_no_worker_away(monkeypatch, caplog):
    monkeypatch.setattr(tcp_lane, "_MAX_HANDSHAKES", 2)
    monkeypatch.setattr(tcp_lane, "_HANDSHAKE_SECONDS", NEVER_SECONDS)
    shard = a_shard(1, pytest.fail)
    silent = [dial(shard.address) for _ in range(2)]
    for each in silent:
        assert len(exactly(each, 36)) == 36
    transport = connect(shard.address, "tcp")  # at once
    assert everything_from(silent[0]) == b""  # the oldest made room
    [warning] = caplog.messages
    assert warning == f"{shard.address} refused a connection from 127.0.0.1: more than 2 handshakes were under way"
    silent += [dial(shard.address) for _ in range(3)]
    for each in silent[1:3]:
        assert everything_from(each)[36:] == b""
    for each in silent[3:]:
        assert len(exactly(each, 36)) == 36
    assert len(caplog.messages) == 1  # they do not fill the log
    transport.add_group(0, MANIFEST)
    ended = Ended()
    transport.start(make_task(), ended)
    assert ended.done.wait(60)  # who has been admitted makes room for nobody
    transport.close()
    shard.close()
    assert not shard._port._open
    for each in silent:
        each.close()


def test_room_is_made_by_the_host_that_has_most_handshakes_under_way(monkeypatch):
    monkeypatch.setattr(tcp_lane, "_MAX_OF_ALL_HOSTS", 3)
    monkeypatch.setattr(tcp_lane, "_HANDSHAKE_SECONDS", NEVER_SECONDS)
    port = TcpPort("127.0.0.1:0", StreamOptions(TOKEN))
    port.serve(lambda stream, job: pytest.fail("nobody was admitted"))
    host, _, number = port.address.rpartition(":")

    def dial_from(source: str) -> socket.socket:
        connected = socket.create_connection((host, int(number)), timeout=60, source_address=(source, 0))
        assert len(exactly(connected, 36)) == 36
        return connected

    slow, *many = [dial_from(source) for source in ("127.0.0.2", "127.0.0.3", "127.0.0.3", "127.0.0.3")]
    assert everything_from(many[0]) == b""
    port.close(False)
    for each in (slow, *many):
        each.close()


def test_strangers_of_many_hosts_leave_most_descriptors_to_the_process(monkeypatch):
    monkeypatch.setattr(tcp_lane, "most_strangers", lambda: 3)
    monkeypatch.setattr(tcp_lane, "_HANDSHAKE_SECONDS", NEVER_SECONDS)
    port = TcpPort("127.0.0.1:0", StreamOptions(TOKEN))
    port.serve(lambda stream, job: pytest.fail("nobody was admitted"))
    host, _, number = port.address.rpartition(":")
    silent = [
        socket.create_connection((host, int(number)), timeout=60, source_address=(f"127.0.0.{last}", 0)) for last in range(2, 7)
    ]
    for each in silent:
        exactly(each, 36)
    with port._changed:
        assert sum(host is not None for host in port._open.values()) <= 3
    port.close(False)
    for each in silent:
        each.close()


def test_connections_that_have_proved_themselves_are_not_counted_and_not_ended_to_make_room(monkeypatch):
    monkeypatch.setattr(tcp_lane, "_MAX_HANDSHAKES", 1)
    port = TcpPort("127.0.0.1:0", StreamOptions(TOKEN))
    pairs = [socket.socketpair() for _ in range(4)]
    accepted = [near for near, _ in pairs]
    port._open.update(zip(accepted, (None, None, "strangers", None)))
    port._make_room()
    assert list(port._open.values()) == [None, None, "strangers", None]
    port._open[accepted[3]] = "strangers"
    port._make_room()
    assert list(port._open.values()) == [None, None, None, "strangers"]
    assert pairs[2][1].recv(1) == b""
    for near, far in (pairs[0], pairs[1], pairs[3]):
        near.send(b"!")
        assert far.recv(1) == b"!"
    port._open.clear()
    port.close(False)
    for each in itertools.chain(*pairs):
        each.close()


def test_who_made_room_while_it_proved_itself_is_not_admitted():
    """It would be told that it was, and then find its connection ended; a handshake that ends is tried again."""
    port = TcpPort("127.0.0.1:0", StreamOptions(TOKEN))
    with socket_pair() as (worker, accepted):
        port._open[accepted] = None

        def meet() -> None:
            with closing(accepted), pytest.raises(HandshakeRejected, match="it was closed to make room for others"):
                LANE.accept(accepted, TOKEN, 60, lambda: port._proven(accepted))

        met = DaemonExecutor("test").submit(meet)
        with pytest.raises(StreamBroken, match="it ended the connection"):
            LANE.connect(worker, "the server", TOKEN, "a job", 60)
        met.result(60)
        del port._open[accepted]
    port.close(False)


def test_a_connection_for_which_there_is_no_thread_is_sent_away_and_the_next_is_served(monkeypatch, caplog):
    monkeypatch.setattr(tcp_lane, "_MAX_HANDSHAKES", 1)
    port = TcpPort("127.0.0.1:0", StreamOptions(TOKEN))
    port.serve(lambda stream, job: list(stream.frames(lambda frame: memoryview(b""))))

    def out_of_threads(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(port._executor, "submit", out_of_threads)
        with closing(dial(port.address)) as refused:
            assert everything_from(refused) == b""
    [warning] = caplog.messages
    assert warning.endswith(": can't start new thread")
    authenticated(port.address).close()
    port.close(True)
    assert not port._open


def test_a_connection_that_comes_while_the_port_closes_ends_the_accepting_thread():
    port = TcpPort("127.0.0.1:0", StreamOptions(TOKEN))
    port.serve(pytest.fail)
    port._executor.shutdown(wait=False)
    with closing(dial(port.address)) as late:
        assert everything_from(late) == b""
    port.close(True)
    assert not port._open


def refuse_option(*_: object) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


def test_a_connection_whose_options_the_system_refuses_is_not_served_and_its_worker_is_told_why(monkeypatch, caplog, shard):
    server, _ = shard
    monkeypatch.setattr(tcp_connection, "_set_options", refuse_option)
    with closing(authenticated(server.address)) as worker:
        worker.sendall(encode(json_frame(FrameKind.HELLO, WorkerHello(0, 2, 0).to_record())))
        error = decode(everything_from(worker))
    [warning] = caplog.messages
    assert warning.startswith(f"{server.address} cannot serve 127.0.0.1:")
    assert warning.endswith(": [Errno 22] Invalid argument")
    assert error.kind is FrameKind.ERROR
    assert error.json()["message"] == warning


def test_closing_leaves_neither_thread_nor_socket(monkeypatch):
    for constant in ("_HANDSHAKE_SECONDS", "_GRACE_SECONDS"):
        monkeypatch.setattr(tcp_lane, constant, NEVER_SECONDS)
    before = set(threading.enumerate())
    port = TcpPort("127.0.0.1:0", StreamOptions(TOKEN))
    port.serve(lambda stream, job: list(stream.frames(lambda frame: memoryview(b""))))
    connected = authenticated(port.address)
    with closing(dial(port.address)) as silent:
        exactly(silent, 36)
        port.close(False)
        port.close(True)
        assert everything_from(silent) == everything_from(connected) == b""
    connected.close()
    assert not {thread for thread in set(threading.enumerate()) - before if thread.is_alive()}
    with pytest.raises(ConnectionRefusedError):
        dial(port.address)


def test_an_empty_token_is_refused():
    with pytest.raises(ConfigError, match="the job's token is empty; set the same COMMSCHED_TOKEN on every rank"):
        TcpPort("127.0.0.1:0", StreamOptions(""))


@pytest.mark.parametrize("address", ["192.0.2.1:0", "nowhere.invalid:0"])
def test_an_address_that_is_not_ours_is_one_clear_line(address):
    with pytest.raises(ConfigError, match=f"cannot listen at {address}: "):
        TcpPort(address, StreamOptions(TOKEN))


def test_it_listens_at_ipv6_too():
    try:
        shard = a_shard(1, pytest.fail, address="[::1]:0")
    except ConfigError as error:
        pytest.skip(str(error))
    connect(shard.address, "tcp").close()
    shard.close()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"\x80\x04cos\nsystem\n" + bytes(100), r"begins with b'\x80\x04co'"),
        (
            encode_header(Frame(FrameKind.PUSH, 0, 0, 0, "uint8", 0, 1, b"x")),
            "pushed step 0 of group 0 without announcing the group",
        ),
        (encode(Frame(FrameKind.ACK)), "ACK out of turn"),
    ],
)
def test_an_authenticated_worker_that_breaks_the_protocol_is_named(shard, said, why):
    server, failures = shard
    with closing(authenticated(server.address)) as worker:
        worker.sendall(encode(HELLO) + said)
        heard = everything_from(worker)
    assert str(failures.first()).startswith(f"the server at {server.address} got from rank 0 (127.0.0.1:")
    assert why in str(failures.first())
    assert b"ProtocolError" in heard


def test_a_push_is_refused_before_its_payload_takes_memory(shard):
    server, failures = shard
    with closing(authenticated(server.address)) as worker:
        worker.sendall(encode(HELLO) + encode(json_frame(FrameKind.GROUP, MANIFEST.to_record())))
        worker.sendall(encode_header(Frame(FrameKind.PUSH, 0, 0, 0, "float32", 0, 2**27, bytes(2**27))))
        everything_from(worker)
    assert "rank 0 pushed float32 bytes 0 to 134217728 of step 0, but that buffer has 1024 bytes" in str(failures.first())
    assert server.service.aggregator.buffers._most_bytes == 0


@pytest.mark.parametrize("cut", [1, HEADER_BYTES, HEADER_BYTES + 5])
def test_a_worker_that_ends_in_the_middle_of_a_message_is_lost(shard, cut):
    server, failures = shard
    with closing(authenticated(server.address)) as worker:
        worker.sendall(encode(HELLO) + encode(json_frame(FrameKind.GROUP, MANIFEST.to_record()))[:cut])
    assert isinstance(failures.first(), PeerLost)
    assert str(failures.first()) == f"rank 0 is gone: its connection to the server at {server.address} broke"


# --- a worker, and what it connects to ---


@pytest.fixture
def listening():
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        listening.settimeout(60)
        yield listening


def address_of(listening: socket.socket) -> str:
    return f"127.0.0.1:{listening.getsockname()[1]}"


def test_what_does_not_speak_our_protocol_is_one_clear_line():
    grpc_shard = a_shard(1, pytest.fail, lane="grpc")
    with pytest.raises(ConfigError) as raised:
        connect(grpc_shard.address, "tcp")
    assert str(raised.value) == (
        f"server 0 at {grpc_shard.address} does not speak lane=tcp; give all ranks and servers the same lane and version"
    )
    grpc_shard.close()


def test_a_server_that_ends_in_the_handshake_is_tried_again_until_the_time_is_over(listening):
    stream = TcpStream("server 0", address_of(listening), StreamOptions(TOKEN), "j")
    lane = RemoteLane([stream], WorkerHello(0, 1, 0), None)
    for _ in range(3):
        listening.accept()[0].close()
    with pytest.raises(PeerTimeout) as raised:
        lane.wait_connected(0)
    assert str(raised.value) == "server 0 did not answer within 0 s (is it up, with the same lane and security?)"
    lane.close(False)
    assert not lane._readers[0].is_alive()


def test_an_address_of_a_kind_that_this_machine_lacks_is_passed_over(monkeypatch, shard):
    server, _ = shard
    resolve = TcpStream._resolve
    unknown = (9999, socket.SOCK_STREAM, 0, "", ("::1", 1))
    monkeypatch.setattr(TcpStream, "_resolve", lambda self: [unknown, *resolve(self)])
    connect(server.address, "tcp", world_size=2).close()


def test_options_that_the_system_refuses_are_no_end_of_the_server(monkeypatch, listening):
    def serve() -> None:
        with closing(listening.accept()[0]) as accepted:
            LANE.accept(accepted, TOKEN, 60)
            everything_from(accepted)

    thread = threading.Thread(target=serve)
    thread.start()
    monkeypatch.setattr(tcp_connection, "_set_options", refuse_option)
    with pytest.raises(TransportError) as raised:
        connect(address_of(listening), "tcp")
    assert str(raised.value) == (
        f"the lane to server 0 at {address_of(listening)} failed: OSError: [Errno 22] Invalid argument"
    )
    thread.join(60)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "192.0.2.1:1", "nowhere.invalid:1"])
def test_who_waits_for_a_connection_gives_up_when_the_job_fails(address):
    stream = TcpStream("server 0", address, StreamOptions(TOKEN), "j")
    lane = RemoteLane([stream], WorkerHello(0, 1, 0), None)
    lane.give_up(TransportError("rank 1 is gone"))
    with pytest.raises(TransportError, match="rank 1 is gone"):
        lane.wait_connected(60)
    lane.close(False)
    assert not lane._readers[0].is_alive()


def test_a_server_that_takes_the_connection_and_says_nothing_does_not_hold_up_the_end(monkeypatch, listening):
    monkeypatch.setattr(tcp_lane, "_ATTEMPT_SECONDS", NEVER_SECONDS)
    monkeypatch.setattr(lanes, "_END_SECONDS", 100.0)
    stream = TcpStream("server 0", address_of(listening), StreamOptions(TOKEN), "j")
    lane = RemoteLane([stream], WorkerHello(0, 1, 0), None)
    with closing(listening.accept()[0]):
        lane.close(True)
    assert not lane._readers[0].is_alive()


# --- a connection ---


class Pair:
    """A connection, and the bare socket at its other end, whose kernel holds about ``receives_bytes`` that nobody reads."""

    def __init__(self, fail_after_seconds: float = 10.0, receives_bytes: int | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.bare = socket.socket()
            self.bare.settimeout(60)
            if receives_bytes is not None:  # only before it connects does it limit the first window
                self.bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives_bytes)
            self.bare.connect(listening.getsockname())
            connected, _ = listening.accept()
        self.outbox = SendQueue()
        self.connection = TcpConnection(connected, "it", self.outbox, "a sender", fail_after_seconds)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.bare.close()


def frame_of(number: int, nbytes: int, kind: FrameKind = FrameKind.PUSH) -> Frame:
    return Frame(kind, 0, 0, number, "uint8", 0, nbytes, bytes([1 + number % 251]) * nbytes, number)


def place(frame: Frame) -> memoryview:
    return memoryview(bytearray(frame.stop - frame.start))


frames = st.builds(
    lambda kind, dtype, start, payload: Frame(kind, 1, 2, 3, dtype, start, start + len(payload), payload, 4),
    st.sampled_from(sorted(RAW)),
    st.sampled_from(list(ITEMSIZE)),
    st.integers(0, 2**40),
    st.binary(min_size=1, max_size=100),
) | st.builds(json_frame, st.sampled_from([FrameKind.GROUP, FrameKind.LEFT]), st.text() | st.integers())


@given(st.lists(frames, max_size=6), st.integers(1, 64))
@settings(max_examples=25)
def test_frames_come_as_they_were_however_the_bytes_are_cut(sent, step):
    with Pair() as pair:
        message = b"".join(map(encode, sent))
        for start in range(0, len(message), step):
            pair.bare.sendall(message[start : start + step])
        pair.bare.shutdown(socket.SHUT_WR)
        assert list(pair.connection.frames(place)) == sent


@given(st.lists(frames, min_size=1, max_size=3), st.data())
@settings(max_examples=25)
def test_a_stream_cut_anywhere_gives_whole_frames_and_says_that_it_broke(sent, data):
    message = b"".join(map(encode, sent))
    cut = data.draw(st.integers(0, len(message) - 1))
    ends = [sum(frame.nbytes for frame in sent[:count]) for count in range(len(sent))]
    got = []
    with Pair() as pair:
        pair.bare.sendall(message[:cut])
        pair.bare.shutdown(socket.SHUT_WR)
        try:
            for frame in pair.connection.frames(place):
                got.append(frame)
        except StreamBroken as broken:
            why = str(broken)
        else:
            why = ""
    assert why == ("" if cut in ends else "it ended in the middle of a message")
    assert got == sent[: len(got)]


LARGE, AWAITED = tcp_connection.LARGE_BYTES, tcp_connection._AWAITED_BYTES


@pytest.mark.parametrize("nbytes", [LARGE, LARGE + 1, AWAITED, AWAITED + 1, 3 * AWAITED])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_large_message_is_waited_for_until_it_is_there_and_not_longer(monkeypatch, nbytes, pieces):
    payload = bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)
    large = Frame(FrameKind.PUSH, 0, 0, 0, "uint8", 0, nbytes, payload)
    last = Frame(FrameKind.PUSH, 0, 0, 1, "uint8", 0, 3, b"abc")
    message, end = encode(large), encode(last)
    with Pair(fail_after_seconds=0.1) as pair:
        wait, piece = pair.connection._wait_for, -(-nbytes // pieces)
        rest = message[HEADER_BYTES:]

        def send_and_wait(missing: int) -> None:
            nonlocal rest
            pair.bare.sendall(rest[:piece])
            rest = rest[piece:]
            wait(missing)

        monkeypatch.setattr(pair.connection, "_wait_for", send_and_wait)
        pair.bare.sendall(message[:HEADER_BYTES] if nbytes > LARGE else message)
        frames = pair.connection.frames(place)
        assert next(frames) == large
        assert pair.connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        pair.bare.sendall(end)
        assert next(frames) == last
        pair.bare.shutdown(socket.SHUT_WR)
        assert list(frames) == []


@given(st.lists(st.sampled_from([1, LARGE, LARGE + 1, 2 * LARGE, AWAITED + 1]), min_size=1, max_size=4), st.data())
@settings(max_examples=25)
def test_large_and_small_messages_come_as_they_were_however_their_bytes_arrive(sizes, data):
    sent = [frame_of(number, nbytes) for number, nbytes in enumerate(sizes)]
    message = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(message) - 1), max_size=4)))
    with Pair() as pair:
        reader = DaemonExecutor("test").submit(list, pair.connection.frames(place))
        for start, stop in zip([0, *cuts], [*cuts, len(message)]):
            pair.bare.sendall(message[start:stop])
        pair.bare.shutdown(socket.SHUT_WR)
        assert reader.result(60) == sent


class Counted:
    """A socket that counts the calls of ``recv_into`` for large payloads."""

    def __init__(self, wrapped: socket.socket) -> None:
        self._wrapped = wrapped
        self.calls = 0

    def recv_into(self, memory: memoryview, nbytes: int, flags: int) -> int:
        self.calls += len(memory) > LARGE
        return self._wrapped.recv_into(memory, nbytes, flags)

    def __getattr__(self, name: str) -> object:
        return getattr(self._wrapped, name)


def test_one_call_receives_a_large_payload_and_none_is_made_before_it_is_there(monkeypatch):
    push = frame_of(0, LARGE + 1)
    with Pair(fail_after_seconds=NEVER_SECONDS) as pair:
        wait, rest = pair.connection._wait_for, encode(push)[HEADER_BYTES:]

        def send_and_wait(missing: int) -> None:
            pair.bare.sendall(rest[:-1])
            DaemonExecutor("test").submit(pair.bare.sendall, rest[-1:])
            wait(missing)

        monkeypatch.setattr(pair.connection, "_wait_for", send_and_wait)
        monkeypatch.setattr(pair.connection, "_socket", Counted(pair.connection._socket))
        pair.bare.sendall(encode(push)[:HEADER_BYTES])
        assert next(pair.connection.frames(place)) == push
        assert pair.connection._socket.calls == 1


def test_the_last_bytes_of_a_large_payload_are_waited_for_and_no_more():
    push = frame_of(0, AWAITED + LARGE + 1)
    with Pair(fail_after_seconds=NEVER_SECONDS) as pair:
        reader = DaemonExecutor("test").submit(next, pair.connection.frames(place))
        pair.bare.sendall(encode(push))
        assert reader.result(60) == push


def test_a_large_payload_may_pause_for_long(monkeypatch):
    push = frame_of(0, 2 * LARGE)
    with Pair(fail_after_seconds=0.1) as pair:
        wait, waits = pair.connection._wait_for, []

        def send_late(missing: int) -> None:
            waits.append(missing)
            if len(waits) == 2:  # the first wait has given up with nothing there
                pair.bare.sendall(encode(push)[HEADER_BYTES:])
            wait(missing)

        monkeypatch.setattr(pair.connection, "_wait_for", send_late)
        pair.bare.sendall(encode(push)[:HEADER_BYTES])
        assert next(pair.connection.frames(place)) == push
        assert waits[:2] == [2 * LARGE, 2 * LARGE]


def test_while_a_large_payload_pauses_the_other_host_is_asked_for(monkeypatch):
    def gone(self: Answers) -> None:
        raise TimeoutError("its host has not answered")

    monkeypatch.setattr(Answers, "require", gone)
    with Pair(fail_after_seconds=0.1) as pair:
        reader = DaemonExecutor("test").submit(next, pair.connection.frames(place))
        pair.bare.sendall(encode(frame_of(0, 2 * LARGE))[:HEADER_BYTES])
        with pytest.raises(StreamBroken, match="its host has not answered"):
            reader.result(60)


def test_an_end_within_a_large_message_is_found_at_once():
    frame = Frame(FrameKind.PUSH, 0, 0, 0, "uint8", 0, AWAITED, bytes(AWAITED))
    with Pair(fail_after_seconds=NEVER_SECONDS) as pair:
        reader = DaemonExecutor("test").submit(list, pair.connection.frames(place))
        pair.bare.sendall(encode(frame)[:-1])
        pair.bare.shutdown(socket.SHUT_WR)
        with pytest.raises(StreamBroken, match="it ended in the middle of a message"):
            reader.result(60)


def test_what_is_sent_arrives_in_order_and_sent_is_called_before_the_end_has_left():
    payload = bytes(range(256)) * 4096
    frame = Frame(FrameKind.PUSH, 0, 0, 0, "uint8", 0, len(payload), payload)
    with Pair() as pair:
        sent = threading.Event()
        pair.outbox.put(frame, sent.set)
        pair.outbox.put(Frame(FrameKind.PUSH, 0, 0, 1, "uint8", 0, 3, b"abc", 1), sent.set)
        expected = encode(frame)
        got = exactly(pair.bare, len(expected))
        assert sent.is_set()
        assert got == expected
        pair.outbox.finish()
        assert everything_from(pair.bare)[HEADER_BYTES:] in (b"abc", b"")  # finish drops what had not left


@pytest.mark.parametrize("nbytes", [1, tcp_connection._MOST_REST_BYTES, tcp_connection._MOST_REST_BYTES + 1])
def test_a_push_of_any_size_is_sent_before_an_answer_can_come(monkeypatch, nbytes):
    """Some of it has not left when ``sent`` is called: an answer that came first would end the job."""
    happened = []
    with Pair() as pair:
        write = pair.connection._write

        def noted(parts):
            happened.append(sum(map(len, parts)))
            write(parts)

        monkeypatch.setattr(pair.connection, "_write", noted)
        pair.outbox.put(Frame(FrameKind.PUSH, 0, 0, 0, "uint8", 0, nbytes, bytes(nbytes)), lambda: happened.append("sent"))
        exactly(pair.bare, HEADER_BYTES + nbytes)
    assert happened[-2] == "sent"
    assert 0 < happened[-1] <= tcp_connection._MOST_REST_BYTES + HEADER_BYTES


@pytest.fixture
def writes(monkeypatch):
    """A pair whose sender waits for an event, and what it does then: the bytes of each call, and each ``"sent"``."""
    happened, may_send = [], threading.Event()
    with Pair() as pair:
        write, choose = pair.connection._write, pair.outbox.next_now

        def noted(parts):
            may_send.wait(60)
            happened.append(sum(map(len, parts)))
            write(parts)

        monkeypatch.setattr(pair.connection, "_write", noted)
        monkeypatch.setattr(pair.outbox, "next_now", lambda: may_send.wait(60) and choose())
        yield pair, happened, may_send


def test_small_messages_that_wait_leave_by_one_call_and_never_more_than_may_be_committed(writes):
    pair, happened, may_send = writes
    frames = [frame_of(number, 10_000) for number in range(20)]
    for frame in frames:
        pair.outbox.put(frame, lambda: happened.append("sent"))
    may_send.set()
    expected = b"".join(map(encode, frames))
    assert exactly(pair.bare, len(expected)) == expected
    assert len([each for each in happened if each != "sent"]) <= 5
    assert happened.count("sent") == 20
    committed, most = 0, 0
    for each in happened:
        committed += HEADER_BYTES + 10_000 if each == "sent" else -each
        most = max(most, committed)
    assert most <= tcp_connection._MOST_REST_BYTES


def test_many_tiny_messages_leave_by_calls_that_the_kernel_accepts(writes):
    pair, happened, may_send = writes
    frames = [frame_of(number, 1, FrameKind.RESULT) for number in range(2000)]
    for frame in frames:
        pair.outbox.put(frame)
    may_send.set()
    expected = b"".join(map(encode, frames))
    assert exactly(pair.bare, len(expected)) == expected
    assert len(happened) < 20


def test_the_end_of_a_push_leaves_with_the_next_message(writes):
    pair, happened, may_send = writes
    nbytes = 3 * tcp_connection._MOST_REST_BYTES
    frames = [frame_of(number, nbytes) for number in range(3)]
    for frame in frames:
        pair.outbox.put(frame, lambda: happened.append("sent"))
    may_send.set()
    expected = b"".join(map(encode, frames))
    assert exactly(pair.bare, len(expected)) == expected
    most, rest = HEADER_BYTES + nbytes - tcp_connection._MOST_REST_BYTES, tcp_connection._MOST_REST_BYTES
    assert happened == [most, "sent", rest + most, "sent", rest + most, "sent", rest]


@pytest.mark.parametrize(
    ("bytes_per_second", "unsent", "rest"),
    [(1, 16, 8), (8_000_000, 16, 8), (8_500_000, 32, 16), (60_000_000, 128, 64), (1e9, 256, 64), (0, 256, 64)],
)
def test_the_kernel_holds_what_leaves_in_a_short_time(monkeypatch, bytes_per_second, unsent, rest):
    """KiB, and the rest of a push that counts as sent is half of it."""
    rates = [40_000_000, int(bytes_per_second)]
    monkeypatch.setattr(tcp_connection, "delivery_rate", lambda connected: rates.pop(0))
    nbytes = tcp_connection._MEASURED_BYTES
    with Pair() as pair:
        for number in range(2):
            frame = frame_of(number, nbytes, FrameKind.RESULT if number else FrameKind.PUSH)
            pair.outbox.put(frame, None if number else lambda: None)
            exactly(pair.bare, HEADER_BYTES + nbytes)
        pair.outbox.finish()
        pair.connection._sender.join(60)
        assert not rates
        held = pair.connection._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        assert (held, pair.connection._rest_bytes) == (unsent * 1024, rest * 1024)


def test_the_kernel_knows_how_fast_bytes_leave():
    with Pair() as pair:
        frame = frame_of(0, 4 * tcp_connection._MEASURED_BYTES)
        pair.outbox.put(frame)
        exactly(pair.bare, frame.nbytes)
        assert 1e6 < tcp_connection.delivery_rate(pair.connection._socket) < 1e12


def test_the_rest_of_a_push_is_smaller_as_soon_as_the_link_is_slow(writes, monkeypatch):
    """Also while messages never cease to wait."""
    pair, happened, may_send = writes
    monkeypatch.setattr(tcp_connection, "delivery_rate", lambda connected: 1_000_000)
    nbytes, before, slow = tcp_connection._MEASURED_BYTES, tcp_connection._MOST_REST_BYTES, 8 * 1024
    frames = [frame_of(number, nbytes) for number in range(3)]
    for frame in frames:
        pair.outbox.put(frame, lambda: happened.append("sent"))
    may_send.set()
    expected = b"".join(map(encode, frames))
    assert exactly(pair.bare, len(expected)) == expected
    whole = HEADER_BYTES + nbytes
    assert happened == [whole - before, "sent", before + whole - slow, "sent", whole, "sent", slow]


@pytest.mark.parametrize("taken", [0, 3, 4, 6, 11])
def test_what_a_signal_kept_the_kernel_from_taking_is_sent(taken):
    sent = []

    class Interrupted:
        def sendmsg(self, parts) -> int:
            sent.append(b"".join(parts)[:taken])
            return taken

        def sendall(self, data) -> None:
            sent.append(data)

    with Pair() as pair:
        whole, pair.connection._socket = pair.connection._socket, Interrupted()
        pair.connection._write([b"head", memoryview(b"payload")])
        pair.connection._socket = whole
    assert b"".join(sent) == b"headpayload"


def test_a_push_that_the_other_end_does_not_take_is_not_sent():
    """Credit comes back when bytes leave; a receiver that takes none holds it."""
    frame = Frame(FrameKind.PUSH, 0, 0, 0, "uint8", 0, 2**26, bytes(2**26))
    with Pair() as pair:
        sent = threading.Event()
        pair.outbox.put(frame, sent.set)
        assert exactly(pair.bare, HEADER_BYTES) == encode_header(frame)
        pair.connection.close()  # the sender's thread has ended then
        assert not sent.is_set()


@pytest.fixture
def taken():
    """A pair whose kernel has taken a push, but holds most of it unsent, as the other end does not read; the event that tells
    when it counts as sent; and the bytes."""
    nbytes = 200 * 1024
    sent, taken = threading.Event(), threading.Event()
    with Pair(receives_bytes=16 * 1024) as pair:
        wait, connection = pair.connection._writable.poll, pair.connection

        class Writable:
            def poll(self) -> list[tuple[int, int]]:
                taken.set()
                return wait()

        connection._writable = Writable()
        connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * nbytes)
        connection._unsent_bytes, connection._rest_bytes = 16 * 1024, 8 * 1024
        pair.outbox.put(Frame(FrameKind.PUSH, 0, 0, 0, "uint8", 0, nbytes, bytes(nbytes)), sent.set)
        assert taken.wait(60)
        yield pair, sent, HEADER_BYTES + nbytes


def test_a_large_push_is_sent_only_when_the_kernel_holds_little_of_it(taken):
    pair, sent, nbytes = taken
    assert not sent.is_set()
    exactly(pair.bare, nbytes)
    assert sent.wait(60)


def test_a_sender_that_waits_until_the_kernel_holds_little_ends_with_its_connection(taken):
    pair, sent, _ = taken
    pair.connection.close()  # returns when the sender's thread has ended
    assert not sent.is_set()


def test_the_kernel_may_hold_all_of_a_large_message_but_little_when_the_next_is_chosen(writes):
    pair, happened, may_send = writes
    hold = pair.connection._hold_unsent

    def noted(nbytes):
        happened.append(("hold", nbytes))
        hold(nbytes)

    pair.connection._hold_unsent = noted
    large, tiny = frame_of(0, 2**20, FrameKind.RESULT), frame_of(1, 10)
    for frame in (large, tiny):
        pair.outbox.put(frame)
    may_send.set()
    expected = encode(large) + encode(tiny)
    assert exactly(pair.bare, len(expected)) == expected
    most = pair.connection._unsent_bytes
    assert happened[:3] == [large.nbytes, ("hold", tcp_connection._ANY_BYTES), ("hold", most)]
    assert happened[-1] == tiny.nbytes


def test_a_peer_that_does_not_read_for_long_lives():
    """It may be busy in one call; its kernel answers."""
    with Pair(fail_after_seconds=0.1) as pair:
        payload = memoryview(bytearray(40_000_000))  # more than the kernel takes
        sent = threading.Event()
        pair.outbox.put(Frame(FrameKind.PUSH, 0, 0, 0, "uint8", 0, len(payload), payload), sent.set)
        frames = pair.connection.frames(place)
        reader = DaemonExecutor("test").submit(list, frames)
        assert not sent.wait(3.5)  # fail_after, and 2 s, and more
        assert not reader.done()
        exactly(pair.bare, HEADER_BYTES + len(payload))
        assert sent.wait(60)
        pair.bare.shutdown(socket.SHUT_WR)
        assert reader.result(60) == []


@pytest.mark.parametrize(("fail_after_seconds", "probe_seconds"), [(0.1, 1), (12.0, 3), (1e9, 2**15 - 1)])
def test_a_host_that_has_vanished_is_asked_for(fail_after_seconds, probe_seconds):
    """By the kernel, where nothing is sent; the most of such a time that Linux takes is some hours."""
    with Pair(fail_after_seconds=fail_after_seconds) as pair:
        asked = pair.connection._socket
        assert asked.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        for seconds in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            assert asked.getsockopt(socket.IPPROTO_TCP, seconds) == probe_seconds
        assert asked.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 5
        woken = struct.unpack("@ll", asked.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
        assert sum(woken) > 0  # else nobody would look whether what was sent is acknowledged
        pair.outbox.finish()


@pytest.mark.parametrize(
    ("retransmits", "probes", "last_answer_ms", "is_cut"),
    [(0, 0, 99_000, False), (3, 0, 4_900, False), (3, 0, 5_100, True), (0, 1, 5_100, True)],
)
def test_a_host_that_does_not_answer_ends_the_connection(retransmits, probes, last_answer_ms, is_cut):
    class Socket:
        def getsockopt(self, level: int, name: int, size: int) -> bytes:
            assert (level, name) == (socket.IPPROTO_TCP, socket.TCP_INFO)
            return struct.pack("=BBBB52xI", 1, 0, retransmits, probes, last_answer_ms)[:size]

    answers = Answers(Socket(), 5.0)
    if not retransmits:
        answers.require()  # a probe that has just left has no answer yet
    with pytest.raises(TimeoutError, match="its host has not answered for 5 s") if is_cut else nullcontext():
        answers.require()


def test_a_host_whose_answer_to_a_late_probe_is_under_way_lives():
    class Socket:
        seen = [(1, 5_100), (0, 30), (1, 12_800), (0, 30)]  # probes without an answer, and milliseconds since the last one

        def getsockopt(self, level: int, name: int, size: int) -> bytes:
            probes, last_answer_ms = self.seen.pop(0)
            return struct.pack("=BBBB52xI", 1, 0, 0, probes, last_answer_ms)[:size]

    answers = Answers(Socket(), 5.0)
    for _ in range(4):
        answers.require()


def test_an_error_in_the_senders_callback_ends_the_stream_with_it():
    def fail() -> None:
        raise PeerLost("a reason")

    with Pair() as pair:
        pair.outbox.put(Frame(FrameKind.PUSH, 0, 0, 0, "uint8", 0, 1, b"x"), fail)
        with pytest.raises(PeerLost, match="a reason"):
            list(pair.connection.frames(place))


def failing(error: OSError):
    def write(parts: list[bytes | memoryview]) -> None:
        raise error

    return write


def test_a_stream_that_can_send_no_more_ends_at_both_ends_and_says_why(monkeypatch):
    with Pair() as pair:
        monkeypatch.setattr(pair.connection, "_write", failing(OSError(errno.ENOBUFS, "No buffer space available")))
        pair.outbox.put(Frame(FrameKind.PUSH, 0, 0, 0, "uint8", 0, 1, b"x"))
        with pytest.raises(StreamBroken, match="No buffer space available"):
            list(pair.connection.frames(place))
        assert everything_from(pair.bare) == b""


@pytest.mark.parametrize(
    "error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), ConnectionResetError(errno.ECONNRESET, "Reset")]
)
def test_what_the_other_end_said_before_it_ended_is_heard(monkeypatch, error):
    with Pair() as pair:
        monkeypatch.setattr(pair.connection, "_write", failing(error))
        pair.outbox.put_control(Frame(FrameKind.GOODBYE))
        pair.connection._sender.join(60)
        pair.bare.sendall(encode(json_frame(FrameKind.ERROR, {"a": "reason"})))
        pair.bare.shutdown(socket.SHUT_WR)
        frames = pair.connection.frames(place)
        assert next(frames).json() == {"a": "reason"}
        with pytest.raises(StreamBroken, match=error.strerror):
            next(frames)


def test_the_last_word_arrives_though_the_other_end_still_sends():
    with Pair() as pair:
        pair.bare.sendall(bytes(1_000_000))
        pair.outbox.put_control(Frame(FrameKind.GOODBYE))
        pair.outbox.finish()
        lingering = threading.Thread(target=pair.connection.linger, args=(20,))
        lingering.start()
        assert everything_from(pair.bare) == encode(Frame(FrameKind.GOODBYE))
        pair.bare.shutdown(socket.SHUT_WR)
        lingering.join(60)
        assert not lingering.is_alive()


def test_who_does_not_end_is_not_waited_for_longer_than_said():
    with Pair() as pair:
        pair.outbox.finish()
        pair.connection.linger(0.05)


def test_a_result_before_its_push_has_left_is_refused(listening):
    failures = Failures()
    done = Ended()

    def serve() -> None:
        accepted, _ = listening.accept()
        with closing(accepted):
            LANE.accept(accepted, TOKEN, 60)
            accepted.sendall(encode(json_frame(FrameKind.HELLO, {})))
            exactly(accepted, HEADER_BYTES)
            accepted.sendall(encode(Frame(FrameKind.RESULT, 0, 0, 0, "uint8", 0, 2**26, bytes(2**26)))[: HEADER_BYTES + 10])
            ended.wait(60)

    ended = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    transport = connect(address_of(listening), "tcp", failures)
    task = make_task(data=memoryview(bytearray(2**26)), dtype="uint8")
    transport.start(task, done)
    assert "broke the protocol: an average of <CommTask all_reduce step 0 partition 0" in str(failures.first())
    assert "came before that task was sent" in str(failures.first())
    ended.set()
    thread.join(60)
    transport.close()
