"""The parameter server with ``security=tls``, over both lanes: what it keeps from people on the way."""

from __future__ import annotations

import re
import threading
from contextlib import closing, contextmanager
from dataclasses import replace
from time import monotonic

import numpy as np
import pytest

from commsched.core.errors import ConfigError, PeerLost, TransportError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.task import CommTask, Partition
from commsched.net.handshake import HandshakeRejected, read_exactly
from commsched.net.proof import NONCE_BYTES, PROOF_BYTES
from commsched.net.tls import identity_of
from commsched.testing.check_transport import check_transport
from commsched.testing.checked_world import world_of
from commsched.transports.backends.ps import open_transport
from commsched.transports.backends.ps.tcp_connection import LANE

from ....net.relay import Relay, nothing
from ...worlds import TOKEN, a_context, a_shard, open_ps
from .test_damage import BYTES, VALUE
from .test_tcp import dial, everything_from, socket_pair
from .test_transport import Ended, Failures

LANES = ["tcp", "grpc"]
OTHER_TOKEN = "the token of others"


@pytest.mark.parametrize("lane", LANES)
def test_conformance(lane):
    sizes, rounds = ((2, 3), 5) if lane == "tcp" else ((2,), 5)
    check_transport(world_of(open_transport, security="tls", lane=lane), world_sizes=sizes, rounds=rounds)


def connect(address, lane, failures, *, token=TOKEN, security="tls"):
    context = a_context(0, 1, failures, lane=lane, security=security, join_within=20.0)
    return open_ps(replace(context, token=token), [address])


@contextmanager
def a_worker(lane, change=nothing, *, security="tls"):
    """A worker that has registered, over a relay: its transport, the relay, and the failures of server and worker."""
    failures = Failures(), Failures()
    with closing(a_shard(None, failures[0], lane=lane, security=security)) as shard:
        with closing(Relay(shard.address, change)) as relay:
            transport = connect(relay.address, lane, failures[1], security=security)
            yield transport, relay, *failures
            transport.close(graceful=False)


