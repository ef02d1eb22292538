from __future__ import annotations

import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import pytest

from commsched.core.errors import ConfigError
from commsched.net import rpc
from commsched.net.proof import prove
from commsched.net.rpc import (
    Call,
    Challenges,
    DaemonExecutor,
    TokenInterceptor,
    Unproven,
    bind,
    channel_options,
    listen,
    make_channel,
    make_server,
    server_options,
)

from ..control.world import PATIENCE_SECONDS

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
    script = (
        "import threading; from commsched.net.rpc import DaemonExecutor; DaemonExecutor('x').submit(threading.Event().wait)"
    )
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


def echo_server(
    executor: DaemonExecutor, token: str, seen: list[Any], fail_after_seconds: float = 10.0, job: str | None = None
) -> grpc.Server:
    """Answers each message with itself; ``seen``: the messages."""

    def echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            seen.append(request)
            yield request

    server = make_server(executor, token, fail_after_seconds, 1000, job)
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    return server


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo("secret", "this job")
    yield echo
    echo.close()


class Echo:
    """An echo server, and how a call to it ends."""

    def __init__(self, token: str, job: str | None, fail_after_seconds: float = 10.0) -> None:
        self.seen: list[Any] = []
        self._executor = DaemonExecutor("test-pool")
        self._server = echo_server(self._executor, token, self.seen, fail_after_seconds, job)
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1:0')}"
        self._server.start()
        self.channel = make_channel(self.address, 10.0, 1000)

    def call(self, token: str = "secret", job: str = "this job") -> list[bytes]:
        return list(Call(self.channel, "/test/Echo", iter([b"hi"]), token, job))

    def bare_call(self, metadata: Any) -> tuple[grpc.StatusCode, str, dict[str, bytes]]:
        with pytest.raises(grpc.RpcError) as error:
            list(self.channel.stream_stream("/test/Echo")(iter([b"hi"]), metadata=metadata))
        return error.value.code(), error.value.details(), dict(error.value.trailing_metadata())

    def close(self) -> None:
        self.channel.close()
        self._server.stop(None)
        self._executor.shutdown()


def test_who_knows_token_and_job_is_answered(echo: Echo) -> None:
    assert echo.call() == [b"hi"]
    assert echo.call() == [b"hi"]


def test_a_server_of_no_job_answers_every_job_and_knows_which() -> None:
    echo = Echo("naïve\n\ud7ff token", None)
    for job in ("a job", "naïve job", ""):
        assert echo.call("naïve\n\ud7ff token", job) == [b"hi"]
    echo.close()


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer secret"),),
        (("commsched-proof-bin", b""),),
        (("commsched-proof-bin", b"x" * 32), ("commsched-job-bin", b"\xff")),
        (("commsched-challenge-bin", b""), ("commsched-nonce-bin", b""), ("commsched-proof-bin", b"x" * 32)),
        (
            ("commsched-challenge-bin", b"c"),
            ("commsched-nonce-bin", b"n"),
            ("commsched-proof-bin", prove("secret", b"member of /test/Echo", b"c", b"n", "")),
        ),
    ],
)
def test_without_the_token_no_handler_sees_a_message(metadata: Any, echo: Echo) -> None:
    code, _, _ = echo.bare_call(metadata)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.RpcError) as error:
        echo.channel.unary_unary("/test/Anything")(b"hi", metadata=metadata, timeout=PATIENCE_SECONDS)
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert echo.seen == []


