"""The lane over gRPC: one bidirectional stream, one thread that reads it."""

from __future__ import annotations

import threading

import grpc

from ...core.errors import CommschedError, ConfigError, PeerLost, PeerTimeout, ProtocolError, TransportError, from_record
from ...core.manifest import Manifest
from ...core.task import CommTask
from ...rpc import make_channel, token_metadata
from .frame import MAX_MESSAGE_BYTES, Frame, Kind, decode, encode, json_frame
from .hello import Hello
from .lane import LaneListener
from .outbox import Outbox

#: The one method of a parameter server.
METHOD = "/commsched.ps/Exchange"

#: How long a closing lane waits for the server's answer to its goodbye.
_GOODBYE_SECONDS = 2.0


class GrpcLane:
    """See ``Lane``. The constructor only begins to connect; ``wait_connected`` must have returned before the first push.

    Args:
        peer: what messages call the server, such as ``server 1 at 10.0.0.7:4242``.
    """

    def __init__(
        self,
        peer: str,
        address: str,
        hello: Hello,
        token: str,
        outbox: Outbox,
        listener: LaneListener,
        fail_after_seconds: float,
    ) -> None:
        self._peer = peer
        self._server = hello.server
        self._outbox = outbox
        self._listener = listener
        self._connected = threading.Event()  # set when welcomed, and when refused
        self._welcomed = False
        self._end: CommschedError | None = None  # why nothing more can be pushed
        self._closed = False
        self._channel = make_channel(address, fail_after_seconds, MAX_MESSAGE_BYTES)
        outbox.put_control(json_frame(Kind.HELLO, hello.to_record()))
        # wait_for_ready: while the server is not up, gRPC tries again, until wait_connected gives up.
        self._call = self._channel.stream_stream(METHOD)(outbox, metadata=token_metadata(token), wait_for_ready=True)
        name = f"commsched-lane-{hello.rank}-to-{hello.server}"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    def wait_connected(self, within_seconds: float) -> None:
        """Return when the server has welcomed this rank.

        Raises:
            PeerTimeout: it did not within that time.
            ConfigError: it has another token, or this rank is not one of its job.
            CommschedError: the job failed meanwhile.
        """
        if not self._connected.wait(within_seconds):
            raise PeerTimeout(f"{self._peer} did not answer within {within_seconds:.0f} s")
        if not self._welcomed:
            raise self._end or PeerLost(f"{self._peer} ended before it answered")

    def give_up(self, error: CommschedError) -> None:
        """The job failed: whoever waits for the connection is to raise ``error``. Any thread."""
        if not self._welcomed:
            self._end = self._end or error
            self._connected.set()

    def add_group(self, group: int, manifest: Manifest) -> None:
        self._outbox.put_control(json_frame(Kind.GROUP, manifest.to_record(), group))

    def push(self, task: CommTask) -> None:
        if self._end is not None:
            raise self._end
        at = task.partition
        frame = Frame(Kind.PUSH, task.group, task.step, at.index, at.dtype, at.start, at.stop, task.data, task.order)
        self._outbox.put(task.order, task.nbytes, lambda: encode(frame))

    def leave(self, rank: int) -> None:
        self._outbox.put_control(json_frame(Kind.LEFT, rank))

    def close(self, graceful: bool) -> None:
        self._closed = True
        if graceful and self._welcomed and self._end is None:
            self._outbox.put_control(Frame(Kind.GOODBYE))
            self._outbox.finish()
            self._reader.join(_GOODBYE_SECONDS)
        self._outbox.abort()
        self._call.cancel()
        self._reader.join()
        self._channel.close()

    # --- the reader's thread ---

    def _read(self) -> None:
        try:
            for message in self._call:
                self._handle(decode(message))
            self._ended(PeerLost(f"{self._peer} ended the stream without a goodbye"))
        except grpc.RpcError as error:
            self._ended(self._translate(error))
        except ProtocolError as error:
            self._ended(ProtocolError(f"{self._peer} broke the protocol: {error}"))
        except CommschedError as error:
            self._ended(error)
        except Exception as error:
            self._ended(TransportError(f"the lane to {self._peer} failed: {type(error).__name__}: {error}"))
        finally:
            self._outbox.abort()
            self._call.cancel()

    def _handle(self, frame: Frame) -> None:
        if frame.kind is Kind.ERROR:
            self._ended(_error_in(frame))
        elif frame.kind is Kind.GOODBYE:
            self._said_goodbye()
        elif frame.kind is Kind.HELLO and not self._welcomed:
            self._welcomed = True
            self._connected.set()
        elif frame.kind is Kind.ACK and self._welcomed:
            self._listener.on_ack(self._server, frame.key)
        elif frame.kind is Kind.RESULT and self._welcomed:
            self._listener.on_result(self._server, frame)
        else:
            raise ProtocolError(f"{frame.kind.name} out of turn")

    def _said_goodbye(self) -> None:
        if self._end is None:
            self._end = PeerLost(f"{self._peer} has closed")
            if not self._closed:
                self._listener.on_end(self._server)

    def _ended(self, error: CommschedError) -> None:
        """The first reason counts; before the welcome it is for ``wait_connected`` to raise."""
        if self._end is None:
            self._end = error
            if self._welcomed and not self._closed:
                self._listener.on_broken(self._server, error)
        self._connected.set()

    def _translate(self, error: grpc.RpcError) -> CommschedError:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return ConfigError(f"{self._peer} has another token; set the same COMMSCHED_TOKEN everywhere")
        if code is grpc.StatusCode.UNAVAILABLE:
            return PeerLost(f"{self._peer} is gone: {details}")
        return TransportError(f"{self._peer}: {code.name}: {details}")


def _error_in(frame: Frame) -> CommschedError:
    record = frame.json()
    if not isinstance(record, dict) or not all(isinstance(value, str) for value in record.values()):
        raise ProtocolError("an ERROR message does not hold an error")
    return from_record(record)
