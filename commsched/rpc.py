"""gRPC as both the control channel and the parameter server use it: options, threads, the port and the job's token.

Handlers are generic and serializers are the identity, so what travels is the bytes given and nothing is unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import grpc

from .core.errors import ConfigError

log = logging.getLogger("commsched")

T = TypeVar("T")
Options = list[tuple[str, int]]

_AUTHORIZATION = "authorization"

#: The longest time that gRPC takes.
_MOST_MS = 2**31 - 1


def server_options(fail_after_seconds: float, max_message_bytes: int) -> Options:
    """Options of a server whose clients use :func:`channel_options` with the same arguments."""
    ping_every_ms, _ = _keepalive_ms(fail_after_seconds)
    return [
        # Else two servers may share one port, and clients are split between them.
        ("grpc.so_reuseport", 0),
        *_both_ends(fail_after_seconds, max_message_bytes),
        # Else a server ends a healthy connection with "too many pings".
        ("grpc.http2.min_ping_interval_without_data_ms", max(1, ping_every_ms // 2)),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def channel_options(fail_after_seconds: float, max_message_bytes: int) -> Options:
    """Options of a channel to a server made with :func:`server_options` and the same arguments."""
    return [
        *_both_ends(fail_after_seconds, max_message_bytes),
        # The cluster's HTTP proxy, if the environment names one, is for the web and not for the ranks of a job.
        ("grpc.enable_http_proxy", 0),
        # A channel of its own connection: another channel of this process must not share its fate.
        ("grpc.use_local_subchannel_pool", 1),
        # While rank 0 starts, try again soon; the default grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


def _both_ends(fail_after_seconds: float, max_message_bytes: int) -> Options:
    ping_every_ms, ping_timeout_ms = _keepalive_ms(fail_after_seconds)
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", ping_every_ms),
        ("grpc.keepalive_timeout_ms", ping_timeout_ms),
        # keepalive_timeout alone took over a minute to end a connection to a frozen process: this one decides.
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _keepalive_ms(fail_after_seconds: float) -> tuple[int, int]:
    """How often to ping, and how long to wait for the answer.

    Longer than ``fail_after``, so that a peer that pauses for less lives, and so that the control channel's heartbeats, which
    name the peer and the seconds, tell first. Keepalive is what ends connections that nobody's heartbeat watches.
    """
    every_ms, timeout_ms = max(10, round(fail_after_seconds * 500)), round(fail_after_seconds * 1000) + 2000
    return min(every_ms, _MOST_MS), min(timeout_ms, _MOST_MS)


class DaemonExecutor(Executor):
    """Runs each call in a daemon thread of its own, named ``<name>-<n>``.

    The standard pool's threads are joined when the interpreter exits, before ``atexit`` handlers run: with streams that live
    as long as the job, a script that ends without closing its session would hang.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._started = 0
        self._shut_down = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call ``fn`` in a new thread.

        Raises:
            RuntimeError: after :meth:`shutdown`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._shut_down:
                raise RuntimeError(f"{self._name} takes no calls after shutdown")
            self._started += 1
            name = f"{self._name}-{self._started}"
            thread = threading.Thread(target=self._run, args=(future, fn, args, kwargs), name=name, daemon=True)
            thread.start()  # with the lock held, so that shutdown never joins a thread that has not started
            # Not forgotten by itself when its call returns: it lives a moment longer, and shutdown is to wait for that too.
            self._threads = {thread, *(other for other in self._threads if other.is_alive())}
        return future

    def _run(self, future: Future[T], fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; with ``wait``, return when the last has ended (the caller's own excepted)."""
        with self._lock:
            self._shut_down = True
            threads = self._threads - {threading.current_thread()}
        if wait:
            for thread in threads:
                thread.join()


def make_server(executor: Executor, token: str, fail_after_seconds: float, max_message_bytes: int) -> grpc.Server:
    """A server that answers only calls that carry ``token``; see :func:`bind` for its port.

    Raises:
        ConfigError: the token is empty.
    """
    options = server_options(fail_after_seconds, max_message_bytes)
    return grpc.server(executor, interceptors=[TokenInterceptor(token)], options=options)


def make_channel(address: str, fail_after_seconds: float, max_message_bytes: int) -> grpc.Channel:
    """A channel to a server of :func:`make_server`; give :func:`token_metadata` to each call."""
    return grpc.insecure_channel(address, options=channel_options(fail_after_seconds, max_message_bytes))


def bind(server: grpc.Server, address: str) -> int:
    """Let ``server`` listen at ``address`` (host:port); return the real port, which port 0 leaves to the system.

    Raises:
        ConfigError: the address is taken, or is not one of this machine; names it.
    """
    try:
        port: int = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        listen(address).close()  # gRPC does not say why it could not; a plain socket does
        raise ConfigError(f"cannot listen at {address}: gRPC could not bind it")
    return port


def listen(address: str) -> socket.socket:
    """A plain socket that listens at ``address`` (host:port; port 0: any free one), at the first that the host's name stands
    for and this machine has.

    Raises:
        ConfigError: the port is taken, or the address is not one of this machine; names it.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"cannot listen at {address}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"cannot listen at {address}: it is not host:port") from error
    refusals: list[OSError] = []
    for family, kind, protocol, _, where in found:
        try:
            return _listen_at(socket.socket(family, kind, protocol), where)
        except OSError as error:
            refusals.append(error)
            if error.errno == errno.EADDRINUSE:
                break  # clients try this one first too, and would come to the other process
    raise ConfigError(f"cannot listen at {address}: {_why_not(refusals[-1])}") from refusals[-1]


def _listen_at(listening: socket.socket, where: Any) -> socket.socket:
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not SO_REUSEPORT: two servers would share clients
        listening.bind(where)
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def _why_not(refusal: OSError) -> str:
    if refusal.errno == errno.EADDRINUSE:
        return "the port is taken by another process; choose another, or 0 for any free one"
    return refusal.strerror or str(refusal)


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a call must carry for a server made with the same token to answer it."""
    return ((_AUTHORIZATION, _credential(token)),)


def _credential(token: str) -> str:
    # A digest, because a header takes only printable ASCII, and so that no trace of headers shows the token itself.
    return "Bearer " + hashlib.sha256(token.encode()).hexdigest()


class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Ends a call without the job's token as UNAUTHENTICATED, before its handler sees any message."""

    def __init__(self, token: str) -> None:
        if not token:
            raise ConfigError("the job's token is empty; set the same COMMSCHED_TOKEN on every rank")
        self._expected = _credential(token).encode()
        self._refuse = grpc.stream_stream_rpc_method_handler(self._abort)  # reads nothing, whatever kind of call it is
        self._warn_again_at = 0.0

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        shown = dict(handler_call_details.invocation_metadata).get(_AUTHORIZATION, "")
        shown_bytes = shown if isinstance(shown, bytes) else shown.encode()
        if hmac.compare_digest(shown_bytes, self._expected):
            return continuation(handler_call_details)
        return self._refuse

    def _abort(self, requests: object, context: grpc.ServicerContext) -> None:
        now = time.monotonic()
        if now >= self._warn_again_at:  # a stranger must not fill the log
            self._warn_again_at = now + 10
            log.warning("refused a call from %s: it does not carry this job's token", context.peer())
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "this job's token is required")
