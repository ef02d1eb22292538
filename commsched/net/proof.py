"""Mutual proof of the job's token by the two ends of a connection: challenge and response by HMAC-SHA256 (RFC 2104) over a
nonce of each end. In a connection over TLS (``tls.py``) the proofs also name the certificate of the end that connects.

The token is never sent, an old proof proves nothing, and one end's proof is no answer to the other's challenge. Both ends also
prove the name of their job. The process that a member connects to does receive the member's proof. With it, that process can
test guesses of a weak token. It can also relay the proof and pass for the member, unless the proof names a certificate.
"""

from __future__ import annotations

import hmac
import secrets

NONCE_BYTES = 32
PROOF_BYTES = 32


def make_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def prove(token: str, role: bytes, challenge: bytes, nonce: bytes, job: str, certificate: bytes = b"") -> bytes:
    """A proof that its maker knows ``token``, has ``role`` in this conversation, and belongs to ``job``.

    ``challenge`` is the nonce of the listening end, and ``nonce`` is the nonce of the connecting end. ``certificate`` is the
    digest of the connecting end's certificate, with TLS.
    """
    parts = [b"commsched", role, challenge, nonce, job.encode()]
    if certificate:
        parts.append(certificate)
    said = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(token.encode(), said, "sha256")


def is_proof(shown: bytes, token: str, role: bytes, challenge: bytes, nonce: bytes, job: str, certificate: bytes = b"") -> bool:
    """Whether ``shown`` is the proof that :func:`prove` makes. The time does not depend on how much of it is right."""
    return hmac.compare_digest(shown, prove(token, role, challenge, nonce, job, certificate))
