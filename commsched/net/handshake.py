"""How a TCP connection between two processes of a job begins.

Both ends prove that they know the job's token (``proof.py``). The end that connects proves first, so a stranger that connects
learns nothing from which the token could be guessed. It also gives the name of its job, which the proof covers.

With an identity, the listening end first sends a few bytes in the clear that say that it speaks TLS, so that an end with the
other setting is named instead of waited for. Then come the handshake of TLS, and inside it the same proofs, which name the
certificate of the end that connects.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from ..core.errors import ConfigError
from .proof import NONCE_BYTES, PROOF_BYTES, is_proof, make_nonce, prove
from .tls import Identity, NotOfThisJob, TlsSocket, remaining_seconds

#: Either of them, once both ends have proved themselves.
Connected = socket.socket | TlsSocket

_ACCEPTED, _REFUSED = b"+", b"-"


class StreamBroken(Exception):
    """The connection broke or ended within a message; the text says why."""


class HandshakeRejected(Exception):
    """The connecting process is none of this job; the text says why."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """The handshake of one kind of connection.

    Attributes:
        greeting, tls_greeting: the first bytes of the listening end, without and with encryption. They have the same length.
        connecting, listening: the roles of the two ends in proofs.
        speaks: the kind of connection, in messages.
        cure: what to do if the other end is of another kind.
    """

    greeting: bytes
    tls_greeting: bytes
    connecting: bytes
    listening: bytes
    speaks: str
    cure: str

    def begin(
        self, connected: socket.socket, peer: str, token: str, job: str, identity: Identity | None, within_seconds: float
    ) -> Connected:
        """Do the connecting end's part of everything, on a new connection, in twice ``within_seconds`` at most.

        Args:
            peer: the name of the listening end in messages.

        Raises:
            ConfigError: the other end has another token, does not belong to this job, or is not of this kind and version.
            OSError, StreamBroken: the connection ended, or no answer came in time.
        """
        made: Connected = connected
        if identity is not None:
            try:
                made = self.secure_connecting(connected, peer, identity, within_seconds)
            except NotOfThisJob as why:
                raise ConfigError(f"{peer} {why}") from why
        try:
            self.connect(made, peer, token, job, within_seconds)
        except NotOfThisJob as why:
            raise ConfigError(f"{peer} {why}") from why
        return made

    def answer(
        self,
        accepted: socket.socket,
        token: str,
        identity: Identity | None,
        within_seconds: float,
        on_proven: Callable[[], None] = lambda: None,
    ) -> tuple[Connected, str]:
        """Do the listening end's part of everything, on a connection just accepted, in twice ``within_seconds`` at most.
        Returns the name of the other end's job, too.

        Raises:
            HandshakeRejected: see :meth:`accept`.
        """
        made: Connected = accepted
        try:
            if identity is not None:
                made = self.secure_listening(accepted, identity, within_seconds)
            return made, self.accept(made, token, within_seconds, on_proven)
        except NotOfThisJob as stranger:
            raise HandshakeRejected(f"it {stranger}") from stranger

    def connect(self, connection: Connected, peer: str, token: str, job: str, within_seconds: float) -> None:
        """Do the connecting end's part of the proofs. No byte after them is read.

        Raises:
            ConfigError: the other end has another token, or is not of this kind and version.
            StreamBroken: the connection ended, or no answer came in time.
        """
        deadline = monotonic() + within_seconds
        certificate = _members_digest(connection)
        greeting = read_exactly(connection, len(self.greeting), deadline)
        if greeting == self.tls_greeting:
            raise ConfigError(f"{peer} takes encrypted connections only; give all ranks and servers security=tls")
        if greeting != self.greeting:
            raise ConfigError(f"{peer} does not speak {self.speaks}; {self.cure}")
        challenge = read_exactly(connection, NONCE_BYTES, deadline)
        nonce = make_nonce()
        name = job.encode()
        proof = prove(token, self.connecting, challenge, nonce, job, certificate)
        write_all(connection, self.greeting + nonce + proof + bytes([len(name)]) + name, deadline)
        accepted = read_exactly(connection, len(_ACCEPTED), deadline) == _ACCEPTED
        shown = read_exactly(connection, PROOF_BYTES, deadline) if accepted else b""
        if not is_proof(shown, token, self.listening, challenge, nonce, job, certificate):
            raise ConfigError(f"{peer} has another token; set the same COMMSCHED_TOKEN everywhere")

    def accept(
        self, connection: Connected, token: str, within_seconds: float, on_proven: Callable[[], None] = lambda: None
    ) -> str:
        """Do the listening end's part of the proofs. Returns the name of the other end's job.

        At most 324 bytes are read. ``on_proven`` is called before the other end is notified that it is admitted. An exception
        from ``on_proven`` ends the handshake.

        Raises:
            HandshakeRejected: the other end does not know the token, does not speak this protocol, or was too slow.
        """
        deadline = monotonic() + within_seconds
        certificate = _members_digest(connection)
        challenge = make_nonce()
        try:
            write_all(connection, self.greeting + challenge, deadline)
            if read_exactly(connection, len(self.greeting), deadline) != self.greeting:
                raise HandshakeRejected(f"it does not speak this version's {self.speaks}")
            nonce = read_exactly(connection, NONCE_BYTES, deadline)
            proof = read_exactly(connection, PROOF_BYTES, deadline)
            [length] = read_exactly(connection, 1, deadline)
            job = read_exactly(connection, length, deadline).decode("utf-8", "replace")
            if not is_proof(proof, token, self.connecting, challenge, nonce, job, certificate):
                write_all(connection, _REFUSED, deadline)
                raise HandshakeRejected("it does not have this job's token")
            on_proven()
            write_all(connection, _ACCEPTED + prove(token, self.listening, challenge, nonce, job, certificate), deadline)
            return job
        except StreamBroken as broken:
            raise HandshakeRejected(str(broken)) from broken

    def secure_connecting(self, connection: socket.socket, peer: str, identity: Identity, within_seconds: float) -> TlsSocket:
        """Begin the connecting end of an encrypted connection, on a new connection.

        Raises:
            ConfigError: the other end does not encrypt.
            NotOfThisJob: the other end does not belong to this job.
            OSError, StreamBroken: the connection ended, or no answer came in time.
        """
        deadline = monotonic() + within_seconds
        greeting = read_exactly(connection, len(self.tls_greeting), deadline)
        if greeting != self.tls_greeting:
            raise ConfigError(
                f"{peer} does not speak {self.speaks} with security=tls; give all ranks and servers the same settings"
            )
        secured = TlsSocket(connection, identity, server_side=False)
        secured.handshake(deadline - monotonic())
        return secured

    def secure_listening(self, connection: socket.socket, identity: Identity, within_seconds: float) -> TlsSocket:
        """Begin the listening end of an encrypted connection, on a connection just accepted.

        Raises:
            NotOfThisJob: the other end does not belong to this job, or does not speak TLS.
            HandshakeRejected: it was too slow, or ended the connection.
        """
        deadline = monotonic() + within_seconds
        secured = TlsSocket(connection, identity, server_side=True)
        try:
            write_all(connection, self.tls_greeting, deadline)
            secured.handshake(deadline - monotonic())
        except (OSError, StreamBroken) as error:
            raise HandshakeRejected(str(error)) from error
        return secured


def _members_digest(connection: Connected) -> bytes:
    return connection.members_digest if isinstance(connection, TlsSocket) else b""


def read_exactly(connection: Connected, nbytes: int, deadline: float) -> bytes:
    """Raises StreamBroken if they do not come in time."""
    received = b""
    while len(received) < nbytes:
        try:
            connection.settimeout(remaining_seconds(deadline))
            part = connection.recv(nbytes - len(received))
        except OSError as error:
            raise StreamBroken(str(error)) from error
        if not part:
            raise StreamBroken("it ended the connection")
        received += part
    return received


def write_all(connection: Connected, data: bytes, deadline: float) -> None:
    """Raises StreamBroken if they cannot leave in time."""
    try:
        connection.settimeout(remaining_seconds(deadline))
        connection.sendall(data)
    except OSError as error:
        raise StreamBroken(str(error)) from error
