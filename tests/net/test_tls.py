"""Identities, sockets over TLS, and proofs of the token that name a certificate."""

from __future__ import annotations

import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from commsched.core.errors import ConfigError
from commsched.net import tls
from commsched.net.rpc import Call, DaemonExecutor, Unproven, bind, make_channel, make_server
from commsched.net.tls import Identity, NotOfThisJob, TlsSocket, identity_of, probe

TOKEN, OTHER_TOKEN = "the token of this job", "the token of another job"
SECONDS = 60.0


def of_token(token: str = TOKEN) -> Identity:
    identity = identity_of("tls", token, None)
    assert identity is not None
    return identity


class Authority:
    """A user's own authority, which writes directories of certificates."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ours")])
        self._certificate = self._sign(self._name, self._key.public_key(), x509.BasicConstraints(True, None))

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, extension: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number())
        builder = builder.not_valid_before(tls._NOT_BEFORE).not_valid_after(tls._NOT_AFTER).add_extension(extension, False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def write(self, directory: Path, name: str = "commsched") -> Path:
        directory.mkdir(exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "rank")])
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        (directory / "tls.crt").write_bytes(self._sign(subject, key.public_key(), names))
        (directory / "ca.crt").write_bytes(self._certificate)
        encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        (directory / "tls.key").write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.TraditionalOpenSSL, plain))
        (directory / "tls.key").chmod(0o600)
        return directory

    def identity(self, directory: Path, name: str = "commsched") -> Identity:
        identity = identity_of("tls", TOKEN, str(self.write(directory, name)))
        assert identity is not None
        return identity


# --- identities ---


def test_without_security_there_is_no_identity() -> None:
    assert identity_of("none", TOKEN, None) is None


def test_certificates_without_security_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"certificates='d' has no effect with security='none'; set security='tls' too"):
        identity_of("none", TOKEN, "d")


def test_every_process_with_the_token_has_the_same_authority_and_a_key_of_its_own() -> None:
    one, two, other = of_token(), of_token(), of_token(OTHER_TOKEN)
    keys = [x509.load_pem_x509_certificate(each.authority).public_key() for each in (one, two, other)]
    assert keys[0] == keys[1] != keys[2]
    assert one.key != two.key
    assert one.digest != two.digest


def test_neither_text_nor_errors_show_a_key() -> None:
    identity = of_token()
    assert repr(identity) == "<Identity from the token>"
    assert TOKEN.encode() not in identity.authority + identity.certificate


def test_a_missing_library_is_answered_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError) as raised:
        identity_of("tls", TOKEN, None)
    assert str(raised.value) == (
        'security=tls makes certificates with the package cryptography: pip install "commsched[tls]", or give your own by '
        "COMMSCHED_CERTIFICATES"
    )


def test_ones_own_certificates_need_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Authority().write(tmp_path)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    identity = identity_of("tls", TOKEN, str(tmp_path))
    assert repr(identity) == f"<Identity from {tmp_path}>"


def test_what_is_wrong_with_certificates_is_named(tmp_path: Path) -> None:
    def said() -> str:
        with pytest.raises(ConfigError) as raised:
            identity_of("tls", TOKEN, str(tmp_path))
        return str(raised.value)

    assert said() == f"certificates: {tmp_path}/tls.crt cannot be read: No such file or directory"
    Authority().write(tmp_path)
    (tmp_path / "tls.key").chmod(0o640)
    assert said() == f"certificates: {tmp_path}/tls.key may be read by other users; chmod 600 it"
    (tmp_path / "tls.key").chmod(0o600)
    right = (tmp_path / "tls.key").read_bytes()
    other = ec.generate_private_key(ec.SECP256R1())
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (tmp_path / "tls.key").write_bytes(other.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    unfit = f"certificates={str(tmp_path)!r}: certificate, key and authority do not fit: "
    assert said() == unfit + "KEY_VALUES_MISMATCH"
    locked = serialization.BestAvailableEncryption(b"a password")
    (tmp_path / "tls.key").write_bytes(other.private_bytes(encoding, serialization.PrivateFormat.PKCS8, locked))
    assert said().startswith(unfit)  # nobody is asked for the password
    (tmp_path / "tls.key").write_bytes(right)
    (tmp_path / "ca.crt").write_text("nonsense")
    assert said().startswith(unfit)
    (tmp_path / "tls.crt").write_text("nonsense")
    assert said().startswith(f"certificates: {tmp_path}/tls.crt is no certificate in PEM: ")


# --- sockets ---


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with closing(left), closing(right):
        yield left, right


def meet(worker: Identity, server: Identity) -> tuple[str, str]:
    """What the worker says of the server, and the server of the worker, or nothing; each reads a byte of the other."""
    said = ["", ""]

    def part(index: int, end: socket.socket, identity: Identity) -> None:
        try:
            secured = TlsSocket(end, identity, server_side=index == 1)
            secured.handshake(SECONDS)
            secured.sendall(b"x")
            assert secured.recv(1) == b"x"
        except (NotOfThisJob, OSError) as error:
            said[index] = str(error)
            end.shutdown(socket.SHUT_RDWR)

    with connected() as (left, right):
        thread = threading.Thread(target=part, args=(1, right, server))
        thread.start()
        part(0, left, worker)
        thread.join(SECONDS)
    return said[0], said[1]


def test_two_processes_with_one_token_trust_each_other() -> None:
    assert meet(of_token(), of_token()) == ("", "")


def test_a_process_with_another_token_is_trusted_by_neither() -> None:
    worker, server = meet(of_token(), of_token(OTHER_TOKEN))
    assert worker == (
        "does not prove that it belongs to this job (certificate signature failure); set the same COMMSCHED_TOKEN everywhere, "
        "or another program is there"
    )
    assert server == (
        "does not take this process for one of its job (tlsv1 alert decrypt error); set the same COMMSCHED_TOKEN everywhere"
    )


def test_ones_own_certificates_and_those_of_others(tmp_path: Path) -> None:
    ours = Authority()
    one, two = ours.identity(tmp_path / "one"), ours.identity(tmp_path / "two")
    assert meet(one, two) == ("", "")
    for stranger in (Authority().identity(tmp_path / "theirs"), of_token()):
        worker, server = meet(one, stranger)
        assert worker.startswith("does not prove that it belongs to this job (")
        cure = "; give all ranks and servers certificates of one authority, which name commsched, or another program is there"
        assert worker.endswith(cure)
        assert "does not take this process for one of its job" in server


def test_a_server_whose_certificate_has_another_name_is_not_one_of_the_job(tmp_path: Path) -> None:
    ours = Authority()
    worker, _ = meet(ours.identity(tmp_path / "rank"), ours.identity(tmp_path / "web", "www.example"))
    assert "Hostname mismatch, certificate is not valid for 'commsched'" in worker


def test_who_does_not_speak_tls_is_named() -> None:
    with connected() as (left, right):
        right.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with pytest.raises(NotOfThisJob, match="does not speak TLS; give all ranks and servers security=tls"):
            TlsSocket(left, of_token(), server_side=False).handshake(SECONDS)


def test_a_handshake_ends_in_time() -> None:
    with connected() as (left, _):
        with pytest.raises(TimeoutError):
            TlsSocket(left, of_token(), server_side=False).handshake(0.05)


@contextmanager
def pair() -> Iterator[tuple[TlsSocket, TlsSocket]]:
    with connected() as (left, right):
        ends = TlsSocket(left, of_token(), server_side=False), TlsSocket(right, of_token(), server_side=True)
        thread = threading.Thread(target=ends[1].handshake, args=(SECONDS,))
        thread.start()
        ends[0].handshake(SECONDS)
        thread.join(SECONDS)
        for end in ends:
            end.settimeout(SECONDS)
        yield ends


def test_a_record_that_comes_byte_by_byte_is_not_waited_for_longer_than_the_limit() -> None:
    enough = threading.Event()

    def drip(end: TlsSocket) -> None:
        for byte in end.encrypted(bytes(200)):
            end.socket.sendall(bytes([byte]))
            if enough.wait(0.05):
                return

    with pair() as (ours, theirs):
        thread = threading.Thread(target=drip, args=(theirs,))
        thread.start()
        ours.settimeout(0.2)
        with pytest.raises(TimeoutError):
            ours.recv(1)
        assert ours.socket.gettimeout() == 0.2
        enough.set()
        thread.join(SECONDS)


def decrypt(end: TlsSocket, arrived: bytes, nbytes: int) -> bytes:
    memory = memoryview(bytearray(nbytes))
    end.arrived(memoryview(arrived))
    filled = 0
    while filled < nbytes and (more := end.read_into(memory[filled:])):
        filled += more
    return bytes(memory[:filled])


@pytest.mark.parametrize("nbytes", [1, 2**14 - 1, 2**14, 2**14 + 1, 2**17 + 1])
def test_what_is_sent_arrives_and_only_once_it_is_there_as_a_whole(nbytes: int) -> None:
    data = os.urandom(nbytes)
    with pair() as (worker, server):
        sent = worker.encrypted(data)
        assert data[:64] not in sent or nbytes == 1
        assert decrypt(server, sent[:-1], nbytes) == data[: (nbytes - 1) // 2**14 * 2**14]
        assert decrypt(server, sent[-1:], nbytes) == data[(nbytes - 1) // 2**14 * 2**14 :]


def flip(sent: bytes) -> bytes:
    return sent[:-20] + bytes([sent[-20] ^ 1]) + sent[-19:]


@pytest.mark.parametrize("change", [flip, lambda sent: sent + sent, lambda sent: b"\x17\x03\x03\x00\x20" + bytes(32)])
def test_bytes_that_were_changed_replayed_or_invented_are_no_message(change: Callable[[bytes], bytes]) -> None:
    with pair() as (worker, server):
        assert decrypt(server, worker.encrypted(b"before"), 6) == b"before"
        with pytest.raises(ssl.SSLError, match=r"(?i)bad record mac"):
            decrypt(server, change(worker.encrypted(b"a gradient")), 64)


def test_all_four_threads_of_a_connection_work_at_the_same_time() -> None:
    data = {True: os.urandom(3_000_000), False: os.urandom(3_000_000)}
    received: dict[bool, bytes] = {}

    def send(end: TlsSocket, server_side: bool) -> None:
        for start in range(0, len(data[server_side]), 50_000):
            end.socket.sendall(end.encrypted(data[server_side][start : start + 50_000]))

    def receive(end: TlsSocket, server_side: bool) -> None:
        memory, filled = memoryview(bytearray(3_000_000)), 0
        while filled < len(memory):
            if more := end.read_into(memory[filled:]):
                filled += more
            else:
                end.arrived(memoryview(end.socket.recv(40_000)))
        received[server_side] = bytes(memory)

    with pair() as (worker, server):
        parts = [(call, end, side) for end, side in ((worker, False), (server, True)) for call in (send, receive)]
        threads = [threading.Thread(target=call, args=(end, side)) for call, end, side in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    assert received == {True: data[False], False: data[True]}


# --- gRPC ---


def echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from requests


@contextmanager
def serving(identity: Identity | None) -> Iterator[str]:
    executor = DaemonExecutor("test-pool")
    server = make_server(executor, TOKEN, 10.0, 1000, identity=identity)
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0', identity)}"
    server.start()
    try:
        yield address
    finally:
        server.stop(None)
        executor.shutdown()


def call(address: str, shown: Identity | None, proved: Identity | None) -> list[bytes]:
    """Call with the certificate ``shown``, and a proof of the token that names ``proved``."""
    with make_channel(address, 10.0, 1000, shown) as channel:
        return list(Call(channel, "/test/Echo", iter([b"x"]), TOKEN, "", identity=proved))


def test_a_call_over_tls() -> None:
    with serving(of_token()) as address:
        member = of_token()
        assert call(address, member, member) == [b"x"]


def test_a_proof_of_the_token_is_not_passed_on_by_who_has_another_certificate_of_the_authority(tmp_path: Path) -> None:
    ours = Authority()
    victim, middle = ours.identity(tmp_path / "victim"), ours.identity(tmp_path / "middle")
    with serving(ours.identity(tmp_path / "server")) as address:
        assert call(address, victim, victim) == [b"x"]
        for proved in (victim, None):
            with pytest.raises(grpc.RpcError) as refused:
                call(address, middle, proved)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_proof_that_names_a_certificate_says_nothing_without_tls() -> None:
    with serving(None) as address:
        with pytest.raises((grpc.RpcError, Unproven)):
            call(address, of_token(), of_token())


def test_what_a_probe_finds() -> None:
    with serving(of_token()) as secured, serving(None) as plain:
        assert probe(secured, of_token(), SECONDS) is None
        assert probe(plain, None, SECONDS) is None
        assert probe(secured, None, SECONDS) == "speaks TLS only; give all ranks and servers security=tls"
        assert probe(plain, of_token(), SECONDS) == "does not speak TLS; give all ranks and servers security=tls"
        other = probe(secured, of_token(OTHER_TOKEN), SECONDS)
        assert other is not None
        assert other.startswith("does not prove that it belongs to this job (certificate signature failure); set the same")
    with pytest.raises(OSError, match="refused"):
        probe(plain, None, SECONDS)


def test_a_probe_hears_that_the_server_refuses_this_certificate(tmp_path: Path) -> None:
    one, two = Authority(), Authority()
    mixed = two.write(tmp_path / "mixed")
    server = one.identity(tmp_path / "server")
    (mixed / "ca.crt").write_bytes(server.authority)  # so that this end trusts the server
    member = identity_of("tls", TOKEN, str(mixed))
    with serving(server) as address:
        said = probe(address, member, SECONDS)
        assert said is not None
        assert said.startswith("does not take this process for one of its job (")
