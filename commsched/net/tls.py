"""TLS for the connections of a job (``security=tls``): who belongs to the job, and a socket for one sending and one receiving
thread.

A member proves that it belongs to the job by a certificate of the job's authority. Nobody hands these out. The authority's key
pair (ECDSA, P-256) is derived from the token by scrypt, so each process that knows the token has it, and signs a certificate
for a key of its own, which lives as long as the process. Whoever does not know the token can make no such certificate. Where
the user gives certificates, they take the place of those, and the token is proved inside the connection as well.

Keys of a connection are agreed on anew (ECDHE), so who learns the token later cannot read what was recorded.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import stat
import threading
import time
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError

#: The name that the certificate of a member has. Whoever connects requires it. It is no host's name, so one certificate may
#: serve all members, wherever they run.
MEMBER_NAME = "commsched"

#: The files of the directory that the setting ``certificates`` names, as in a Kubernetes secret of the type kubernetes.io/tls.
AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"

#: Each guess of a token costs its maker, who has seen a certificate, 32 MiB of memory and about a tenth of a second.
_SCRYPT = {"n": 2**15, "r": 8, "p": 1, "maxmem": 2**26}

#: The order of the group P-256.
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

#: Certificates live no longer than their process, and clocks of machines differ.
_NOT_BEFORE, _NOT_AFTER = datetime(2000, 1, 1), datetime(9999, 12, 31, 23, 59, 59)

#: The most bytes that are taken from the system at a time while a connection is set up.
_CHUNK_BYTES = 64 * 1024


class Identity:
    """The certificate that this process shows the other members, and the authority by which it knows them.

    Attributes:
        digest: of this process's certificate. Proofs of the token name it, so that they prove nothing in a connection that
            somebody else made.
        certificate, key, authority: in PEM.
        directory: where the user's own certificates are; None if these are made from the token.
    """

    def __init__(self, certificate: bytes, key: bytes, authority: bytes, directory: str | None = None) -> None:
        self.certificate, self.key, self.authority = certificate, key, authority
        self.directory = directory
        self.digest = digest_of(certificate)

    @cached_property
    def server_context(self) -> ssl.SSLContext:
        return self.make_context(ssl.PROTOCOL_TLS_SERVER)

    @cached_property
    def client_context(self) -> ssl.SSLContext:
        return self.make_context(ssl.PROTOCOL_TLS_CLIENT)  # which checks the name

    def make_context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # nobody resumes a session
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode())
        # Python reads certificates from files only; this one is in memory, and nobody else sees it.
        file = os.memfd_create("commsched-identity")
        try:
            os.write(file, self.key + b"\n" + self.certificate)
            context.load_cert_chain(f"/proc/self/fd/{file}", password="")  # without one, OpenSSL would ask at the terminal
        finally:
            os.close(file)
        return context

    def __repr__(self) -> str:
        return f"<Identity from {self.directory or 'the token'}>"


def identity_of(security: str, token: str, certificates: str | None) -> Identity | None:
    """The identity of this process in the job of ``token``; None with ``security=none``.

    Args:
        certificates: the directory with the user's own certificates; None: they are derived from the token.

    Raises:
        ConfigError: a file of ``certificates`` is missing, does not fit or may be read by others; or the library that makes
            certificates is missing.
    """
    if security == "none":
        if certificates is not None:
            raise ConfigError(f"certificates={certificates!r} has no effect with security='none'; set security='tls' too")
        return None
    identity = _derived(token) if certificates is None else _read(Path(certificates))
    try:
        _ = identity.server_context, identity.client_context
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise ConfigError(f"certificates={certificates!r}: certificate, key and authority do not fit: {why}") from error
    return identity


def digest_of(certificate: bytes) -> bytes:
    """The digest of the first certificate of a PEM text."""
    end = b"-----END CERTIFICATE-----"
    first = certificate.partition(b"-----BEGIN CERTIFICATE-----")[1:]
    text = b"".join(first).partition(end)[0] + end
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text.decode())).digest()


def _read(directory: Path) -> Identity:
    found: list[bytes] = []
    for name in (CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE):
        path = directory / name
        try:
            if name == KEY_FILE and stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise ConfigError(f"certificates: {path} may be read by other users; chmod 600 it")
            found.append(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"certificates: {path} cannot be read: {error.strerror}") from error
    certificate, key, authority = found
    try:
        return Identity(certificate, key, authority, str(directory))
    except ValueError as error:
        raise ConfigError(f"certificates: {directory / CERTIFICATE_FILE} is no certificate in PEM: {error}") from error


@lru_cache(maxsize=4)
def _stretched(token: str) -> int:
    """A number from which the authority of the job is made."""
    derived = hashlib.scrypt(token.encode(), salt=b"commsched tls authority 1", dklen=48, **_SCRYPT)
    return int.from_bytes(derived) % (_P256_ORDER - 1) + 1


def _derived(token: str) -> Identity:
    """A new identity under the authority that the token stands for."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigError(
            'security=tls makes certificates with the package cryptography: pip install "commsched[tls]", or give your own by '
            "COMMSCHED_CERTIFICATES"
        ) from error
    if not token:
        raise ConfigError("the job's token is empty; set the same COMMSCHED_TOKEN on every rank")
    authority_key = ec.derive_private_key(_stretched(token), ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "commsched job")])
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, MEMBER_NAME)])

    def signed(subject: x509.Name, public_key: Any, *extensions: tuple[x509.ExtensionType, bool]) -> bytes:
        builder = x509.CertificateBuilder(authority_name, subject, public_key, x509.random_serial_number())
        builder = builder.not_valid_before(_NOT_BEFORE).not_valid_after(_NOT_AFTER)
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority = signed(authority_name, authority_key.public_key(), (x509.BasicConstraints(True, 0), True))
    certificate = signed(
        name,
        key.public_key(),
        (x509.BasicConstraints(False, None), True),
        (x509.SubjectAlternativeName([x509.DNSName(MEMBER_NAME)]), False),
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Identity(certificate, private, authority)


class NotOfThisJob(Exception):
    """The process at the other end does not belong to the job, or does not take this one for a member; the text says why."""


class TlsSocket:
    """TLS over a connected socket, for one thread that sends and one that receives at the same time.

    OpenSSL's object must not be used by two threads at once. It works in memory here, under a lock, and each thread moves the
    encrypted bytes between memory and the socket without the lock. So neither waits for the other one's network.
    """

    def __init__(self, connected: socket.socket, identity: Identity, *, server_side: bool) -> None:
        self.socket = connected
        self._identity = identity
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = identity.server_context if server_side else identity.client_context
        expected = None if server_side else MEMBER_NAME
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side, expected)
        self._server_side = server_side
        self._lock = threading.Lock()

    def handshake(self, within_seconds: float) -> None:
        """Prove to each other that both belong to the job. Afterwards the socket has some timeout.

        Raises:
            NotOfThisJob: the other end does not.
            OSError: the connection ended, or the time is over.
        """
        deadline = time.monotonic() + within_seconds
        while True:
            try:
                self._tls.do_handshake()
                return self._flush(deadline)
            except ssl.SSLWantReadError:
                self._flush(deadline)
                self._receive(deadline)
            except ssl.SSLError as error:
                why = self._explain(error)
                try:
                    self._flush(deadline)  # tells the other end
                except OSError:
                    pass
                raise NotOfThisJob(why) from error

    @property
    def members_digest(self) -> bytes:
        """The digest of the certificate of the end that connects; for proofs of the token."""
        if not self._server_side:
            return self._identity.digest
        shown = self._tls.getpeercert(binary_form=True)
        assert shown is not None  # it is required
        return hashlib.sha256(shown).digest()

    # --- a socket's methods, for the time in which one thread uses it ---

    def settimeout(self, seconds: float | None) -> None:
        self.socket.settimeout(seconds)

    def recv(self, nbytes: int) -> bytes:
        """Receive as a socket does. Raises NotOfThisJob if the other end refuses this process, after the handshake."""
        seconds = self.socket.gettimeout()
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while True:
                try:
                    return self._tls.read(nbytes)
                except ssl.SSLWantReadError:
                    if deadline is not None:  # for a whole record: its bytes may come one by one
                        self.socket.settimeout(remaining_seconds(deadline))
                    data = self.socket.recv(_CHUNK_BYTES)
                    if not data:
                        return b""
                    self._incoming.write(data)
                except ssl.SSLError as error:
                    if "ALERT" in (error.reason or ""):
                        raise NotOfThisJob(self._explain(error)) from error
                    raise
        finally:
            self.socket.settimeout(seconds)

    def sendall(self, data: bytes) -> None:
        self.socket.sendall(self.encrypted(data))

    # --- the sending thread ---

    def encrypted(self, data: bytes | memoryview) -> bytes:
        """Return the bytes to send for ``data``."""
        with self._lock:
            self._tls.write(data)  # memory takes all of it
            return self._outgoing.read()

    # --- the receiving thread ---

    def arrived(self, data: memoryview) -> None:
        """Take over what was received."""
        with self._lock:
            self._incoming.write(data)

    def read_into(self, memory: memoryview) -> int:
        """Decrypt into ``memory``, and return the number of bytes; 0 if more must arrive first.

        Raises:
            ssl.SSLError: what arrived is not what the other end sent.
        """
        with self._lock:
            try:
                return self._tls.read(len(memory), memory)  # type: ignore[arg-type, return-value, unused-ignore]
            except ssl.SSLWantReadError:
                return 0

    def _explain(self, error: ssl.SSLError) -> str:
        return explain(error, self._identity)

    def last_words(self) -> bytes:
        """Return the bytes that tell the other end of the error that :meth:`read_into` has raised."""
        with self._lock:
            return self._outgoing.read()

    def _flush(self, deadline: float) -> None:
        if self._outgoing.pending:
            self.socket.settimeout(remaining_seconds(deadline))
            self.socket.sendall(self._outgoing.read())

    def _receive(self, deadline: float) -> None:
        self.socket.settimeout(remaining_seconds(deadline))
        data = self.socket.recv(_CHUNK_BYTES)
        if not data:
            raise ConnectionResetError("it ended the connection")
        self._incoming.write(data)


