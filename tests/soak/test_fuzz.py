"""A short round of the soak's fuzzing, so that what reads bytes from outside is tried with every change."""

from __future__ import annotations

import argparse

import pytest

from tests.soak import fuzz


def test_whatever_comes_from_outside_is_refused_by_errors_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    holds = fuzz.run(argparse.Namespace(inputs=300, seed=1))
    assert holds, capsys.readouterr().out
