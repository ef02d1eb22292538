"""What stands before the first message on a TCP connection: both ends prove that they know the job's token.

A challenge and response by HMAC-SHA256 (RFC 2104) over a nonce of each end. The token never travels, an old answer proves
nothing, and one end's proof is no answer to the other's challenge. The worker proves first, so a stranger who connects learns
nothing that a token could be guessed from. Whoever a worker connects to does get its proof: enough to try guesses of a weak
token, or to be taken for the worker by relaying it. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from time import monotonic

from ...core.errors import ConfigError
from .frame import VERSION
from .stream import StreamBroken

_MAGIC = b"CST" + bytes([VERSION])
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_ACCEPTED, _REFUSED = b"+", b"-"


class Stranger(Exception):
    """Who connected is none of this job's workers; the text says why."""


def introduce(connection: socket.socket, peer: str, token: str, within_seconds: float) -> None:
    """The worker's part, on a connection just made; nothing of what follows is read. ``peer`` is for messages.

    Raises:
        ConfigError: the server has another token, or is no server of this version.
        StreamBroken: the connection ended, or no answer came in time.
    """
    deadline = monotonic() + within_seconds
    if _read(connection, len(_MAGIC), deadline) != _MAGIC:
        raise ConfigError(f"{peer} does not speak lane=tcp; give all ranks and servers the same lane and version")
    challenge = _read(connection, _NONCE_BYTES, deadline)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    _write(connection, _MAGIC + nonce + _proof(token, b"worker", challenge, nonce), deadline)
    accepted = _read(connection, len(_ACCEPTED), deadline) == _ACCEPTED
    if not accepted or not _is_proof(_read(connection, _PROOF_BYTES, deadline), token, b"server", challenge, nonce):
        raise ConfigError(f"{peer} has another token; set the same COMMSCHED_TOKEN everywhere")


def admit(connection: socket.socket, token: str, within_seconds: float) -> None:
    """The server's part, on a connection just accepted; at most 68 bytes are read.

    Raises:
        Stranger: it does not know the token, does not speak as a worker does, or was too slow.
    """
    deadline = monotonic() + within_seconds
    challenge = secrets.token_bytes(_NONCE_BYTES)
    try:
        _write(connection, _MAGIC + challenge, deadline)
        if _read(connection, len(_MAGIC), deadline) != _MAGIC:
            raise Stranger("it does not speak this version's TCP lane")
        nonce = _read(connection, _NONCE_BYTES, deadline)
        if not _is_proof(_read(connection, _PROOF_BYTES, deadline), token, b"worker", challenge, nonce):
            _write(connection, _REFUSED, deadline)
            raise Stranger("it does not have this job's token")
        _write(connection, _ACCEPTED + _proof(token, b"server", challenge, nonce), deadline)
    except StreamBroken as broken:
        raise Stranger(str(broken)) from broken


def _proof(token: str, role: bytes, challenge: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), b"commsched " + role + challenge + nonce, "sha256")


def _is_proof(shown: bytes, token: str, role: bytes, challenge: bytes, nonce: bytes) -> bool:
    return hmac.compare_digest(shown, _proof(token, role, challenge, nonce))


def _read(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < nbytes:
        try:
            connection.settimeout(_remaining(deadline))
            part = connection.recv(nbytes - len(received))
        except OSError as error:
            raise StreamBroken(str(error)) from error
        if not part:
            raise StreamBroken("it ended the connection")
        received += part
    return received


def _write(connection: socket.socket, data: bytes, deadline: float) -> None:
    try:
        connection.settimeout(_remaining(deadline))
        connection.sendall(data)
    except OSError as error:
        raise StreamBroken(str(error)) from error


def _remaining(deadline: float) -> float:
    remaining = deadline - monotonic()
    if remaining <= 0:
        raise TimeoutError("timed out")
    return remaining
