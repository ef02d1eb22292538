"""A server's port over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc

from ...rpc import DaemonExecutor, bind, make_server
from .frame import MAX_MESSAGE_BYTES, Frame, Kind, decode, encode
from .grpc_stream import METHOD
from .outbox import Outbox
from .pacer import Pacer
from .stream import Place, Stream, StreamBroken

#: How long streams may take to end in good order when the port closes.
_GRACE_SECONDS = 1.0


class GrpcPort:
    """See ``Port``. gRPC sends, in a thread for each stream, while a thread of ours hears it."""

    def __init__(self, address: str, token: str, pacer: Pacer | None, fail_after_seconds: float) -> None:
        self._pacer = pacer
        self._executor = DaemonExecutor("commsched-ps")
        self._readers = DaemonExecutor("commsched-ps-reader")
        self._server = make_server(self._executor, token, fail_after_seconds, MAX_MESSAGE_BYTES)
        self.address = f"{address.rpartition(':')[0]}:{bind(self._server, address)}"

    def serve(self, handle: Callable[[Stream], None]) -> None:
        def exchange(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            stream = _ServerStream(context.peer(), Outbox(self._pacer), requests)
            if context.add_callback(stream.outbox.abort):
                self._readers.submit(handle, stream)
            else:
                stream.outbox.abort()
            return (encode(parcel.frame) for parcel in stream.outbox)

        _, package, method = METHOD.split("/")
        handler = grpc.stream_stream_rpc_method_handler(exchange)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(package, {method: handler}),))
        self._server.start()

    def close(self, graceful: bool) -> None:
        self._server.stop(_GRACE_SECONDS if graceful else None).wait()
        self._readers.shutdown()
        self._executor.shutdown()


class _ServerStream:
    """See ``Stream``."""

    def __init__(self, peer: str, outbox: Outbox, requests: Iterator[bytes]) -> None:
        self.peer = peer
        self.outbox = outbox
        self._requests = requests

    def frames(self, place: Place) -> Iterator[Frame]:
        try:
            for message in self._requests:
                frame = decode(message)
                if frame.kind is Kind.PUSH:
                    # Before it is handled: when it is the last, the reply is queued at once, and no ACK may come after it.
                    self.outbox.put_control(Frame(Kind.ACK, frame.group, frame.step, frame.partition))
                yield frame
        except grpc.RpcError as error:
            raise StreamBroken("the call ended") from error
