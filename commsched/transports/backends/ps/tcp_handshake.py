"""The handshake before the first message on a TCP connection: both ends prove that they know the job's token.

See ``net/proof.py``. The worker proves first, so a stranger that connects learns nothing from which the token could be guessed.
The worker also gives the name of its job, which the proof covers. The messages that follow are neither encrypted nor signed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from time import monotonic

from ....core.errors import ConfigError
from ....net.proof import NONCE_BYTES, PROOF_BYTES, is_proof, make_nonce, prove
from .frame import VERSION
from .stream import StreamBroken

_MAGIC = b"CST" + bytes([VERSION])
_WORKER, _SERVER = b"tcp worker", b"tcp server"
_ACCEPTED, _REFUSED = b"+", b"-"


class HandshakeRejected(Exception):
    """The connecting process is none of this job's workers; the text says why."""


def client_handshake(connection: socket.socket, peer: str, token: str, job: str, within_seconds: float) -> None:
    """Do the worker's part of the handshake, on a new connection. No byte after the handshake is read.

    Args:
        peer: the name of the server in messages.

    Raises:
        ConfigError: the server has another token, or is no TCP server of this version.
        StreamBroken: the connection ended, or no answer came in time.
    """
    deadline = monotonic() + within_seconds
    if _read(connection, len(_MAGIC), deadline) != _MAGIC:
        raise ConfigError(f"{peer} does not speak lane=tcp; give all ranks and servers the same lane and version")
    challenge = _read(connection, NONCE_BYTES, deadline)
    nonce = make_nonce()
    name = job.encode()
    _write(connection, _MAGIC + nonce + prove(token, _WORKER, challenge, nonce, job) + bytes([len(name)]) + name, deadline)
    accepted = _read(connection, len(_ACCEPTED), deadline) == _ACCEPTED
    if not accepted or not is_proof(_read(connection, PROOF_BYTES, deadline), token, _SERVER, challenge, nonce, job):
        raise ConfigError(f"{peer} has another token; set the same COMMSCHED_TOKEN everywhere")


def server_handshake(
    connection: socket.socket, token: str, within_seconds: float, on_proven: Callable[[], None] = lambda: None
) -> str:
    """Do the server's part of the handshake, on a connection just accepted. Returns the name of the worker's job.

    At most 324 bytes are read. ``on_proven`` is called before the worker is notified that it is admitted. An exception from
    ``on_proven`` ends the handshake.

    Raises:
        HandshakeRejected: the other end does not know the token, does not speak this protocol, or was too slow.
    """
    deadline = monotonic() + within_seconds
    challenge = make_nonce()
    try:
        _write(connection, _MAGIC + challenge, deadline)
        if _read(connection, len(_MAGIC), deadline) != _MAGIC:
            raise HandshakeRejected("it does not speak this version's TCP lane")
        nonce = _read(connection, NONCE_BYTES, deadline)
        proof = _read(connection, PROOF_BYTES, deadline)
        [length] = _read(connection, 1, deadline)
        job = _read(connection, length, deadline).decode("utf-8", "replace")
        if not is_proof(proof, token, _WORKER, challenge, nonce, job):
            _write(connection, _REFUSED, deadline)
            raise HandshakeRejected("it does not have this job's token")
        on_proven()
        _write(connection, _ACCEPTED + prove(token, _SERVER, challenge, nonce, job), deadline)
        return job
    except StreamBroken as broken:
        raise HandshakeRejected(str(broken)) from broken


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
