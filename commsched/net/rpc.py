"""gRPC for the control channel and the parameter server: options, threads, the port and the job's token.

Handlers are generic and serializers are the identity, so the given bytes are sent unchanged and nothing is unpickled.
"""

from __future__ import annotations

import errno
import hmac
import logging
import resource
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, cast

import grpc

from ..core.errors import ConfigError
from .proof import PROOF_BYTES, is_proof, make_nonce, prove
from .tls import MEMBER_NAME, Identity, digest_of

log = logging.getLogger("commsched")

T = TypeVar("T")
Options = list[tuple[str, int]]

#: Metadata keys of the proofs. The member's values are metadata of a call; the server's proof is metadata of its answer.
_CHALLENGE, _NONCE, _PROOF, _JOB, _CERTIFICATE = (
    f"commsched-{name}-bin" for name in ("challenge", "nonce", "proof", "job", "certificate")
)

#: Longest time that a member may take to answer a challenge.
_CHALLENGE_SECONDS = 60.0

#: Limits against strangers: the time until a connection must speak HTTP/2, and the time that a connection without a call may
#: live.
_HANDSHAKE_MS, _IDLE_MS = 5_000, 2_000

#: The number of descriptors that is assumed where the system sets no limit, and the most that is counted on in any case.
_MAX_CONNECTIONS = 16_384

#: The least time that a connection may go without an answer; gloo's operations use the same.
_MIN_PATIENCE_SECONDS = 120.0

#: The longest time that gRPC accepts.
_MAX_MS = 2**31 - 1

#: The most characters of a text that the other end of a call has written.
_MAX_SAID = 1000

#: Ended threads and expired challenges are dropped when there are this many, and then whenever their number has doubled.
_LEAST_SWEPT = 16

#: Connections that may wait to be accepted. The system's own limit (net.core.somaxconn) may be less. All ranks connect at once.
_BACKLOG = 4096


