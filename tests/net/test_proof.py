from __future__ import annotations

from typing import Any

import pytest

from commsched.net.proof import is_proof, make_nonce, prove

SAID: dict[str, Any] = {"token": "secret", "role": b"worker", "challenge": b"c" * 32, "nonce": b"n" * 32, "job": "a"}


@pytest.mark.parametrize(
    "change",
    [
        {"token": "another"},
        {"role": b"server"},
        {"challenge": b"d" * 32},
        {"nonce": b"m" * 32},
        {"job": "b"},
        {"role": b"workerc", "challenge": b"c" * 31},  # the same bytes, one after another
        {"nonce": b"n" * 31, "job": "na"},
    ],
)
def test_a_proof_is_one_of_exactly_what_was_said(change: dict[str, Any]) -> None:
    proof = prove(**SAID)
    assert is_proof(proof, **SAID)
    assert not is_proof(proof, **{**SAID, **change})


def test_no_nonce_comes_twice() -> None:
    nonces = {make_nonce() for _ in range(1000)}
    assert (len(nonces), {len(nonce) for nonce in nonces}) == (1000, {32})
