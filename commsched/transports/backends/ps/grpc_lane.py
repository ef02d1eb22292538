"""gRPC as a carrier of frames: a worker's stream, and a shard's port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc

from ....core.errors import CommschedError, ConfigError, ProtocolError, TransportError
from ....net.rpc import Call, DaemonExecutor, Unproven, bind, job_of, make_channel, make_server, said_by
from ....net.tls import probe
from ...averaging.contributions import PartitionKey
from .frame import MAX_MESSAGE_BYTES, Frame, FrameKind, decode, encode
from .send_queue import SendQueue
from .stream import Allocate, ServedStream, StreamBroken, StreamOptions

#: How long one attempt to find out whether the server is up and belongs to this job may take, and the pause before the next.
_PROBE_SECONDS, _PAUSE_SECONDS = 5.0, 0.2

#: The one method of a parameter server.
METHOD = "/commsched.ps/Exchange"


class GrpcStream:
    """See ``WorkerStream``. gRPC does not report when bytes have left, so the server acknowledges each push."""

    def __init__(self, peer: str, address: str, options: StreamOptions, job: str, waits: bool = True) -> None:
        self.peer = peer
        self.outbox = SendQueue(options.rate_limiter)
        self._unacknowledged: dict[PartitionKey, Callable[[], None]] = {}
        self._address = address
        self._identity = options.identity
        self._waits = waits
        self._aborted = threading.Event()
        self._channel = make_channel(address, options.fail_after_seconds, MAX_MESSAGE_BYTES, self._identity)
        # wait_for_ready: gRPC tries again while the server is not up, until ``close``.
        self._call = Call(
            self._channel, METHOD, self._requests(), options.token, job, wait_for_ready=waits, identity=self._identity
        )

    def frames(self, place: Allocate) -> Iterator[Frame]:
        if self._identity is not None:
            self._require_member()
        try:
            for message in self._call:
                frame = decode(message)
                if frame.kind is FrameKind.ACK:
                    self._acknowledged(frame)
                else:
                    yield frame
        except grpc.RpcError as error:
            raise self._translate(error) from error
        except Unproven as error:
            raise ConfigError(f"{self.peer} {error}") from error

    def _require_member(self) -> None:
        """Wait until the server is up, and check that it belongs to this job: gRPC would try for ever."""
        while not self._aborted.is_set():
            try:
                why = probe(self._address, self._identity, _PROBE_SECONDS)
            except OSError as error:
                if not self._waits:
                    raise StreamBroken("nobody answers there") from error
                self._aborted.wait(_PAUSE_SECONDS)
                continue
            if why is None:
                return
            raise ConfigError(f"{self.peer} {why}")

    def abort(self) -> None:
        self._aborted.set()
        self.outbox.abort()
        self._call.cancel()

    def close(self) -> None:
        self.abort()
        self._channel.close()

    def _requests(self) -> Iterator[bytes]:
        for parcel in self.outbox:
            if parcel.sent is not None:
                self._unacknowledged[parcel.frame.key] = parcel.sent
            yield encode(parcel.frame)

    def _acknowledged(self, frame: Frame) -> None:
        sent = self._unacknowledged.pop(frame.key, None)
        if sent is None:
            raise ProtocolError(f"an ACK of step {frame.step}, partition {frame.partition}, which was not sent there")
        sent()

    def _translate(self, error: grpc.RpcError) -> StreamBroken | CommschedError:
        code, details = error.code(), said_by(error)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return ConfigError(f"{self.peer} has another token; set the same COMMSCHED_TOKEN everywhere")
        if code is grpc.StatusCode.UNAVAILABLE:
            return StreamBroken(details)
        return TransportError(f"{self.peer}: {code.name}: {details}")


#: How long streams may take to end in good order when the port closes.
_GRACE_SECONDS = 1.0


class GrpcPort:
    """See ``Port``. gRPC sends in one thread for each stream, and a thread of ours receives for each stream."""

    def __init__(self, address: str, options: StreamOptions, most_connections: int) -> None:
        self._rate_limiter = options.rate_limiter
        self._executor = DaemonExecutor("commsched-ps")
        self._readers = DaemonExecutor("commsched-ps-reader")
        self._server = make_server(
            self._executor,
            options.token,
            options.fail_after_seconds,
            MAX_MESSAGE_BYTES,
            most_connections=most_connections,
            identity=options.identity,
        )
        self.address = f"{address.rpartition(':')[0]}:{bind(self._server, address, options.identity)}"

    def serve(self, handle: Callable[[ServedStream, str], None]) -> None:
        def exchange(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            stream = _ServerStream(context, SendQueue(self._rate_limiter), requests)
            if context.add_callback(stream.outbox.abort):
                self._readers.submit(handle, stream, job_of(context))
            else:
                stream.outbox.abort()
            return (encode(parcel.frame) for parcel in stream.outbox)

        _, package, method = METHOD.split("/")
        handler = grpc.stream_stream_rpc_method_handler(exchange)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(package, {method: handler}),))
        self._server.start()

    def close(self, graceful: bool) -> None:
        try:
            self._server.stop(_GRACE_SECONDS if graceful else None).wait()
        except RuntimeError:
            # Python 3.12 starts no thread at the interpreter's end. gRPC has begun to stop before it wants one.
            self._server.wait_for_termination(_GRACE_SECONDS)
            self._server.stop(None).wait()
        self._readers.shutdown()
        self._executor.shutdown()


class _ServerStream:
    """See ``ServedStream``."""

    def __init__(self, context: grpc.ServicerContext, outbox: SendQueue, requests: Iterator[bytes]) -> None:
        self.peer = context.peer()
        self.outbox = outbox
        self._context = context
        self._requests = requests

    @property
    def has_ended(self) -> bool:
        return not self._context.is_active()

    def frames(self, place: Allocate) -> Iterator[Frame]:
        try:
            for message in self._requests:
                frame = decode(message)
                if frame.kind is FrameKind.PUSH:
                    # Before the push is handled: the last push queues its reply at once, and an ACK must not follow the reply.
                    self.outbox.put_control(Frame(FrameKind.ACK, frame.group, frame.step, frame.partition))
                yield frame
        except grpc.RpcError as error:
            raise StreamBroken("the call ended") from error