def server_options(fail_after_seconds: float, max_message_bytes: int) -> Options:
    """Options of a server whose clients use :func:`channel_options` with the same arguments."""
    ping_every_ms, _ = _keepalive_ms(fail_after_seconds)
    return [
        # Otherwise two servers may share one port, and clients are split between them.
        ("grpc.so_reuseport", 0),
        *_both_ends(fail_after_seconds, max_message_bytes),
        # Otherwise a server ends a healthy connection with "too many pings".
        ("grpc.http2.min_ping_interval_without_data_ms", max(1, ping_every_ms // 2)),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
    ]


def channel_options(fail_after_seconds: float, max_message_bytes: int) -> Options:
    """Options of a channel to a server made with :func:`server_options` and the same arguments."""
    return [
        *_both_ends(fail_after_seconds, max_message_bytes),
        # The cluster's HTTP proxy, if the environment names one, is for the web and not for the ranks of a job.
        ("grpc.enable_http_proxy", 0),
        # The channel gets a connection of its own: another channel of this process must not share its fate.
        ("grpc.use_local_subchannel_pool", 1),
        # While rank 0 starts, retry quickly; the default delay grows to two minutes.
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
        # keepalive_timeout alone took over a minute to end a connection to a frozen process: this option decides.
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _keepalive_ms(fail_after_seconds: float) -> tuple[int, int]:
    """The interval of pings, and the longest wait for an answer.

    The wait is much longer than ``fail_after``, for two reasons. The control channel's heartbeats, which name the peer and the
    seconds, must report a failure first. And not every version of gRPC answers while a call holds the interpreter's lock, which
    may take long. Keepalive ends the connections that no heartbeat watches.
    """
    every_ms = max(10, round(fail_after_seconds * 500))
    timeout_ms = round(max(_MIN_PATIENCE_SECONDS, 6 * fail_after_seconds) * 1000)
    return min(every_ms, _MAX_MS), min(timeout_ms, _MAX_MS)


class DaemonExecutor(Executor):
    """Runs each call in a daemon thread of its own, named ``<name>-<n>``.

    The standard pool's threads are joined when the interpreter exits, before ``atexit`` handlers run: with streams that live
    as long as the job, a script that ends without closing its session would hang.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._sweep_at = _LEAST_SWEPT  # number of threads at which those that have ended are dropped
        self._started = 0
        self._shut_down = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call ``fn`` in a new thread.

        Raises:
            RuntimeError: after :meth:`shutdown`, or if no thread can be started.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._shut_down:
                raise RuntimeError(f"{self._name} takes no calls after shutdown")
            self._started += 1
            name = f"{self._name}-{self._started}"
            thread = threading.Thread(target=self._run, args=(future, fn, args, kwargs), name=name, daemon=True)
            thread.start()  # with the lock held, so that shutdown never joins a thread that has not started
            # A thread is not removed when its call returns: it lives a moment longer, and shutdown must wait for that too.
            self._threads.add(thread)
            if len(self._threads) >= self._sweep_at:  # not at each call, whose time would grow with the number of threads
                self._threads = {other for other in self._threads if other.is_alive()}
                self._sweep_at = max(_LEAST_SWEPT, 2 * len(self._threads))
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
        """Accept no more calls. With ``wait``, return when all threads have ended, except the caller's own."""
        with self._lock:
            self._shut_down = True
            threads = self._threads - {threading.current_thread()}
        if wait:
            for thread in threads:
                thread.join()


def make_server(
    executor: Executor,
    token: str,
    fail_after_seconds: float,
    max_message_bytes: int,
    job: str | None = None,
    most_connections: int = 0,
    on_refusal: Callable[[str], None] = lambda why: None,
    identity: Identity | None = None,
) -> grpc.Server:
    """A server that answers only calls of :class:`Call` with the same ``token``; see :func:`bind` for its port.

    Args:
        job: callers of another job are refused; ``None`` accepts any job, which :func:`job_of` returns.
        most_connections: the server accepts this many connections, or a quarter of this process's file descriptors if that
            is more.
        on_refusal: called with the refused caller and the reason; from any thread.
        identity: the same as that of :func:`bind`.

    Raises:
        ConfigError: the token is empty.
    """
    options = [
        *server_options(fail_after_seconds, max_message_bytes),
        ("grpc.max_allowed_incoming_connections", max(most_connections, most_strangers())),
    ]
    return grpc.server(executor, interceptors=[TokenInterceptor(token, job, on_refusal, identity is not None)], options=options)


def most_strangers() -> int:
    """How many connections of a server may be strangers'. It is a quarter of the file descriptors that this process may have,
    since it may have two servers, and needs other files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(soft if soft > 0 else _MAX_CONNECTIONS, _MAX_CONNECTIONS) // 4)


def make_channel(
    address: str, fail_after_seconds: float, max_message_bytes: int, identity: Identity | None = None
) -> grpc.Channel:
    """A channel to a server of :func:`make_server`, for :class:`Call`; over TLS with an ``identity``."""
    options: list[tuple[str, int | str]] = [*channel_options(fail_after_seconds, max_message_bytes)]
    if identity is None:
        return grpc.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(identity.authority, identity.key, identity.certificate)
    return grpc.secure_channel(address, credentials, options=[*options, ("grpc.ssl_target_name_override", MEMBER_NAME)])


def bind(server: grpc.Server, address: str, identity: Identity | None = None) -> int:
    """Let ``server`` listen at ``address`` (host:port), and return the actual port. Port 0 lets the system choose one. With an
    ``identity``, it speaks TLS only, and with members of the job only.

    Raises:
        ConfigError: the address is taken, or is not one of this machine; names it.
    """
    try:
        port: int
        if identity is None:
            port = server.add_insecure_port(address)
        else:
            pair = identity.key, identity.certificate
            credentials = grpc.ssl_server_credentials([pair], identity.authority, require_client_auth=True)
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        listen(address).close()  # gRPC does not say why it could not; a plain socket does
        raise ConfigError(f"cannot listen at {address}: gRPC could not bind it")
    return port


def listen(address: str) -> socket.socket:
    """A plain socket that listens at ``address`` (host:port; port 0: any free port). If the host's name resolves to several
    addresses, it listens at the first one that this machine has.

    Raises:
        ConfigError: the port is taken, or the address is not host:port or not one of this machine; names it.
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
                break  # clients also try this address first, and would reach the other process
    taken = "the port is taken by another process; choose another, or 0 for any free one"
    why = taken if refusals[-1].errno == errno.EADDRINUSE else refusals[-1].strerror or refusals[-1]
    raise ConfigError(f"cannot listen at {address}: {why}") from refusals[-1]


def _listen_at(listening: socket.socket, where: Any) -> socket.socket:
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not SO_REUSEPORT: two servers would share clients
        listening.bind(where)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


class Call:
    """One bidirectional stream of messages. The two ends first prove to each other that they know the token, and their job.

    The first attempt is refused with a challenge. The second attempt answers the challenge, and carries a challenge to the
    server, whose answer precedes its first message. Before that answer no request is sent, and no message is believed.

    Iterating makes the call, and yields the server's messages. ``wait_for_ready``: gRPC retries while the server is not up.
    ``identity``: that of the channel.

    Raises (when iterated):
        grpc.RpcError: the call failed, or the server refuses this token or job.
        Unproven: the server does not prove the token.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        method: str,
        requests: Iterator[bytes],
        token: str,
        job: str,
        *,
        wait_for_ready: bool = False,
        identity: Identity | None = None,
    ) -> None:
        self._certificate = b"" if identity is None else identity.digest
        self._channel = channel
        self._method = method
        self._requests = requests
        self._token = token
        self._job = job
        self._wait_for_ready = wait_for_ready
        self._lock = threading.Lock()
        self._cancelled = False
        self._current: Any = None  # the gRPC call that cancel must end
        self._proven = False
        self._decided = threading.Event()  # set once it is known whether the server has proved the token

    def cancel(self) -> None:
        """End the call at once. Idempotent; any thread."""
        with self._lock:
            self._cancelled = True
            current = self._current
        self._decided.set()
        if current is not None:
            current.cancel()

    def __iter__(self) -> Iterator[bytes]:
        try:
            challenge = self._challenge()
            if challenge is not None:
                yield from self._converse(challenge)
        finally:
            self._decided.set()

    def _begin(self, begin: Callable[[], T]) -> T | None:
        """Make a gRPC call with ``begin``, which ``cancel`` then ends. None if ``cancel`` came first."""
        with self._lock:
            if self._cancelled:
                return None
            self._current = begin()
            return cast("T", self._current)

    def _challenge(self) -> bytes | None:
        """The server's challenge; None if the call was cancelled."""
        ask = self._channel.unary_unary(self._method)
        asked = self._begin(lambda: ask.future(b"", wait_for_ready=self._wait_for_ready))
        if asked is None:
            return None
        try:
            asked.result()
        except grpc.FutureCancelledError:
            return None
        except grpc.RpcError as refused:
            challenge = dict(refused.trailing_metadata() or ()).get(_CHALLENGE)
            if challenge is None:
                raise
            return cast("bytes", challenge)
        raise Unproven

    def _converse(self, challenge: bytes) -> Iterator[bytes]:
        nonce = make_nonce()
        proof = prove(self._token, _role("member", self._method), challenge, nonce, self._job, self._certificate)
        metadata = [(_CHALLENGE, challenge), (_NONCE, nonce), (_PROOF, proof), (_JOB, self._job.encode())]
        if self._certificate:
            metadata.append((_CERTIFICATE, self._certificate))
        exchange = self._channel.stream_stream(self._method)
        call = self._begin(lambda: exchange(self._gated(), metadata=metadata, wait_for_ready=self._wait_for_ready))
        if call is None:
            return
        shown = dict(call.initial_metadata() or ()).get(_PROOF, b"")
        role = _role("server", self._method)
        self._proven = is_proof(shown, self._token, role, challenge, nonce, self._job, self._certificate)
        self._decided.set()
        for message in call:
            if not self._proven:
                call.cancel()
                raise Unproven
            yield message
        if not self._proven:
            raise Unproven

    def _gated(self) -> Iterator[bytes]:
        self._decided.wait()
        if self._proven:
            yield from self._requests


def said_by(error: grpc.RpcError) -> str:
    """The text of ``error`` on one line and in printable characters: a stranger may have written it."""
    text = error.details() or ""
    return "".join(each if each.isprintable() else " " for each in text[:_MAX_SAID])


class Unproven(Exception):
    """The process that answers a call is not one of this job's servers; the text says why."""

    def __init__(self, why: str = "does not prove that it has this job's token; another program may listen there") -> None:
        super().__init__(why)


class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Refuses calls that do not prove the job's token, and proves the token to the other callers.

    A call that shows no proof, or a wrong one, ends as UNAUTHENTICATED; without a proof, it gets a challenge. A call of another
    job ends as FAILED_PRECONDITION. A refused call ends before its handler sees a message, and without reading any.

    Args:
        secured: whether callers come over TLS. Then a proof must name the certificate that the caller has shown there, so that
            a member of another job, or anybody else with a certificate of the same authority, cannot pass on a proof.
    """

    def __init__(
        self,
        token: str,
        job: str | None = None,
        on_refusal: Callable[[str], None] = lambda why: None,
        secured: bool = False,
    ) -> None:
        if not token:
            raise ConfigError("the job's token is empty; set the same COMMSCHED_TOKEN on every rank")
        self._token = token
        self._job = job
        self._challenges = Challenges()
        # These handlers read nothing, whatever the kind of the call: a stranger must not hold a thread.
        self._ask = grpc.stream_stream_rpc_method_handler(self._abort_with_challenge)
        self._refuse = grpc.stream_stream_rpc_method_handler(self._abort)
        self._refuse_job = grpc.stream_stream_rpc_method_handler(self._abort_job)
        self._warn_again_at = 0.0
        self._on_refusal = on_refusal
        self._secured = secured

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        shown = dict(handler_call_details.invocation_metadata)
        if _PROOF not in shown:
            return self._ask
        challenge, nonce, proof, certificate = (shown.get(key, b"") for key in (_CHALLENGE, _NONCE, _PROOF, _CERTIFICATE))
        try:
            job = shown.get(_JOB, b"").decode()
        except UnicodeDecodeError:
            return self._refuse
        method = handler_call_details.method
        if not is_proof(proof, self._token, _role("member", method), challenge, nonce, job, certificate):
            return self._refuse
        if not self._challenges.take(challenge):  # only now: a stranger must not use up others' challenges
            return self._refuse
        if self._job is not None and job != self._job:
            return self._refuse_job
        handler = continuation(handler_call_details)
        if handler is None or handler.stream_stream is None:
            return handler
        answer = prove(self._token, _role("server", method), challenge, nonce, job, certificate)
        exchange = handler.stream_stream

        def proven(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            if self._secured and not hmac.compare_digest(certificate, _digest_shown(context)):
                self._abort(requests, context)
            context.send_initial_metadata(((_PROOF, answer),))
            return cast("Iterator[bytes]", exchange(requests, context))

        return grpc.stream_stream_rpc_method_handler(proven)

    def _abort_with_challenge(self, requests: object, context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata(((_CHALLENGE, self._challenges.make()),))
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "prove this job's token")

    def _abort(self, requests: object, context: grpc.ServicerContext) -> None:
        self._warn(f"a call from {context.peer()}: it does not prove this job's token")
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "this job's token is required")

    def _abort_job(self, requests: object, context: grpc.ServicerContext) -> None:
        theirs = called(job_of(context))
        self._warn(f"a call from {context.peer()}: it belongs to {theirs}, and this is {called(self._job or '')}")
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"it serves {called(self._job or '')}, and this is {theirs}")

    def _warn(self, text: str) -> None:
        self._on_refusal(text)
        now = time.monotonic()
        if now >= self._warn_again_at:  # a stranger must not fill the log
            self._warn_again_at = now + 10
            log.warning("refused %s", text)


class Challenges:
    """Makes challenges, each of which is accepted once, within a minute. Nothing is stored for challenges without a right
    answer, so strangers may ask for any number of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._taken: dict[bytes, float] = {}  # challenges that were accepted, and when they were made
        self._sweep_at = _LEAST_SWEPT  # number of them at which those that have expired are dropped

    def make(self) -> bytes:
        stamp = struct.pack(">d", self._clock()) + make_nonce()
        return stamp + hmac.digest(self._key, stamp, "sha256")

    def take(self, challenge: bytes) -> bool:
        """Whether ``challenge`` was made here, less than a minute ago, and is taken for the first time."""
        stamp, signature = challenge[:-PROOF_BYTES], challenge[-PROOF_BYTES:]
        if not hmac.compare_digest(signature, hmac.digest(self._key, stamp, "sha256")):
            return False
        [made_at] = struct.unpack_from(">d", stamp)
        oldest = self._clock() - _CHALLENGE_SECONDS
        with self._lock:
            if made_at <= oldest or challenge in self._taken:
                return False
            self._taken[challenge] = made_at
            if len(self._taken) >= self._sweep_at:
                self._taken = {taken: at for taken, at in self._taken.items() if at > oldest}
                self._sweep_at = max(_LEAST_SWEPT, 2 * len(self._taken))
            return True


def _digest_shown(context: grpc.ServicerContext) -> bytes:
    """The digest of the certificate by which a caller has connected."""
    shown = context.auth_context().get("x509_pem_cert", ())
    return digest_of(shown[0]) if shown else b""


def job_of(context: grpc.ServicerContext) -> str:
    """The job of a caller that has proved the token."""
    job: bytes = dict(context.invocation_metadata())[_JOB]
    return job.decode()


def called(job: str) -> str:
    """The name of a job in messages."""
    return f"job {job!r}" if job else "a job without a name"


def _role(end: str, method: str) -> bytes:
    return f"{end} of {method}".encode()
