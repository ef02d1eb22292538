"""A TCP connection over TLS: how it begins, and the frames that it carries.

The server first sends a few bytes in the clear that say that it speaks TLS, so that an end with the other setting is named
instead of waited for. Then come the handshake of TLS, and inside it that of the plain lane, whose proofs name the worker's
certificate.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from time import monotonic

from ....core.errors import ConfigError
from ....net.tls import Identity, TlsSocket
from .send_queue import SendQueue
from .stream import Altered, StreamBroken
from .tcp_connection import (
    GREETING_BYTES,
    LARGE_BYTES,
    TLS_GREETING,
    HandshakeRejected,
    TcpConnection,
    read_exactly,
    require_answers,
    write_all,
)

#: Bytes that the receiver takes from the system at a time, and that the sender encrypts at a time. The threads of a connection
#: take turns at these pieces.
_ARRIVED_BYTES = 64 * 1024
_ENCRYPTED_BYTES = 64 * 1024

#: A record of TLS holds this many bytes at most. OpenSSL may have one in part.
_RECORD_BYTES = 16 * 1024


def secure_worker(connection: socket.socket, peer: str, identity: Identity, within_seconds: float) -> TlsSocket:
    """Begin the worker's end of an encrypted connection, on a new connection.

    Raises:
        ConfigError: the server does not encrypt.
        NotOfThisJob: the server does not belong to this job.
        OSError, StreamBroken: the connection ended, or no answer came in time.
    """
    deadline = monotonic() + within_seconds
    greeting = read_exactly(connection, GREETING_BYTES, deadline)
    if greeting != TLS_GREETING:
        raise ConfigError(f"{peer} does not speak lane=tcp with security=tls; give all ranks and servers the same settings")
    secured = TlsSocket(connection, identity, server_side=False)
    secured.handshake(deadline - monotonic())
    return secured


def secure_server(connection: socket.socket, identity: Identity, within_seconds: float) -> TlsSocket:
    """Begin the server's end of an encrypted connection, on a connection just accepted.

    Raises:
        NotOfThisJob: the other end does not belong to this job, or does not speak TLS.
        HandshakeRejected: it was too slow, or ended the connection.
    """
    deadline = monotonic() + within_seconds
    secured = TlsSocket(connection, identity, server_side=True)
    try:
        write_all(connection, TLS_GREETING, deadline)
        secured.handshake(deadline - monotonic())
    except (OSError, StreamBroken) as error:
        raise HandshakeRejected(str(error)) from error
    return secured


class TlsConnection(TcpConnection):
    """See :class:`TcpConnection`. The payload is copied once more on each way, from or to the encrypted bytes."""

    def __init__(self, secured: TlsSocket, peer: str, outbox: SendQueue, name: str, fail_after_seconds: float) -> None:
        self._secured = secured
        self._arrived = memoryview(bytearray(_ARRIVED_BYTES))
        super().__init__(secured.socket, peer, outbox, name, fail_after_seconds)

    def _fill(self, memory: memoryview) -> bool:
        filled, wanted = 0, len(memory)
        try:
            while filled < wanted:
                filled += (received := self._secured.read_into(memory[filled:] if filled else memory))
                if not received and not self._receive(wanted - filled):
                    break
        except ssl.SSLError as error:
            with suppress(OSError):  # nothing else can be sent any more, and the other end should know why
                self._socket.send(self._secured.last_words(), socket.MSG_DONTWAIT)
            raise self._broken_or(Altered(error.reason or str(error))) from error
        except OSError as error:
            raise self._broken(error) from error
        if 0 < filled < wanted:
            raise self._broken("it ended in the middle of a message")
        return filled == wanted

    def _receive(self, nbytes: int) -> bool:
        """Take over what has arrived, at most a little before the wanted ``nbytes``. False if the other end has ended."""
        flags = socket.MSG_DONTWAIT if nbytes > LARGE_BYTES else 0
        if not flags and self._awaited > 1:
            self._await(1)
        while True:
            try:
                received = self._socket.recv_into(self._arrived, 0, flags)
            except BlockingIOError:
                if flags:
                    self._wait_for(nbytes - _RECORD_BYTES)
                else:
                    require_answers(self._socket, self._fail_after_seconds + 2.0)
                continue
            if received:
                self._secured.arrived(self._arrived[:received])
            return received > 0

    def _write(self, parts: list[bytes | memoryview]) -> None:
        small: list[bytes | memoryview] = []  # they leave in records together
        for part in parts:
            if len(part) < _RECORD_BYTES:
                small.append(part)
                continue
            self._send_encrypted(b"".join(small))
            small = []
            for start in range(0, len(part), _ENCRYPTED_BYTES):
                self._send_encrypted(part[start : start + _ENCRYPTED_BYTES])
        self._send_encrypted(b"".join(small))

    def _send_encrypted(self, data: bytes | memoryview) -> None:
        if data:
            self._socket.sendall(self._secured.encrypted(data))
