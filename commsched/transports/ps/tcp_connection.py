"""A TCP connection that carries frames both ways, after its handshake; the same at both ends."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from time import monotonic

from ...core.errors import CommschedError
from .frame import HEADER_BYTES, RAW, Frame, decode_header, encode_header
from .outbox import Outbox, Parcel
from .stream import Place, StreamBroken

#: What the kernel may hold unsent: it is committed beyond the credit, and an urgent message waits for it. Less would wake the
#: sender more often than it saves.
_UNSENT_BYTES = 256 * 1024

#: A push counts as sent when all but so much was taken by the kernel. The next one is chosen while the rest leaves, so that the
#: link does not fall idle between two; and as nobody can answer what has not left, ``sent`` is over before the answer comes.
_REST_BYTES = 64 * 1024

#: The most that Linux takes for TCP_KEEPIDLE and TCP_KEEPINTVL, and for TCP_USER_TIMEOUT.
_MOST_PROBE_SECONDS, _MOST_TIMEOUT_MS = 2**15 - 1, 2**31 - 1


class TcpConnection:
    """See ``Stream``. One thread sends; the thread that iterates ``frames`` receives. Payload goes from the task's memory to
    the kernel, and from the kernel to where it is to be, with no copy between.

    Args:
        name: of the sending thread.
        fail_after_seconds: bounds how long a connection lives whose other end is frozen or cut off.

    Raises:
        OSError: the system refuses an option of the socket.
        RuntimeError: there is no thread to be had.
    """

    def __init__(self, connected: socket.socket, peer: str, outbox: Outbox, name: str, fail_after_seconds: float) -> None:
        self.peer = peer
        self.outbox = outbox
        self._socket = connected
        self._send_error: Exception | None = None
        _set_options(connected, fail_after_seconds)
        self._sender = threading.Thread(target=self._send_all, name=name, daemon=True)
        self._sender.start()

    def frames(self, place: Place) -> Iterator[Frame]:
        header = memoryview(bytearray(HEADER_BYTES))
        while self._fill(header):
            frame, nbytes = decode_header(header)
            if nbytes:
                frame = frame._replace(payload=place(frame) if frame.kind in RAW else memoryview(bytearray(nbytes)))
                if not self._fill(memoryview(frame.payload)):
                    raise self._broken("it ended in the middle of a message")
            yield frame
            del frame  # its memory may be wanted before the next message comes
        if self._send_error is not None:
            raise self._broken(self._send_error)

    def abort(self) -> None:
        """End at once, in both directions. Any thread; the connection must not be closed yet."""
        self.outbox.abort()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended by itself

    def linger(self, within_seconds: float) -> None:
        """Return when the other end has ended too, or after that time. For the thread that received, once the outbox is
        finished: were the connection closed with something unread, what was sent last would be lost on the way."""
        deadline = monotonic() + within_seconds
        scratch = bytearray(_REST_BYTES)
        try:
            while (remaining := deadline - monotonic()) > 0:
                # Not settimeout, which would turn the sender's calls into non-blocking ones.
                _set_receive_timeout(self._socket, remaining)
                if not self._socket.recv_into(scratch):
                    return
        except OSError:
            pass  # it broke, or the time is over

    def close(self) -> None:
        """End, and return when the sending thread has. For the thread that received."""
        self.abort()
        self._sender.join()
        self._socket.close()

    def _fill(self, memory: memoryview) -> bool:
        """False: the other end had ended before the first byte."""
        filled = 0
        try:
            while filled < len(memory):
                received = self._socket.recv_into(memory[filled:], 0, socket.MSG_WAITALL)
                if not received:
                    break
                filled += received
        except OSError as error:
            raise self._broken(error) from error
        if 0 < filled < len(memory):
            raise self._broken("it ended in the middle of a message")
        return filled > 0

    def _broken(self, why: object) -> Exception:
        """What the sender failed by counts first: what else is seen follows from it."""
        error = self._send_error
        return error if isinstance(error, CommschedError) else StreamBroken(str(error or why))

    # --- the sender's thread ---

    def _send_all(self) -> None:
        try:
            for parcel in self.outbox:
                self._send(parcel)
                del parcel  # its memory may be wanted before the next message comes
            self._socket.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError) as error:
            self._send_error = error  # the receiver finds the end, after what had come before it
        except Exception as error:
            self._send_error = error
            self.abort()  # or the receiver might wait for ever for answers to what was never sent
        self.outbox.abort()

    def _send(self, parcel: Parcel) -> None:
        header, payload = encode_header(parcel.frame), memoryview(parcel.frame.payload)
        if parcel.sent is None:
            self._write([header, payload])
            return
        most = len(payload) - _REST_BYTES
        if most <= 0:
            parcel.sent()
            self._write([header, payload])
            return
        self._write([header, payload[:most]])
        parcel.sent()
        self._write([payload[most:]])

    def _write(self, parts: list[bytes | memoryview]) -> None:
        unsent = sum(map(len, parts)) - self._socket.sendmsg(parts)
        if unsent:  # a signal came between
            self._socket.sendall(b"".join(parts)[-unsent:])


def _set_options(connected: socket.socket, fail_after_seconds: float) -> None:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    # Heartbeats on the control channel tell first, and by name. This ends connections to hosts that vanished which nobody's
    # heartbeat watches; a peer that pauses for less than ``fail_after`` lives.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_seconds = min(max(1, round(fail_after_seconds / 2)), _MOST_PROBE_SECONDS)
    timeout_ms = min(round(fail_after_seconds * 1000) + 2000, _MOST_TIMEOUT_MS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_seconds)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_seconds)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def _set_receive_timeout(connected: socket.socket, seconds: float) -> None:
    whole = int(seconds)
    microseconds = max(1, round((seconds - whole) * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", whole, min(microseconds, 999_999)))
