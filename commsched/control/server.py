"""Rank 0's end of the control channel: a gRPC server around one :class:`Roster`. Rank 0's own stream needs no socket, since the
server is in its process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import grpc

from ..core import timeouts
from ..core.errors import PeerLost, ProtocolError
from ..net.rpc import DaemonExecutor, Unproven, bind, make_server
from ..net.tls import Identity
from .liveness import heartbeat_seconds, tick_seconds
from .messages import MAX_WIRE_BYTES, METHOD, SERVICE, Heartbeat, Message, decode, encode
from .roster import Roster, Send
from .stream import BEAT, MessageQueue
from .witnessed import Doubts

#: Connections allowed beyond one for each member.
_MORE_CONNECTIONS = 64


class ControlServer:
    """Hosts the control channel of a job of ``world_size`` ranks, from its construction to :meth:`close`.

    Args:
        address: host:port to listen at; port 0 for any free port.
        fail_after_seconds: silence after which a member is given up.
        join_within_seconds: all ranks must have joined within this time from now.
        job: members of another job are refused, and this job goes on.
        servers: number of parameter servers that are processes of their own.
        identity: rank 0's; with one, the channel is encrypted.

    Raises:
        ConfigError: the address is taken or is not one of this machine, or the token is empty.
    """

    def __init__(
        self,
        address: str,
        token: str,
        world_size: int,
        *,
        fail_after_seconds: float,
        join_within_seconds: float,
        job: str = "",
        servers: int = 0,
        identity: Identity | None = None,
    ) -> None:
        self.heartbeat_seconds = heartbeat_seconds(fail_after_seconds, world_size)
        self._tick_seconds = tick_seconds(fail_after_seconds, world_size)
        self._changed = threading.Condition()  # guards all below
        self._roster = Roster(
            world_size,
            socket.gethostname(),
            os.getpid(),
            servers=servers,
            fail_after_seconds=fail_after_seconds,
            join_within_seconds=join_within_seconds,
            now=time.monotonic(),
        )
        self._outboxes: dict[int, MessageQueue[Any]] = {}
        self._in_process: set[int] = set()  # connections whose messages are not encoded
        self._numbers = count()
        self._closing = False

        self._executor = DaemonExecutor("commsched-control-stream")
        most = world_size + servers + _MORE_CONNECTIONS
        self._server = make_server(
            self._executor, token, fail_after_seconds, MAX_WIRE_BYTES, job, most, self._refused, identity
        )
        handlers = {METHOD: grpc.stream_stream_rpc_method_handler(self._serve)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"{address.rpartition(':')[0]}:{bind(self._server, address, identity)}"
        self._doubts: Doubts[int] = Doubts(fail_after_seconds, self._runs)
        self._watch = threading.Thread(target=self._tick, name="commsched-control-watch", daemon=True)
        # Start this first: if no thread can be started, no member may reach a server that detects no failures.
        self._watch.start()
        self._server.start()

    def close(self) -> None:
        """Notify members that rank 0 ends, unless the job is over, and release the port and all threads. Idempotent.

        Returns when every member has received the end of the job, or has had time to. Otherwise a slow member that writes to
        the ended process would lose the messages that it has not read yet.
        """
        with self._changed:
            self._closing = True
            self._send(self._roster.fail(PeerLost("rank 0 closed the control channel before all ranks had left")))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._outboxes.keys() <= self._roster.given_up, timeouts.FAREWELL_SECONDS)
            for outbox in self._outboxes.values():
                outbox.close()
        self._doubts.close()
        self._server.stop(None)
        self._executor.shutdown()
        self._watch.join()

    def connect(self, in_process: bool = False) -> MemberConnection:
        """A new connection, for a member at the other end of a stream, or ``in_process``."""
        outbox: MessageQueue[Any] = MessageQueue(self.heartbeat_seconds, Heartbeat() if in_process else BEAT)
        with self._changed:
            number = next(self._numbers)
            self._outboxes[number] = outbox
            if in_process:
                self._in_process.add(number)
        return MemberConnection(self, number, outbox)

    # --- a stream: one thread takes messages from its outbox, another thread reads ---

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        connection = self.connect()
        if context.add_callback(connection.ended):
            self._executor.submit(self._read, connection, requests)
        else:  # the call ended before the callback was added
            connection.ended()
        return connection.outbox

    def _read(self, connection: MemberConnection, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                connection.received(data)
        except grpc.RpcError:
            pass  # the connection broke; at other times that looks like the end of the iterator
        connection.finish()

    # --- any thread ---

    def _refused(self, why: str) -> None:
        with self._changed:
            self._roster.refused(why)

    def _tick(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, self._tick_seconds):
                    return
            self._decide(lambda: self._roster.tick(time.monotonic()))
            with self._changed:
                doubtful = self._roster.doubtful()
            for connection, member in doubtful:
                self._doubts.ask(connection, str(member), member.witness)

    def _runs(self, connection: int) -> None:
        with self._changed:
            self._roster.runs(connection)

    def _decide(self, decision: Callable[[], list[Send]]) -> None:
        with self._changed:
            self._send(decision())

    def _send(self, sends: list[Send]) -> None:
        """Called with the lock held, so that every member gets the messages in the order of the decisions. ``put`` never
        blocks."""
        for send in sends:
            data: bytes | None = None
            for connection in send.connections:
                outbox = self._outboxes.get(connection)
                if outbox is None:
                    continue
                if connection in self._in_process:
                    outbox.put(send.message)
                    continue
                if data is None:
                    data = encode(send.message)
                outbox.put(data)


class MemberConnection:
    """The server's end of the connection to one member. Messages to the member are taken from ``outbox``. Any thread; never
    blocks."""

    def __init__(self, server: ControlServer, number: int, outbox: MessageQueue[Any]) -> None:
        self.outbox = outbox
        self._server = server
        self._number = number
        self._finished = False

    def received(self, data: bytes) -> None:
        """The member sent ``data``. Ignored after :meth:`finish`."""
        try:
            message = decode(data)
        except ProtocolError as error:
            refusal = error
            if not self._finished:
                self._server._decide(lambda: self._server._roster.invalid_message(self._number, refusal))
        else:
            self.put(message)

    def put(self, message: Message) -> None:
        """The member sent ``message``. Ignored after :meth:`finish`."""
        if not self._finished:
            now = time.monotonic()
            self._server._decide(lambda: self._server._roster.received(self._number, message, now))

    def finish(self) -> None:
        """The member will send nothing more. ``outbox`` ends after the messages that are in it. Idempotent."""
        self._finished = True
        self._server._decide(lambda: self._server._roster.disconnected(self._number))
        self.outbox.close()

    def ended(self) -> None:
        """Nothing takes messages from ``outbox`` any more."""
        self.outbox.close(discard=True)
        with self._server._changed:
            del self._server._outboxes[self._number]
            self._server._changed.notify_all()


class InProcessStream:
    """Has the interface of :class:`~.stream.ControlStream`, but ``put`` lets ``server`` decide at once, in the caller's thread.

    Every value that another rank sends to rank 0, or that rank 0 announces, takes this stream on half of its way. Messages are
    passed on as they are.
    """

    def __init__(
        self,
        server: ControlServer,
        *,
        hello: Callable[[], Message],
        on_message: Callable[[Message], None],
        on_end: Callable[[grpc.RpcError | Unproven | RuntimeError | None], bool],
    ) -> None:
        self._connection = server.connect(in_process=True)
        self._heartbeat_seconds = server.heartbeat_seconds
        self._hello = hello
        self._on_message = on_message
        self._on_end = on_end
        self._thread = threading.Thread(target=self._run, name="commsched-control-receive", daemon=True)

    def start(self) -> None:
        self._connection.put(self._hello())
        self._thread.start()

    def put(self, message: Message) -> None:
        """Send ``message``; never blocks. Any thread."""
        self._connection.put(message)

    def finish(self) -> None:
        """Send nothing more. Never blocks; any thread."""
        self._connection.finish()

    def close(self) -> None:
        """End the connection and the thread. Idempotent; any thread but the stream's own."""
        self._connection.finish()
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def _run(self) -> None:
        beat_at = 0.0
        for message in self._connection.outbox:
            now = time.monotonic()
            if now >= beat_at:  # the server gives up any silent member, even in its own process
                beat_at = now + self._heartbeat_seconds
                self._connection.put(Heartbeat())
            self._on_message(message)
        self._connection.ended()
        self._on_end(None)