def push(transport, nbytes=256, value=VALUE):
    """Start the push of a tensor of that size, in step 7."""
    transport.add_group(0, Manifest((TensorSpec("weight", (nbytes // 4,), "float32"),)))
    data = memoryview(bytearray(np.full(nbytes // 4, value, np.float32).tobytes()))
    ended = Ended()
    task = CommTask(0, 7, Partition(0, "float32", 0, nbytes, (0,)), data)
    transport.start(task, ended)
    return task, ended


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("security", ["none", "tls"])
def test_a_recorded_conversation_shows_gradients_and_names_only_without_tls(lane, security):
    with a_worker(lane, security=security) as (transport, relay, servers, workers):
        _, ended = push(transport)
        assert ended.done.wait(60)
        heard = relay.heard["server"] + relay.heard["worker"]
        seen = {secret: secret in heard for secret in (BYTES, b"weight", TOKEN.encode())}
        assert seen == {BYTES: security == "none", b"weight": security == "none", TOKEN.encode(): False}
        assert servers.none()
        assert workers.none()


@pytest.mark.parametrize("nbytes", [4, 2**14 - 4, 2**14, 2**15, 2**16 + 4, 300_000, 2_000_000])
def test_tensors_of_every_size_arrive(nbytes):
    with a_worker("tcp") as (transport, _, servers, workers):
        task, ended = push(transport, nbytes)
        assert ended.done.wait(60)
        assert set(np.frombuffer(task.data, np.float32)) == {np.float32(VALUE)}
        assert servers.none()
        assert workers.none()


class Strike:
    """Once it is armed, ``change`` changes the next bytes on the way ``to``, and no others."""

    def __init__(self, to, change):
        self.armed = threading.Event()
        self._to, self._change = to, change

    def __call__(self, to, data):
        if to != self._to or not self.armed.is_set():
            return data
        self.armed.clear()
        return self._change(data)


def flip(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def replay(data):
    return data + data


ALTERED = (
    r"somebody on the way changes, replays or invents bytes, or a network card, switch or memory does \(TLS: .*BAD_RECORD_MAC\)"
)


@pytest.mark.parametrize("change", [flip, replay])
def test_who_changes_or_repeats_what_a_worker_sends_ends_the_job_by_name(change):
    strike = Strike("server", change)
    with a_worker("tcp", strike) as (transport, _, servers, workers):
        strike.armed.set()
        _, ended = push(transport)
        assert type(servers.first()) is TransportError
        assert re.fullmatch(
            rf"the server at 127\.0\.0\.1:\d+ got from rank 0 \(127\.0\.0\.1:\d+\) what that did not send: {ALTERED}",
            str(servers.first()),
        )
        # The server's last words may be lost, if its kernel ends the connection.
        said = rf"server 0 at 127\.0\.0\.1:\d+ (got from rank 0 what that did not send: {ALTERED}|is gone: .*)"
        assert re.fullmatch(said, str(workers.first()))
        if change is flip:
            assert not ended.done.is_set()


def test_who_changes_what_a_server_sends_ends_the_job_by_name():
    strike = Strike("worker", flip)
    with a_worker("tcp", strike) as (transport, relay, _, workers):
        strike.armed.set()
        _, ended = push(transport)
        assert type(workers.first()) is TransportError
        said = rf"rank 0 got from server 0 at {relay.address} what that did not send: {ALTERED}"
        assert re.fullmatch(said, str(workers.first()))
        assert not ended.done.is_set()


def test_who_changes_what_travels_by_grpc_ends_the_job_by_name():
    strike = Strike("server", flip)
    with a_worker("grpc", strike) as (transport, _, servers, workers):
        strike.armed.set()
        _, ended = push(transport)
        assert isinstance(servers.first(), PeerLost)
        assert str(servers.first()).startswith("rank 0 is gone: its connection to the server at ")
        assert isinstance(workers.first(), (PeerLost, TransportError))
        assert not ended.done.is_set()


def test_a_recorded_conversation_is_refused_when_it_comes_again():
    with closing(a_shard(None, failures := Failures(), security="tls")) as shard, closing(Relay(shard.address)) as relay:
        transport = connect(relay.address, "tcp", failures)
        _, ended = push(transport)
        assert ended.done.wait(60)
        with dial(shard.address) as again:
            again.sendall(relay.heard["server"])
            assert BYTES not in everything_from(again)
        assert failures.none()  # the job goes on
        transport.close()


@pytest.mark.parametrize("lane", LANES)
def test_a_server_with_another_token_is_named_at_once(lane):
    with closing(a_shard(None, Failures(), lane=lane, token=OTHER_TOKEN, security="tls")) as shard:
        with pytest.raises(ConfigError) as refused:
            connect(shard.address, lane, Failures())
        assert str(refused.value) == (
            f"server 0 at {shard.address} does not prove that it belongs to this job (certificate signature failure); set the "
            "same COMMSCHED_TOKEN everywhere, or another program is there"
        )


@pytest.mark.parametrize(
    ("worker", "server", "lane", "said"),
    [
        ("none", "tls", "tcp", "takes encrypted connections only; give all ranks and servers security=tls"),
        ("tls", "none", "tcp", "does not speak lane=tcp with security=tls; give all ranks and servers the same settings"),
        ("tls", "none", "grpc", "does not speak TLS; give all ranks and servers security=tls"),
    ],
)
def test_a_setting_that_one_of_them_lacks_is_named(worker, server, lane, said):
    with closing(a_shard(None, Failures(), lane=lane, security=server)) as shard:
        with pytest.raises(ConfigError, match=re.escape(f"server 0 at {shard.address} {said}")):
            connect(shard.address, lane, Failures(), security=worker)


def test_who_has_a_certificate_cannot_pass_on_the_proof_of_a_member():
    """It ends the worker's connection, begins one of its own to the server, and passes everything on."""
    workers, its, servers = (identity_of("tls", TOKEN, None) for _ in range(3))
    raised = []

    def run(part):
        try:
            part()
        except Exception as error:
            raised.append((type(error), str(error)))

    def worker():
        LANE.connect(LANE.secure_connecting(to_worker, "server 0", workers, 60), "server 0", TOKEN, "", 60)

    def server():
        LANE.accept(LANE.secure_listening(to_server, servers, 60), TOKEN, 60)

    def pass_on():
        from_worker = LANE.secure_listening(near_worker, its, 60)
        from_server = LANE.secure_connecting(near_server, "server 0", its, 60)
        deadline = monotonic() + 60
        from_worker.sendall(read_exactly(from_server, 4 + NONCE_BYTES, deadline))
        from_server.sendall(read_exactly(from_worker, 4 + NONCE_BYTES + PROOF_BYTES + 1, deadline))
        from_worker.sendall(read_exactly(from_server, 1, deadline))

    with socket_pair() as (near_worker, to_worker), socket_pair() as (near_server, to_server):
        threads = [threading.Thread(target=run, args=(part,)) for part in (worker, server, pass_on)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    refused = (HandshakeRejected, "it does not have this job's token")
    not_admitted = (ConfigError, "server 0 has another token; set the same COMMSCHED_TOKEN everywhere")
    assert sorted(raised, key=str) == sorted([refused, not_admitted], key=str)


def test_a_stranger_who_sends_nonsense_costs_the_job_nothing():
    with closing(a_shard(None, failures := Failures(), security="tls")) as shard:
        for nonsense in (b"", b"\x16\x03\x01\x00\x05hello", bytes(1000), b"GET / HTTP/1.1\r\n\r\n"):
            with dial(shard.address) as stranger:
                assert stranger.recv(4)[:3] == b"CSS"
                stranger.sendall(nonsense)
        transport = connect(shard.address, "tcp", failures)
        _, ended = push(transport)
        assert ended.done.wait(60)
        transport.close()
        assert failures.none()
