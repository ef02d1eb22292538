"""A TCP connection: its handshake (``net/handshake.py``), and the frames that it carries both ways. Both ends use it.

The messages are neither encrypted nor signed, unless ``tls_connection.py`` carries all of it.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic

from ....core.errors import CommschedError
from ....net.handshake import Handshake
from .frame import HEADER_BYTES, RAW, VERSION, Frame, decode_header, encode_header
from .send_queue import OutgoingFrame, SendQueue
from .stream import Allocate, StreamBroken

#: The handshake of a worker's connection to a shard.
LANE = Handshake(
    b"CST" + bytes([VERSION]),
    b"CSS" + bytes([VERSION]),
    b"tcp worker",
    b"tcp server",
    "lane=tcp",
    "give all ranks and servers the same lane and version",
)


#: The kernel may hold unsent what leaves in this time, within these bytes, when the next message is chosen. It is committed
#: beyond the credit, and an urgent message waits for it. With a smaller limit the link may be idle before the sender has woken.
_UNSENT_SECONDS, _LEAST_UNSENT_BYTES, _MOST_UNSENT_BYTES = 0.002, 16 * 1024, 256 * 1024

#: No limit for what the kernel holds unsent.
_ANY_BYTES = 2**31 - 1

#: After so many bytes the sender asks the kernel anew how fast they leave.
_MEASURED_BYTES = 512 * 1024

#: A push counts as sent when the kernel has taken all of it but half of what it may hold unsent, and at most this many bytes.
#: The next push is chosen while the rest leaves, so that the link is not idle between two pushes. The server cannot answer an
#: incomplete push, so ``sent`` has returned before the answer comes.
_MOST_REST_BYTES = 64 * 1024

#: A larger payload is received when it is there as a whole, or when this many of its bytes are there.
LARGE_BYTES, _AWAITED_BYTES = 32 * 1024, 512 * 1024

#: The most parts of messages that leave by one call. Linux accepts 1024.
_MAX_PARTS = 512

#: The largest TCP_KEEPIDLE and TCP_KEEPINTVL that Linux accepts, and the number of unanswered probes after which it gives up.
_MAX_PROBE_SECONDS, _UNANSWERED_PROBES = 2**15 - 1, 5

#: The first field of ``struct tcp_info``, tcpi_state, while neither end has ended.
_ESTABLISHED = 1

#: Fields of ``struct tcp_info``: tcpi_retransmits, tcpi_probes, tcpi_last_ack_recv.
_TCP_INFO = struct.Struct("=2xBB52xI")

#: Another one: tcpi_delivery_rate, in bytes per second. An older kernel does not fill it.
_DELIVERY_RATE = struct.Struct("=160xQ")


class TcpConnection:
    """See ``ServedStream``. One thread sends, and the thread that iterates ``frames`` receives.

    The payload goes from the task's memory to the kernel, and from the kernel to its destination, without a copy in between.

    Args:
        name: the name of the sending thread.
        fail_after_seconds: bounds how long a connection lives whose other end is frozen or cut off.

    Raises:
        OSError: the system refuses an option of the socket.
        RuntimeError: the system has no thread left.
    """

    def __init__(self, connected: socket.socket, peer: str, outbox: SendQueue, name: str, fail_after_seconds: float) -> None:
        self.peer = peer
        self.outbox = outbox
        self._socket = connected
        self._answers = Answers(connected, fail_after_seconds + 2.0)
        self._send_error: Exception | None = None
        self._unsent_bytes = _MOST_UNSENT_BYTES  # the socket's TCP_NOTSENT_LOWAT
        self._rest_bytes = _MOST_REST_BYTES
        self._unmeasured_bytes = 0  # sent since the speed was asked for
        _set_options(connected, fail_after_seconds)
        self._awaited = 1  # the socket's SO_RCVLOWAT
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(connected, select.POLLOUT)
        self._poll_ms = 1e3 * _silence_seconds(fail_after_seconds)
        self._sender = threading.Thread(target=self._send_all, name=name, daemon=True)
        self._sender.start()

    @property
    def has_ended(self) -> bool:
        return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED

    def frames(self, place: Allocate) -> Iterator[Frame]:
        header = memoryview(bytearray(HEADER_BYTES))
        while self._fill(header):
            frame, nbytes, checksum = decode_header(header)
            if nbytes:
                payload = place(frame) if frame.kind in RAW else memoryview(bytearray(nbytes))
                if not self._fill(payload):
                    raise self._broken("it ended in the middle of a message")
                frame = frame.carrying(payload)
                del payload
                frame.require_intact(checksum)
            yield frame
            del frame  # its memory may be reused before the next message comes
        if self._send_error is not None:
            raise self._broken(self._send_error)

    def abort(self) -> None:
        """End at once, in both directions. Thread-safe. The connection must not be closed yet."""
        self.outbox.abort()
        with suppress(OSError):  # it has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def linger(self, within_seconds: float) -> None:
        """Return when the other end has ended too, or after that time.

        Call it from the receiving thread once the outbox is finished. If the connection were closed while received bytes are
        unread, the messages that were sent last would be lost.
        """
        deadline = monotonic() + within_seconds
        scratch = bytearray(_MOST_REST_BYTES)
        with suppress(OSError):  # it broke, or the time is over
            while (remaining := deadline - monotonic()) > 0:
                # Not settimeout, which would turn the sender's calls into non-blocking ones.
                _set_receive_timeout(self._socket, remaining)
                if not self._socket.recv_into(scratch):
                    return

    def close(self) -> None:
        """End, and return when the sending thread has ended. Call it from the receiving thread."""
        self.abort()
        self._sender.join()
        self._socket.close()

    def _fill(self, memory: memoryview) -> bool:
        """Fill ``memory`` from the socket. Returns False if the other end had ended before the first byte."""
        filled, wanted = 0, len(memory)
        is_large = wanted > LARGE_BYTES
        flags = socket.MSG_DONTWAIT if is_large else socket.MSG_WAITALL
        try:
            while filled < wanted:
                if is_large:
                    # It does not try to receive before that: a large payload is rarely there as a whole, and each call may
                    # have to wait for the interpreter's lock.
                    self._wait_for(wanted - filled)
                try:
                    received = self._socket.recv_into(memory[filled:] if filled else memory, 0, flags)
                except BlockingIOError:  # nothing has come for a while
                    if not is_large:
                        self._answers.require()
                    continue
                if not received:
                    break
                filled += received
            if self._awaited > 1:
                self._await(1)
        except OSError as error:
            raise self._broken(error) from error
        if 0 < filled < wanted:
            raise self._broken("it ended in the middle of a message")
        return filled == wanted

    def _wait_for(self, nbytes: int) -> None:
        """Return when ``nbytes``, or :data:`_AWAITED_BYTES` of them, have come, the other end has ended, or nothing has come
        for a while. Waking up for each packet instead takes more time than to receive them."""
        if (awaited := min(nbytes, _AWAITED_BYTES)) != self._awaited:
            self._await(awaited)
        if not self._readable.poll(self._poll_ms):
            self._answers.require()

    def _await(self, nbytes: int) -> None:
        self._awaited = nbytes
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _broken(self, why: object) -> Exception:
        """Return the error to raise. The sender's error comes first, since other errors follow from it."""
        error = self._send_error
        return error if isinstance(error, CommschedError) else StreamBroken(str(error or why))

    def _broken_or(self, what: StreamBroken) -> Exception:
        """Return the error to raise: ``what`` the receiver found, unless the sender has failed by its own fault."""
        return self._send_error if isinstance(self._send_error, CommschedError) else what

    # --- the sender's thread ---

    def _send_all(self) -> None:
        try:
            for parcel in self.outbox:
                self._send(parcel)
                del parcel  # its memory may be reused before the next message comes
            self._socket.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError) as error:
            self._send_error = error  # the receiver finds the end, after the messages that came before it
        except Exception as error:
            self._send_error = error
            self.abort()  # or the receiver might wait for ever for answers to messages that were never sent
        self.outbox.abort()

    def _send(self, first: OutgoingFrame) -> None:
        """Send ``first``, and after it the messages that wait already. Small messages leave together, and the end of a push
        leaves with the next message: a call of the system costs more than such a message."""
        rest: list[bytes | memoryview] = []  # encoded, and not given to the kernel yet
        nbytes = 0  # of ``rest``
        parcel: OutgoingFrame | None = first
        while parcel is not None:
            header, payload = encode_header(parcel.frame), memoryview(parcel.frame.payload)
            most = self._rest_bytes
            nbytes += HEADER_BYTES + len(payload)
            if nbytes <= most and len(rest) < _MAX_PARTS:
                rest += (header, payload)
                if parcel.sent is not None:
                    parcel.sent()
            elif parcel.sent is None:
                self._write([*rest, header, payload])
                return self._follow_speed(nbytes)
            else:
                self._write([*rest, header, payload[:-most]])
                self._follow_speed(nbytes)
                parcel.sent()
                rest, nbytes = [payload[-most:]], min(len(payload), most)
            parcel = self.outbox.next_now()
        self._write(rest)
        self._follow_speed(nbytes)

    def _follow_speed(self, sent_bytes: int) -> None:
        """Let the kernel hold what leaves in a short time, now that it has taken some ``sent_bytes`` more. The connections of a
        host share its link: with a fixed limit they would hold more, the more there are, and for longer, the slower it is."""
        self._unmeasured_bytes += sent_bytes
        if self._unmeasured_bytes < _MEASURED_BYTES:
            return
        self._unmeasured_bytes = 0
        unsent = unsent_limit(delivery_rate(self._socket))
        if unsent != self._unsent_bytes:
            self._hold_unsent(unsent)
            self._unsent_bytes, self._rest_bytes = unsent, min(unsent // 2, _MOST_REST_BYTES)

    def _write(self, parts: list[bytes | memoryview]) -> None:
        """Give ``parts`` to the kernel. After a large message return when it holds little unsent, and when a third of the
        socket's buffer is free, in which what is not acknowledged yet counts too."""
        nbytes = sum(map(len, parts))
        # A large message is committed as a whole, so the kernel may hold it, and need not wake the sender for each part.
        is_large = nbytes > self._unsent_bytes
        if is_large:
            self._hold_unsent(_ANY_BYTES)
        unsent = nbytes - self._socket.sendmsg(parts)
        if unsent:  # a signal interrupted the call
            self._socket.sendall(b"".join(parts)[-unsent:])
        if is_large:
            self._hold_unsent(self._unsent_bytes)
            [(_, events)] = self._writable.poll()
            if events != select.POLLOUT:
                number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or errno.EPIPE
                raise OSError(number, os.strerror(number))

    def _hold_unsent(self, nbytes: int) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, nbytes)


