"""A secret for one process over a channel that others can read: a Diffie-Hellman key exchange (RFC 2631) in the group of 2048
bits of RFC 3526, whose result masks a secret of 32 bytes, with a proof of it by HMAC-SHA256.

Whoever only reads the channel learns nothing. Whoever may also write to it can pose as one of the two ends.
"""

from __future__ import annotations

import hmac
import secrets

_PRIME = int(
    "ffffffffffffffffc90fdaa22168c234c4c6628b80dc1cd129024e088a67cc74020bbea63b139b22514a08798e3404ddef9519b"
    "3cd3a431b302b0a6df25f14374fe1356d6d51c245e485b576625e7ec6f44c42e9a637ed6b0bff5cb6f406b7edee386bfb5a899f"
    "a5ae9f24117c4b1fe649286651ece45b3dc2007cb8a163bf0598da48361c55d39a69163fa8fd24cf5f83655d23dca3ad961c62f"
    "356208552bb9ed529077096966d670c354e4abc9804f1746c08ca18217c32905e462e36ce3be39e772c180e86039b2783a2ec07"
    "a28fb5c55df06f4c52c9de2bcbf6955817183995497cea956ae515d2261898fa051015728e5a8aacaa68ffffffffffffffff",
    16,
)
_GENERATOR = 2
_EXPONENT_BITS = 256
#: Bytes of a secret that can be sealed.
SECRET_BYTES = 32


class OneTimeKey:
    """One end's key for one exchange. ``public`` is for the other end, and for everybody."""

    def __init__(self) -> None:
        self._exponent = secrets.randbits(_EXPONENT_BITS) | 1 << (_EXPONENT_BITS - 1)
        self.public = pow(_GENERATOR, self._exponent, _PRIME)

    def seal(self, secret: bytes, their_public: int, about: str) -> bytes:
        """``secret`` for the end that made ``their_public``. It opens only with the same ``about``.

        Raises:
            ValueError: ``their_public`` is no key, or the secret has not ``SECRET_BYTES`` bytes.
        """
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
        shared = self._shared(their_public)
        masked = _xor(secret, _derive(shared, b"mask", about))
        return masked + hmac.digest(_derive(shared, b"proof", about), masked, "sha256")

    def open(self, sealed: bytes, their_public: int, about: str) -> bytes:
        """The secret that the end with ``their_public`` sealed for this end.

        Raises:
            ValueError: ``sealed`` was not made for this key by the maker of ``their_public``, or about something else.
        """
        shared = self._shared(their_public)
        masked, proof = sealed[:SECRET_BYTES], sealed[SECRET_BYTES:]
        if not hmac.compare_digest(proof, hmac.digest(_derive(shared, b"proof", about), masked, "sha256")):
            raise ValueError("it was not sealed for this key")
        return _xor(masked, _derive(shared, b"mask", about))

    def _shared(self, their_public: int) -> bytes:
        if not 1 < their_public < _PRIME - 1:  # the others of 0 to _PRIME - 1 give a result that everybody knows
            raise ValueError("this is no public key")
        return pow(their_public, self._exponent, _PRIME).to_bytes(_PRIME.bit_length() // 8)


def _derive(shared: bytes, purpose: bytes, about: str) -> bytes:
    return hmac.digest(shared, b"commsched " + purpose + b"\0" + about.encode(), "sha256")


def _xor(a: bytes, b: bytes) -> bytes:
    return bytes(x ^ y for x, y in zip(a, b, strict=True))
