"""The frames that a TCP connection over TLS carries."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

from ....net.tls import TlsSocket
from .send_queue import SendQueue
from .stream import Altered
from .tcp_connection import LARGE_BYTES, TcpConnection

#: Bytes that the receiver takes from the system at a time, and that the sender encrypts at a time. The threads of a connection
#: take turns at these pieces.
_ARRIVED_BYTES = 64 * 1024
_ENCRYPTED_BYTES = 64 * 1024

#: A record of TLS holds this many bytes at most. OpenSSL may have one in part.
_RECORD_BYTES = 16 * 1024


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
                    self._answers.require()
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
