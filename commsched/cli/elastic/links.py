"""Connections between the launchers of an elastic job on several machines.

One launcher hosts: the one that can listen at the given address, since its machine has it. The others connect to it. Both ends
prove the job's token (``net/handshake.py``), and exchange lines (``control/elastic_messages.py``).
"""

from __future__ import annotations

import errno
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from ...control.elastic_messages import (
    Alive,
    HostAnswer,
    LauncherHello,
    MachineOrder,
    MachineReport,
    from_line,
    to_line,
)
from ...core.errors import ConfigError
from ...net.handshake import Connected, Handshake, HandshakeRejected, StreamBroken
from ...net.tls import TlsSocket
from ..launch import Among, tell_user

_LAUNCHERS = Handshake(
    b"CSE\x01",
    b"CSF\x01",
    b"launcher",
    b"host of launchers",
    "as a launcher of an elastic job",
    "give all launchers the same COMMSCHED_CONTROL and version",
)

#: How long a handshake may take, and the pause before the next attempt.
_HANDSHAKE_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
#: A launcher that waits for the host as long as that says so.
_TELL_AFTER_SECONDS = 2.0

#: Connections that may not have proved themselves yet, and how often the output mentions connections that were refused.
_MAX_HANDSHAKES = 64
_WARN_EVERY_SECONDS = 10.0
_BACKLOG = 128

_MAX_LINE_BYTES = 2**20
_CHUNK_BYTES = 64 * 1024

#: How long a launcher waits for another one to take what was said last.
_FAREWELL_SECONDS = 5.0


class LinkLost(Exception):
    """The connection to another launcher has ended; the text says why."""


