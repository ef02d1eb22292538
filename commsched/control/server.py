"""Rank 0's end of the control channel: a gRPC server around one :class:`Roster`."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

import grpc

from ..core.errors import PeerLost, ProtocolError
from ..rpc import DaemonExecutor, bind, make_server
from .liveness import heartbeat_seconds, tick_seconds
from .messages import MAX_WIRE_BYTES, METHOD, SERVICE, decode, encode
from .outbox import Outbox
from .roster import Roster, Send

#: How long ``close`` waits for members to have heard how the job ended; one that is frozen never does.
_FAREWELL_SECONDS = 2.0


class ControlServer:
    """Hosts the control channel of a job of ``world_size`` ranks, from its construction to :meth:`close`.

    Args:
        address: host:port to listen at; port 0 for any free one.
        token: the job's secret; whoever connects must have it.
        fail_after_seconds: silence after which a member is given up.
        join_within_seconds: all ranks must have joined within this time from now.

    Raises:
        ConfigError: the address is taken or not of this machine, or the token is empty.
    """

    def __init__(
        self, address: str, token: str, world_size: int, *, fail_after_seconds: float, join_within_seconds: float
    ) -> None:
        self._heartbeat_seconds = heartbeat_seconds(fail_after_seconds)
        self._tick_seconds = tick_seconds(fail_after_seconds)
        self._changed = threading.Condition()  # guards all below
        self._roster = Roster(
            world_size,
            socket.gethostname(),
            os.getpid(),
            fail_after_seconds=fail_after_seconds,
            join_within_seconds=join_within_seconds,
            now=time.monotonic(),
        )
        self._outboxes: dict[int, Outbox] = {}
        self._numbers = count()
        self._closing = False

        self._executor = DaemonExecutor("commsched-control-stream")
        self._server = make_server(self._executor, token, fail_after_seconds, MAX_WIRE_BYTES)
        handlers = {METHOD: grpc.stream_stream_rpc_method_handler(self._serve)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"{address.rpartition(':')[0]}:{bind(self._server, address)}"
        self._server.start()
        self._watch = threading.Thread(target=self._tick, name="commsched-control-watch", daemon=True)
        self._watch.start()

    def close(self) -> None:
        """Tell members that rank 0 ends, unless the job is over, and give back the port and all threads. Idempotent.

        Returns when every member has heard how the job ended, or had time to: what is sent, but not yet read, is lost when one
        that is slow writes to a process that is gone.
        """
        with self._changed:
            self._closing = True
            self._send(self._roster.fail(PeerLost("rank 0 closed the control channel before all ranks had left")))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._outboxes.keys() <= self._roster.given_up, _FAREWELL_SECONDS)
            for outbox in self._outboxes.values():
                outbox.close()
        self._server.stop(None)
        self._executor.shutdown()
        self._watch.join()

    def connect(self) -> Connection:
        """A new connection, of a member in this process or at the other end of a stream."""
        outbox = Outbox(self._heartbeat_seconds)
        with self._changed:
            number = next(self._numbers)
            self._outboxes[number] = outbox
        return Connection(self, number, outbox)

    # --- a stream: one thread takes from its outbox, another reads ---

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        connection = self.connect()
        if context.add_callback(connection.ended):
            self._executor.submit(self._read, connection, requests)
        else:  # it ended before we came to it
            connection.ended()
        return connection.outbox

    def _read(self, connection: Connection, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                connection.received(data)
        except grpc.RpcError:
            pass  # a broken connection; it may as well look like the end of the iterator
        connection.finish()

    # --- a connection; any thread ---

    def _received(self, connection: int, data: bytes) -> None:
        now = time.monotonic()
        try:
            message = decode(data)
        except ProtocolError as error:
            refusal = error
            self._decide(lambda: self._roster.garbage(connection, refusal))
        else:
            self._decide(lambda: self._roster.received(connection, message, now))

    def _finished(self, connection: int) -> None:
        with self._changed:
            self._send(self._roster.disconnected(connection))
            if connection in self._outboxes:
                self._outboxes[connection].close()

    def _ended(self, connection: int) -> None:
        with self._changed:
            self._outboxes.pop(connection).discard()
            self._changed.notify_all()

    # --- any thread ---

    def _tick(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, self._tick_seconds):
                    return
            self._decide(lambda: self._roster.tick(time.monotonic()))

    def _decide(self, decision: Callable[[], list[Send]]) -> None:
        with self._changed:
            self._send(decision())

    def _send(self, sends: list[Send]) -> None:
        """Called with the lock held, so that every member gets messages in the order decided; putting never blocks."""
        for send in sends:
            data = encode(send.message)
            for connection in send.connections:
                if (outbox := self._outboxes.get(connection)) is not None:
                    outbox.put(data)


class Connection:
    """The server's end of the way to one member. What goes to the member is taken from ``outbox``. Any thread; never blocks."""

    def __init__(self, server: ControlServer, number: int, outbox: Outbox) -> None:
        self.outbox = outbox
        self._server = server
        self._number = number
        self._finished = False

    def received(self, data: bytes) -> None:
        """The member sent ``data``; nothing happens after :meth:`finish`."""
        if not self._finished:
            self._server._received(self._number, data)

    def finish(self) -> None:
        """The member will send nothing more; ``outbox`` ends after what is in it. Idempotent."""
        self._finished = True
        self._server._finished(self._number)

    def ended(self) -> None:
        """Nobody takes from ``outbox`` any more."""
        self._server._ended(self._number)
