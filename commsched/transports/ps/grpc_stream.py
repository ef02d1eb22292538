"""A worker's stream over gRPC: one bidirectional call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc

from ...core.errors import CommschedError, ConfigError, ProtocolError, TransportError
from ...rpc import make_channel, token_metadata
from ..contributions import Key
from .frame import MAX_MESSAGE_BYTES, Frame, Kind, decode, encode
from .outbox import Outbox
from .stream import Place, StreamBroken

#: The one method of a parameter server.
METHOD = "/commsched.ps/Exchange"


class GrpcStream:
    """See ``WorkerStream``. gRPC does not say when bytes have left, so the server acknowledges each push."""

    def __init__(self, peer: str, address: str, token: str, outbox: Outbox, fail_after_seconds: float) -> None:
        self.peer = peer
        self.outbox = outbox
        self._unacknowledged: dict[Key, Callable[[], None]] = {}
        self._channel = make_channel(address, fail_after_seconds, MAX_MESSAGE_BYTES)
        # wait_for_ready: while the server is not up, gRPC tries again, until close.
        self._call = self._channel.stream_stream(METHOD)(self._requests(), metadata=token_metadata(token), wait_for_ready=True)

    def frames(self, place: Place) -> Iterator[Frame]:
        try:
            for message in self._call:
                frame = decode(message)
                if frame.kind is Kind.ACK:
                    self._acknowledged(frame)
                else:
                    yield frame
        except grpc.RpcError as error:
            raise self._translate(error) from error

    def abort(self) -> None:
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
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return ConfigError(f"{self.peer} has another token; set the same COMMSCHED_TOKEN everywhere")
        if code is grpc.StatusCode.UNAVAILABLE:
            return StreamBroken(details)
        return TransportError(f"{self.peer}: {code.name}: {details}")
