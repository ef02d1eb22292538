"""What a process that ends tells its launcher."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from pathlib import Path

import pytest

from commsched.core.errors import ConfigError, ManifestMismatch, PeerLost, RanksDiverged
from commsched.session.process_end import is_consequence, let_the_cause_end_first, record, shorten


def test_what_came_of_another_process_s_end_is_a_consequence_however_it_was_raised() -> None:
    lost = PeerLost("rank 1 is gone", rank=1)
    caused, within = RuntimeError("by the engine"), KeyError("in a finally")
    caused.__cause__, within.__context__ = lost, caused
    assert all(map(is_consequence, (lost, caused, within)))
    assert not any(map(is_consequence, (None, ValueError("boom"), ConfigError("a setting"))))


def test_errors_that_refer_to_each_other_are_looked_at_once() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    assert not is_consequence(one)


def test_the_record_for_torchrun_is_whole_and_replaces_none(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    record(ValueError("boom"), {})  # another launcher
    record(ValueError("boom"), {"TORCHELASTIC_ERROR_FILE": str(file)})
    written = json.loads(file.read_text())["message"]
    assert written["message"] == "ValueError: boom"
    assert "ValueError: boom" in written["extraInfo"]["py_callstack"]
    record(KeyError("later"), {"TORCHELASTIC_ERROR_FILE": str(file)})
    assert json.loads(file.read_text())["message"] == written
    assert [each.name for each in tmp_path.iterdir()] == ["error.json"]
    record(ValueError("boom"), {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "no directory" / "error.json")})


def test_where_the_disk_is_full_no_half_of_the_record_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full_disk)
    record(ValueError("boom"), {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
    assert list(tmp_path.iterdir()) == []


def test_who_ends_as_a_consequence_says_so_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    told = tmp_path / "told"
    let_the_cause_end_first({})
    let_the_cause_end_first({"COMMSCHED_LAUNCHER_FILE": str(told), "COMMSCHED_RANK": "3"})
    assert told.read_text() == "heard 3\n"
    assert waited == [1.0, 1.0]


def hooked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, rank: int = 1) -> str:
    """What is printed of ``error`` on ``rank``."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    shorten(rank)
    try:
        raise error
    except BaseException as raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RanksDiverged("weights differ"), "RanksDiverged: weights differ"),
        (ManifestMismatch("tensor 0 is ..."), "ManifestMismatch: tensor 0 is ..."),
        (PeerLost("rank 0 is gone", rank=0), "PeerLost: rank 0 is gone"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_what_every_rank_raises_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
    line: str,
) -> None:
    [said] = hooked(monkeypatch, capsys, error).splitlines()
    assert said.startswith(f"commsched: rank 1: {line} (at {__file__}:")
    assert said.endswith("; COMMSCHED_LOG=debug shows all)")
    with caplog.at_level(logging.DEBUG, logger="commsched"):
        assert "Traceback" in hooked(monkeypatch, capsys, error)


@pytest.mark.parametrize("error", [ValueError("boom"), ConfigError("a setting"), PeerLost("this rank", rank=1)])
def test_this_rank_s_own_error_has_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    assert "Traceback" in hooked(monkeypatch, capsys, error)
