"""The script of docs/jax.md runs, with one rank."""

from __future__ import annotations

import pytest

import commsched
from tests.code_blocks import python_of


def test_the_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMSCHED_LOG", "warning")
    try:
        exec(python_of("jax.md", "# line 3").replace("range(300)", "range(3)"), {})
    finally:
        commsched.shutdown()
    assert capsys.readouterr().out.startswith("rank 0 loss 0.")