def remaining_seconds(deadline: float) -> float:
    """The seconds until ``deadline``, a moment of the monotonic clock. Raises TimeoutError if it is over."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("timed out")
    return remaining


def explain(error: ssl.SSLError, identity: Identity) -> str:
    """Say what ``error`` of a handshake means."""
    same = _cure(identity)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"does not prove that it belongs to this job ({error.verify_message}); {same}, or another program is there"
    reason = error.reason or str(error)
    if "ALERT" in reason:
        said = reason.lower().replace("_", " ")
        return f"does not take this process for one of its job ({said}); {same}"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return "does not speak TLS; give all ranks and servers security=tls"
    return f"cannot agree on an encryption ({reason.lower().replace('_', ' ')}); is the same version everywhere?"


def _cure(identity: Identity | None) -> str:
    if identity is not None and identity.directory is not None:
        return "give all ranks and servers certificates of one authority, which name commsched"
    return "set the same COMMSCHED_TOKEN everywhere"


#: The pause before a server that ended the connection after the handshake is asked again.
_ASK_AGAIN_SECONDS = 0.5


def probe(address: str, identity: Identity | None, within_seconds: float) -> str | None:
    """Connect to the gRPC server at ``address``, and say why it will not do; None if it may. gRPC itself does not say.

    With an identity, it must speak TLS and belong to the job. Without one, it must not demand TLS.

    Raises:
        OSError: it cannot be reached, or ended the connection; it may come up.
    """
    if identity is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context = identity.make_context(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])  # without it, a server of gRPC ends the connection
    try:
        if _greets(address, context, within_seconds, hear=identity is not None):
            return None if identity is not None else "speaks TLS only; give all ranks and servers security=tls"
        # It proved itself and then ended the connection: gRPC's way to refuse a certificate, unless it just ends.
        time.sleep(_ASK_AGAIN_SECONDS)  # nothing could tell us
        if _greets(address, context, within_seconds, hear=True):
            return None
    except ssl.SSLError as error:
        return None if identity is None else explain(error, identity)
    return f"does not take this process for one of its job (it ended the connection); {_cure(identity)}"


def _greets(address: str, context: ssl.SSLContext, within_seconds: float, *, hear: bool) -> bool:
    """Whether the server at ``address`` greets after the handshake. Without ``hear``, the handshake is enough."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + within_seconds
    with socket.create_connection((host.strip("[]"), int(port)), within_seconds) as connected:
        connected.settimeout(remaining_seconds(deadline))
        try:
            with context.wrap_socket(connected, server_hostname=MEMBER_NAME) as secured:
                secured.settimeout(remaining_seconds(deadline))
                return not hear or bool(secured.recv(1))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError) as ended:
            raise ConnectionResetError(str(ended)) from ended