class Link:
    """A connection to another launcher. One thread iterates ``messages``; any thread sends."""

    def __init__(self, made: Connected, silence_seconds: float) -> None:
        self._made = made
        self._socket = made.socket if isinstance(made, TlsSocket) else made
        self._silence_seconds = silence_seconds
        self._socket.settimeout(silence_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._say_alive, name="commsched-launcher-alive", daemon=True).start()

    @property
    def own_host(self) -> str:
        """The address of this machine from which the connection was made."""
        return str(self._socket.getsockname()[0])

    def send(self, message: Any) -> None:
        """Send ``message``. If the connection is lost, :meth:`messages` says so."""
        with self._sending:
            try:
                line = to_line(message)
                self._socket.sendall(self._made.encrypted(line) if isinstance(self._made, TlsSocket) else line)
            except OSError:
                self._shut(socket.SHUT_RDWR)  # else a part of a line could be followed by others

    def messages(self) -> Iterator[Any]:
        """Yield what the other end says, until it ends the connection.

        Raises:
            LinkLost: the connection broke, the other end was silent for too long, or what it says is no message.
        """
        rest = b""
        while True:
            try:
                data = self._receive()
            except TimeoutError:
                raise LinkLost(f"it was silent for {self._silence_seconds:g} s") from None
            except ConnectionResetError:  # it did not read the last that was said, such as a killed one
                return
            except OSError as error:
                raise LinkLost(getattr(error, "strerror", None) or str(error)) from error
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                raise LinkLost("what it says is no message")
            for line in lines:
                try:
                    message = from_line(line)
                except ValueError as error:
                    raise LinkLost(str(error)) from error
                if not isinstance(message, Alive):
                    yield message

    def finish(self) -> None:
        """Say no more. The other end gets what was said before."""
        self._ended.set()
        with self._sending:
            self._shut(socket.SHUT_WR)

    def close(self) -> None:
        self._ended.set()
        self._shut(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> bytes:
        """Return what has arrived; b"" at the end."""
        if not isinstance(self._made, TlsSocket):
            return self._socket.recv(_CHUNK_BYTES)
        memory = memoryview(bytearray(_CHUNK_BYTES))
        while True:
            if received := self._made.read_into(memory):
                return bytes(memory[:received])
            data = self._socket.recv(_CHUNK_BYTES)
            if not data:
                return b""
            self._made.arrived(memoryview(data))

    def _say_alive(self) -> None:
        while not self._ended.wait(min(1.0, self._silence_seconds / 4)):
            self.send(Alive())

    def _shut(self, how: int) -> None:
        with suppress(OSError):  # it has ended by itself
            self._socket.shutdown(how)


class RemoteMachine:
    """The machine of another launcher, as the host sees it. See ``machine.Machine``."""

    def __init__(self, link: Link, hello: LauncherHello) -> None:
        self.host = hello.host
        self.room = hello.room
        self.settings = hello.settings
        self.link = link

    def do(self, order: MachineOrder) -> None:
        self.link.send(order)


# --- what a launcher hears, besides the reports of its own machine ---


@dataclass(frozen=True, slots=True)
class Came:
    """A launcher of this job wants to take part."""

    machine: RemoteMachine


@dataclass(frozen=True, slots=True)
class Heard:
    """A machine reports."""

    machine: RemoteMachine
    report: MachineReport


@dataclass(frozen=True, slots=True)
class Gone:
    """The connection to another launcher has ended: to that of ``machine``, or to the host."""

    machine: RemoteMachine | None
    why: str


@dataclass(frozen=True, slots=True)
class Told:
    """The host has said ``message``."""

    message: Any


class Desk:
    """Where the host takes the other launchers' connections, and enqueues what they say."""

    def __init__(self, listening: socket.socket, among: Among, events: SimpleQueue[Any]) -> None:
        self._listening = listening
        self._among = among
        self._events = events
        self._outstanding: dict[socket.socket, str] = {}  # connections that have not proved themselves, and their hosts
        self._warn_again_at = 0.0
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._links: set[Link] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="commsched-launchers", daemon=True).start()

    def close(self) -> None:
        """End all connections, after the other ends have got what was said."""
        with self._lock:
            self._closed = True
            links, threads = set(self._links), set(self._threads)
            for stranger in self._outstanding:
                with suppress(OSError):
                    stranger.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()
        for link in links:
            link.finish()
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                accepted, (host, port, *_) = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_PAUSE_SECONDS)  # for example out of file descriptors, which may come free
                continue
            self._make_room(accepted, host)
            thread = threading.Thread(
                target=self._meet, args=(accepted, f"{host}:{port}"), name="commsched-launcher", daemon=True
            )
            try:
                with self._lock:  # close() joins those that are started
                    thread.start()
                    self._threads.add(thread)
            except RuntimeError:  # there can be no more threads now; the launcher tries again
                with self._lock:
                    self._outstanding.pop(accepted, None)
                accepted.close()

    def _make_room(self, accepted: socket.socket, host: str) -> None:
        """If too many connections have not proved themselves yet, end the oldest one of the host that has most of them. A
        launcher whose connection was ended tries again."""
        with self._lock:
            self._outstanding[accepted] = host
            if len(self._outstanding) <= _MAX_HANDSHAKES:
                return
            [(most, _)] = Counter(self._outstanding.values()).most_common(1)
            oldest = next(each for each, its in self._outstanding.items() if its == most)
            del self._outstanding[oldest]
            with suppress(OSError):  # its own thread closes it
                oldest.shutdown(socket.SHUT_RDWR)

    def _proven(self, accepted: socket.socket) -> None:
        """Protect the connection from :meth:`_make_room`: a launcher that was admitted does not try again."""
        with self._lock:
            if self._outstanding.pop(accepted, None) is None:
                raise HandshakeRejected("it was closed to make room for others")

    def _meet(self, accepted: socket.socket, peer: str) -> None:
        try:
            link = self._admit(accepted, peer)
            if link is not None:
                self._converse(link)
        finally:
            accepted.close()
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _admit(self, accepted: socket.socket, peer: str) -> Link | None:
        try:
            made, job = _LAUNCHERS.answer(
                accepted, self._among.token, self._among.identity, _HANDSHAKE_SECONDS, lambda: self._proven(accepted)
            )
        except HandshakeRejected as stranger:
            now = time.monotonic()
            if not self._closed and now >= self._warn_again_at:  # a stranger must not fill the output
                self._warn_again_at = now + _WARN_EVERY_SECONDS
                tell_user(f"refused a connection from {peer}: {stranger}")
            return None
        finally:
            with self._lock:
                self._outstanding.pop(accepted, None)
        link = Link(made, self._among.fail_after_seconds)
        if job != self._among.job:
            link.send(HostAnswer(f"it is of the job {self._among.job!r}, and this launcher of {job!r}"))
            link.finish()
            with suppress(LinkLost):
                for _ in link.messages():  # until the other end has read that; a connection that is closed sooner may lose it
                    pass
            return None
        return link

    def _converse(self, link: Link) -> None:
        machine: RemoteMachine | None = None
        why = "it ended the connection"
        try:
            with self._lock:
                self._links.add(link)
                if self._closed:
                    return
            for message in link.messages():
                if machine is None and isinstance(message, LauncherHello):
                    machine = RemoteMachine(link, message)
                    self._events.put(Came(machine))
                elif machine is not None and isinstance(message, MachineReport):
                    self._events.put(Heard(machine, message))
                else:
                    why = f"it said {type(message).__name__} out of turn"
                    break
        except LinkLost as lost:
            why = str(lost)
        finally:
            link.close()
            with self._lock:
                self._links.discard(link)
            if machine is not None:
                self._events.put(Gone(machine, why))