def _set_options(connected: socket.socket, fail_after_seconds: float) -> None:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT_BYTES)
    # Heartbeats on the control channel detect a loss earlier, and name the lost rank. Keepalive ends connections to vanished
    # hosts that no heartbeat watches. Its probes ask the other end's kernel, so a peer that is frozen or busy keeps its
    # connection. TCP_USER_TIMEOUT would also end the connection of a peer that has not read for long.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_seconds = min(max(1, round(fail_after_seconds / 4)), _MAX_PROBE_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_seconds)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_seconds)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _UNANSWERED_PROBES)
    _set_receive_timeout(connected, _silence_seconds(fail_after_seconds))


def _silence_seconds(fail_after_seconds: float) -> float:
    """The time without a byte after which the other end's kernel is asked whether it is there."""
    return min(fail_after_seconds / 4, _MAX_PROBE_SECONDS)


def delivery_rate(connected: socket.socket) -> int:
    """The bytes per second at which the other end has taken what was sent of late, as its kernel has acknowledged it. 0 if the
    kernel does not know."""
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _DELIVERY_RATE.size)
    rate: int = _DELIVERY_RATE.unpack(info.ljust(_DELIVERY_RATE.size, b"\0"))[0]
    return rate


def unsent_limit(bytes_per_second: int) -> int:
    """The bytes that the kernel should hold unsent at this speed, a power of two. At an unknown speed, 0, the most."""
    if not bytes_per_second:
        return _MOST_UNSENT_BYTES
    power = int(bytes_per_second * _UNSENT_SECONDS).bit_length()
    return min(max(1 << power, _LEAST_UNSENT_BYTES), _MOST_UNSENT_BYTES)


class Answers:
    """Whether the kernel at the other end of ``connected`` answers, even if its process does not read."""

    def __init__(self, connected: socket.socket, within_seconds: float) -> None:
        self._socket = connected
        self._within_seconds = within_seconds
        self._lacked_one = False  # at the last call, a probe had no answer

    def require(self) -> None:
        """Check it; call it after each silence.

        Raises:
            TimeoutError: there has been no answer for longer than that time, although data were sent again, or two calls in a
                row have found a probe without one. While a process does not read, the kernel's probes come up to two minutes
                apart, and one that has just left has no answer yet.
        """
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        retransmits, probes, last_answer_ms = _TCP_INFO.unpack(info.ljust(_TCP_INFO.size, b"\0"))
        is_late = last_answer_ms > self._within_seconds * 1000
        if is_late and (retransmits or (probes and self._lacked_one)):
            raise TimeoutError(f"its host has not answered for {last_answer_ms / 1000:.0f} s")
        self._lacked_one = is_late and probes > 0


def _set_receive_timeout(connected: socket.socket, seconds: float) -> None:
    whole = int(seconds)
    microseconds = max(1, round((seconds - whole) * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", whole, min(microseconds, 999_999)))