def test_another_token_is_refused_and_the_log_says_so_once(echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as error:
            echo.call(token="guess")
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    [warning] = caplog.messages
    assert re.fullmatch(r"refused a call from ipv4:127\.0\.0\.1:\d+: it does not prove this job's token", warning)
    assert echo.seen == []


def test_another_job_is_refused_and_both_are_named(echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(grpc.RpcError) as error:
        echo.call(job="that job")
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.value.details() == "it serves job 'this job', and this is job 'that job'"
    with pytest.raises(grpc.RpcError, match="it serves job 'this job', and this is a job without a name"):
        echo.call(job="")
    assert "refused a call from ipv4:127.0.0.1:" in caplog.text
    assert ": it belongs to job 'that job', and this is job 'this job'" in caplog.text
    assert echo.seen == []


def test_what_a_member_has_sent_is_worth_nothing_to_who_saw_it(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    original = rpc.TokenInterceptor.intercept_service

    def recorded(self: Any, continuation: Any, details: Any) -> Any:
        sent.append(tuple(details.invocation_metadata))
        return original(self, continuation, details)

    monkeypatch.setattr(rpc.TokenInterceptor, "intercept_service", recorded)
    assert echo.call() == [b"hi"]
    assert len(sent) == 2  # it asked, and it answered
    assert b"secret" not in b"".join(part if isinstance(part, bytes) else part.encode() for pair in sent[1] for part in pair)
    metadata = tuple((key, value) for key, value in sent[1] if key.startswith("commsched-"))
    assert echo.bare_call(metadata)[:2] == (grpc.StatusCode.UNAUTHENTICATED, "this job's token is required")
    _, _, shown = echo.bare_call(())
    fresh = {**dict(metadata), "commsched-challenge-bin": shown["commsched-challenge-bin"]}
    assert echo.bare_call(tuple(fresh.items()))[0] is grpc.StatusCode.UNAUTHENTICATED
    assert echo.seen == [b"hi"]


class Impostor:
    """A server that does not know the token, and answers a call as ``answer`` does; ``heard``: what callers sent it."""

    def __init__(self, answer: Callable[[dict[str, bytes], grpc.ServicerContext], Iterator[bytes]]) -> None:
        self.heard: list[bytes] = []
        self._answer = answer
        self._executor = DaemonExecutor("test-pool")
        self._server = grpc.server(self._executor)
        handlers = {"Echo": grpc.stream_stream_rpc_method_handler(self._serve)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1:0')}"
        self._server.start()

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        shown = dict(context.invocation_metadata())
        if "commsched-proof-bin" not in shown:
            context.set_trailing_metadata((("commsched-challenge-bin", b"x" * 72),))
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "")
        self._executor.submit(lambda: self.heard.extend(requests))
        yield from self._answer(shown, context)

    def close(self) -> None:
        self._server.stop(None)
        self._executor.shutdown()


def says_welcome(shown: dict[str, bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    yield b"welcome"


def reflects(shown: dict[str, bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    context.send_initial_metadata((("commsched-proof-bin", shown["commsched-proof-bin"]),))
    yield b"welcome"


def says_nothing(shown: dict[str, bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    return iter(())


@pytest.mark.parametrize("answer", [says_welcome, reflects, says_nothing])
def test_a_server_that_cannot_prove_the_token_is_told_nothing_and_not_believed(answer: Any) -> None:
    impostor = Impostor(answer)
    with make_channel(impostor.address, 10.0, 1000) as channel:
        got = []
        with pytest.raises(Unproven, match="does not prove that it has this job's token; another program may listen there"):
            got.extend(Call(channel, "/test/Echo", iter([b"a secret"]), "secret", "this job"))
    impostor.close()
    assert got == impostor.heard == []


def test_a_call_that_is_cancelled_ends_wherever_it_is(echo: Echo) -> None:
    before = Call(echo.channel, "/test/Echo", iter([]), "secret", "this job")
    before.cancel()
    assert list(before) == []
    release = threading.Event()

    def requests() -> Iterator[bytes]:
        yield b"first"
        release.wait(PATIENCE_SECONDS)

    amid = Call(echo.channel, "/test/Echo", requests(), "secret", "this job")
    messages = iter(amid)
    assert next(messages) == b"first"
    amid.cancel()
    with pytest.raises(grpc.RpcError) as error:
        next(messages)
    assert error.value.code() is grpc.StatusCode.CANCELLED
    release.set()


#: What a client says first, with an empty SETTINGS frame, so that the connection is in good order and idle.
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("said", [b"", HTTP_2])
def test_idle_strangers_take_few_descriptors_and_keep_no_caller_away(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(rpc, "most_strangers", lambda: 8)
    monkeypatch.setattr(rpc, "_HANDSHAKE_MS", 1000)
    monkeypatch.setattr(rpc, "_IDLE_MS", 1000)
    echo = Echo("secret", "this job", fail_after_seconds=100.0)  # keepalive would end them after 1.5 times that
    host, _, port = echo.address.rpartition(":")
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(40):
            stranger = stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS))
            with suppress(OSError):  # it may have been sent away already
                stranger.sendall(said)
            selector.register(stranger, selectors.EVENT_READ)
        left = 40
        while left:  # those beyond the limit are sent away at once, and the others in their time
            ready = selector.select(PATIENCE_SECONDS)
            assert ready, f"{left} strangers are still there"
            for key, _ in ready:
                try:
                    heard = key.fileobj.recv(4096)
                except ConnectionResetError:
                    heard = b""
                if not heard:
                    selector.unregister(key.fileobj)
                    left -= 1
                    if left == 40 - 8:
                        call = Call(echo.channel, "/test/Echo", iter([b"hi"]), "secret", "this job", wait_for_ready=True)
                        assert list(call) == [b"hi"]  # it tries again until there is room
    echo.close()


def test_strangers_are_left_a_quarter_of_the_descriptors_and_members_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[Any] = []
    monkeypatch.setattr(grpc, "server", lambda *_, **given: options.append(dict(given["options"])))
    for soft, most, wanted in ((1024, 0, 256), (1024, 600, 600), (20, 0, 16), (-1, 0, 4096), (2**20, 0, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        make_server(DaemonExecutor("test-pool"), "secret", 10.0, 1000, most_connections=most)
        assert options.pop()["grpc.max_allowed_incoming_connections"] == wanted


def test_a_challenge_is_taken_once_and_within_a_minute() -> None:
    now = 0.0
    challenges = Challenges(lambda: now)
    first, second = challenges.make(), challenges.make()
    assert not Challenges(lambda: now).take(first)  # another server's
    assert not challenges.take(b"")
    assert not challenges.take(first[:-1] + b"!")
    assert challenges.take(first)
    assert not challenges.take(first)
    now = 59.0
    assert not challenges.take(first)
    assert challenges.take(second)
    late = challenges.make()
    now = 200.0
    assert not challenges.take(late)
    for _ in range(100):
        assert challenges.take(challenges.make())
    now = 300.0
    for _ in range(100):
        assert challenges.take(challenges.make())
    assert len(challenges._taken) <= 200  # what is too old is forgotten once there is much of it
    now = 400.0
    for _ in range(100):
        assert challenges.take(challenges.make())
    assert len(challenges._taken) <= 200


def test_an_empty_token_is_refused() -> None:
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
                list(Call(channel, "/test/Echo", iter([b"x" * 1001]), "secret", "this job"))
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
        stream = iter(Call(channel, "/test/Echo", messages(), "secret", "this job"))
        assert next(stream) == b"first"
        assert not threading.Event().wait(5)  # gRPC pings once a second at most; a server with its own limits bears four
        done.set()
        assert list(stream) == [b"last"]
    server.stop(None)
    executor.shutdown()


FROZEN_SERVER = """
import sys, threading
from commsched.net.rpc import DaemonExecutor, bind
from tests.net.test_rpc import echo_server
server = echo_server(DaemonExecutor("x"), "secret", [], 0.5)
print(bind(server, "127.0.0.1:0"), flush=True)
server.start()
threading.Event().wait()
"""


def test_a_frozen_server_ends_the_connection_without_any_heartbeat_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_MIN_PATIENCE_SECONDS", 1.0)
    process = subprocess.Popen([sys.executable, "-c", FROZEN_SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = f"127.0.0.1:{int(process.stdout.readline())}"
        done = threading.Event()

        def messages() -> Iterator[bytes]:
            yield b"first"
            done.wait()

        with make_channel(address, 0.5, 1000) as channel:
            stream = iter(Call(channel, "/test/Echo", messages(), "secret", "this job", wait_for_ready=True))
            assert next(stream) == b"first"
            began = time.monotonic()
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.RpcError) as error:
                next(stream)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert 0.5 < time.monotonic() - began < 60  # keepalive_timeout alone takes over a minute
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