def listen_for_launchers(among: Among) -> socket.socket | None:
    """A socket that listens at the address of the job's launchers. None: the address is of another machine, or another launcher
    of this machine listens there.

    Raises:
        ConfigError: the address stands for none, or every machine has it.
    """
    host, _, port = among.address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return None  # a name that resolves later, and so not that of this machine
    for family, kind, protocol, _, where in found:
        if where[0] in ("0.0.0.0", "::") or int(port) == 0:
            raise ConfigError(f"control={among.address!r}: give an address of one machine, and a port, so that others find it")
        listening = None
        try:
            listening = socket.socket(family, kind, protocol)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(_BACKLOG)
            return listening
        except OSError as error:
            if listening is not None:
                listening.close()
            if error.errno == errno.EADDRINUSE:
                return None  # another address of the same name may be free, and two launchers must not host one job
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise ConfigError(f"cannot listen at control={among.address!r}: {error.strerror or error}") from error
    return None


def connect_to_host(
    among: Among, hello: Callable[[str], LauncherHello], within_seconds: float, interrupted: Callable[[], bool]
) -> Link:
    """Connect to the launcher that hosts the job, and ask it to take this one. ``hello`` returns what to say first, given the
    address of this machine.

    Raises:
        ConfigError: no launcher answers, it has another token, or does not take this one, for the reason that it gives.
    """
    peer = f"the launcher at {among.address}"
    deadline = time.monotonic() + within_seconds
    tell_at = time.monotonic() + _TELL_AFTER_SECONDS
    why: object = "its name does not resolve"
    while True:
        try:
            made = _attempt(among, peer)
            break
        except (OSError, StreamBroken) as error:
            why = getattr(error, "strerror", None) or error
        if time.monotonic() > deadline or interrupted():
            raise ConfigError(
                f"no launcher of this job answers at control={among.address!r} ({why}): start one on the machine that has this "
                "address"
            )
        if time.monotonic() > tell_at:
            tell_at = math.inf
            tell_user(f"waits for {peer}, which hosts the job, for {within_seconds:g} s at most")
        time.sleep(_PAUSE_SECONDS)  # polls only while joining
    link = Link(made, among.fail_after_seconds)
    link.send(hello(link.own_host))
    return link


def _attempt(among: Among, peer: str) -> Connected:
    host, _, port = among.address.rpartition(":")
    with ExitStack() as undo:
        connected = socket.create_connection((host.strip("[]"), int(port)), _HANDSHAKE_SECONDS)
        undo.callback(connected.close)
        made = _LAUNCHERS.begin(connected, peer, among.token, among.job, among.identity, _HANDSHAKE_SECONDS)
        undo.pop_all()
    return made
