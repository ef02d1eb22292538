from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from commsched.core.errors import ConfigError
from commsched.rpc import (
    DaemonExecutor,
    TokenInterceptor,
    bind,
    channel_options,
    listen,
    make_channel,
    make_server,
    server_options,
    token_metadata,
)

from .world import PATIENCE_SECONDS

pytestmark = pytest.mark.timeout(60)


# --- threads ---


def test_each_call_has_a_daemon_thread_of_its_own() -> None:
    executor = DaemonExecutor("test-pool")
    both = threading.Barrier(2)

    def call() -> tuple[str, bool]:
        both.wait(PATIENCE_SECONDS)
        return threading.current_thread().name, threading.current_thread().daemon

    futures = [executor.submit(call) for _ in range(2)]
    assert {future.result(PATIENCE_SECONDS) for future in futures} == {("test-pool-1", True), ("test-pool-2", True)}
    executor.shutdown()


def test_an_exception_is_the_futures() -> None:
    executor = DaemonExecutor("test-pool")
    with pytest.raises(ValueError, match="boom"):
        executor.submit(lambda: (_ for _ in ()).throw(ValueError("boom")).send(None)).result(PATIENCE_SECONDS)
    executor.shutdown()


def test_shutdown_waits_for_calls_and_takes_no_more() -> None:
    executor, release = DaemonExecutor("test-pool"), threading.Event()
    future: Future[bool] = executor.submit(release.wait, PATIENCE_SECONDS)
    executor.shutdown(wait=False)
    assert not future.done()
    with pytest.raises(RuntimeError, match="test-pool takes no calls after shutdown"):
        executor.submit(print)
    release.set()
    executor.shutdown()
    assert future.result(0) is True


def test_a_call_may_shut_its_executor_down() -> None:
    executor = DaemonExecutor("test-pool")
    executor.submit(executor.shutdown).result(PATIENCE_SECONDS)


def test_a_script_ends_although_a_call_never_does() -> None:
    script = "import threading; from commsched.rpc import DaemonExecutor; DaemonExecutor('x').submit(threading.Event().wait)"
    assert subprocess.run([sys.executable, "-c", script], timeout=3 * PATIENCE_SECONDS, check=False).returncode == 0


# --- the port ---


@pytest.fixture
def server() -> Iterator[grpc.Server]:
    server = grpc.server(DaemonExecutor("test-pool"), options=server_options(10.0, 1000))
    yield server
    server.stop(None)


def test_port_0_is_any_free_one(server: grpc.Server) -> None:
    assert 0 < bind(server, "127.0.0.1:0") <= 65535


@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_taken_port_is_named(server: grpc.Server, reuse_port: bool) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=reuse_port) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(ConfigError) as error:
            bind(server, address)
        assert str(error.value) == (
            f"cannot listen at {address}: the port is taken by another process; choose another, or 0 for any free one"
        )


@pytest.mark.parametrize(
    ("address", "why"),
    [("192.0.2.1:0", "Cannot assign requested address"), ("no-such-host.invalid:0", ""), ("nonsense:port", "")],
)
def test_an_address_that_is_not_ours_is_named(server: grpc.Server, address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen at {address}: .*{why}"):
        bind(server, address)


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def test_a_name_with_several_addresses_is_listened_at_by_the_first_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, ("198.51.100.1", 0), ("127.0.0.1", 0))
    with listen("name:0") as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    resolve_to(monkeypatch, ("198.51.100.1", 0), ("203.0.113.1", 0))
    with pytest.raises(ConfigError, match="cannot listen at name:0: Cannot assign requested address"):
        listen("name:0")


