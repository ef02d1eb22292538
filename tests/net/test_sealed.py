"""What is sealed for one key opens with that key only, and the group is the one that is published."""

from __future__ import annotations

import secrets

import pytest

from commsched.net import sealed
from commsched.net.sealed import SECRET_BYTES, OneTimeKey

SECRET = secrets.token_bytes(SECRET_BYTES)


def test_the_group_is_that_of_rfc_3526() -> None:
    """2^2048 - 2^1984 - 1 + 2^64 * ([2^1918 pi] + 124476), a safe prime."""

    def arctan_of_inverse(x: int, one: int) -> int:
        term = total = one // x
        for n in range(1, 4000):
            term //= -x * x
            total += term // (2 * n + 1)
        return total

    one = 2**2100
    pi = 16 * arctan_of_inverse(5, one) - 4 * arctan_of_inverse(239, one)
    prime = sealed._PRIME
    assert prime == 2**2048 - 2**1984 - 1 + 2**64 * ((pi >> 2100 - 1918) + 124476)
    for p in (prime, (prime - 1) // 2):
        assert pow(3, p - 1, p) == 1


def test_the_other_end_opens_it() -> None:
    mine, theirs = OneTimeKey(), OneTimeKey()
    letter = mine.seal(SECRET, theirs.public, "rank 1")
    assert theirs.open(letter, mine.public, "rank 1") == SECRET
    assert SECRET not in letter


def test_nobody_else_does() -> None:
    mine, theirs, stranger = OneTimeKey(), OneTimeKey(), OneTimeKey()
    letter = mine.seal(SECRET, theirs.public, "rank 1")
    for key, public, about, read in [
        (stranger, mine.public, "rank 1", letter),
        (stranger, theirs.public, "rank 1", letter),
        (theirs, stranger.public, "rank 1", letter),
        (theirs, mine.public, "rank 2", letter),
        (theirs, mine.public, "rank 1", letter[:-1] + bytes([letter[-1] ^ 1])),
        (theirs, mine.public, "rank 1", bytes([letter[0] ^ 1]) + letter[1:]),
        (theirs, mine.public, "rank 1", b""),
    ]:
        with pytest.raises(ValueError, match="it was not sealed for this key"):
            key.open(read, public, about)


@pytest.mark.parametrize("public", [-1, 0, 1, sealed._PRIME - 1, sealed._PRIME, 2 * sealed._PRIME + 2])
def test_a_key_whose_result_everybody_knows_is_refused(public: int) -> None:
    with pytest.raises(ValueError, match="no public key"):
        OneTimeKey().seal(SECRET, public, "")


def test_a_secret_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a secret has 32 bytes, not 5"):
        OneTimeKey().seal(b"short", OneTimeKey().public, "")