def test_a_port_taken_at_one_address_of_a_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        resolve_to(monkeypatch, ("127.0.0.1", holder.getsockname()[1]), ("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="cannot listen at name:7: the port is taken by another process"):
            listen("name:7")


def test_two_servers_do_not_share_a_port(server: grpc.Server) -> None:
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    other = grpc.server(DaemonExecutor("test-pool"), options=server_options(10.0, 1000))
    with pytest.raises(ConfigError, match="the port is taken"):
        bind(other, address)


# --- the token ---


def echo_server(executor: DaemonExecutor, token: str, seen: list[Any], fail_after_seconds: float = 10.0) -> grpc.Server:
    """Answers each message with itself; ``seen``: the messages."""

    def echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            seen.append(request)
            yield request

    server = make_server(executor, token, fail_after_seconds, 1000)
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    return server


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        token_metadata("wrong"),
        (("authorization", ""),),
        (("authorization", "Bearer secret"),),
        (("authorization-bin", b"\xff"),),
    ],
)
def test_without_the_token_no_handler_sees_a_message(metadata: Any) -> None:
    executor, seen = DaemonExecutor("test-pool"), []
    server = echo_server(executor, "secret", seen)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    server.start()
    with make_channel(address, 10.0, 1000) as channel:
        with pytest.raises(grpc.RpcError) as error:
            list(channel.stream_stream("/test/Echo")(iter([b"hi"]), metadata=metadata))
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary("/test/Anything")(b"hi", metadata=metadata, timeout=PATIENCE_SECONDS)
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert seen == []
        assert list(channel.stream_stream("/test/Echo")(iter([b"hi"]), metadata=token_metadata("secret"))) == [b"hi"]
    server.stop(None)
    executor.shutdown()


def test_any_text_may_be_a_token_and_none_shows_in_the_header() -> None:
    [(key, value)] = token_metadata("naïve\n\ud7ff token")
    assert key == "authorization"
    assert value.isascii()
    assert value.isprintable()
    assert "token" not in value
    with pytest.raises(ConfigError, match="the job's token is empty; set the same COMMSCHED_TOKEN on every rank"):
        TokenInterceptor("")


def test_a_message_longer_than_allowed_is_refused_at_both_ends() -> None:
    executor, seen = DaemonExecutor("test-pool"), []
    server = echo_server(executor, "secret", seen)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    server.start()
    for channel_limit in (1000, 10_000):
        with make_channel(address, 10.0, channel_limit) as channel:
            with pytest.raises(grpc.RpcError) as error:
                list(channel.stream_stream("/test/Echo")(iter([b"x" * 1001]), metadata=token_metadata("secret")))
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert seen == []
    server.stop(None)
    executor.shutdown()


# --- keepalive ---


def test_pings_of_ours_never_end_a_healthy_connection() -> None:
    """With the server's own limits a client that pings this often is cut off after a few pings."""
    executor, seen = DaemonExecutor("test-pool"), []
    server = echo_server(executor, "secret", seen, fail_after_seconds=0.1)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    server.start()
    done = threading.Event()

    def messages() -> Iterator[bytes]:
        yield b"first"
        done.wait(PATIENCE_SECONDS)
        yield b"last"

    with make_channel(address, 0.1, 1000) as channel:
        stream = channel.stream_stream("/test/Echo")(messages(), metadata=token_metadata("secret"))
        assert next(stream) == b"first"
        assert not threading.Event().wait(5)  # gRPC pings once a second at most; a server with its own limits bears four
        done.set()
        assert list(stream) == [b"last"]
    server.stop(None)
    executor.shutdown()


FROZEN_SERVER = """
import sys, threading
from commsched.rpc import DaemonExecutor, bind
from tests.control.test_rpc import echo_server
server = echo_server(DaemonExecutor("x"), "secret", [], 0.5)
print(bind(server, "127.0.0.1:0"), flush=True)
server.start()
threading.Event().wait()
"""


def test_a_frozen_server_ends_the_connection_without_any_heartbeat_of_ours() -> None:
    process = subprocess.Popen([sys.executable, "-c", FROZEN_SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = f"127.0.0.1:{int(process.stdout.readline())}"
        done = threading.Event()

        def messages() -> Iterator[bytes]:
            yield b"first"
            done.wait()

        with make_channel(address, 0.5, 1000) as channel:
            call = channel.stream_stream("/test/Echo")
            stream = call(messages(), metadata=token_metadata("secret"), wait_for_ready=True)
            assert next(stream) == b"first"
            began = time.monotonic()
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.RpcError) as error:
                next(stream)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert 0.5 < time.monotonic() - began < 20  # keepalive_timeout alone takes over a minute
            done.set()
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


def test_options_agree_at_both_ends() -> None:
    for fail_after in (0.1, 1.0, 10.0, 100.0):
        server, channel = dict(server_options(fail_after, 5)), dict(channel_options(fail_after, 7))
        assert server["grpc.so_reuseport"] == 0
        assert server["grpc.http2.min_ping_interval_without_data_ms"] < channel["grpc.keepalive_time_ms"]
        for options, size in ((server, 5), (channel, 7)):
            assert options["grpc.http2.ping_timeout_ms"] == options["grpc.keepalive_timeout_ms"] > fail_after * 1000
            assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == size
