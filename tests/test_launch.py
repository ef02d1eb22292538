"""What ends processes, where that is not to be had from real ones."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path

import pytest

from commsched import guard, launch


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Signals that were sent. Process group 7 has gone, and 8 is another user's by now."""
    sent: list[tuple[int, int]] = []

    def killpg(process_group: int, number: int) -> None:
        if process_group in (7, 8):
            raise (ProcessLookupError if process_group == 7 else PermissionError)
        sent.append((process_group, number))

    monkeypatch.setattr(os, "killpg", killpg)
    return sent


def test_a_process_group_that_is_somebody_else_s_by_now_does_not_keep_the_others(signalled: list[tuple[int, int]]) -> None:
    for process_group in (7, 8, 9):
        launch._kill_group(process_group, signal.SIGTERM)
    assert signalled == [(9, signal.SIGTERM)]


def test_nor_does_it_when_the_launcher_was_killed(
    signalled: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guard, "KILL_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stdin", io.StringIO("7\n8\n9\n"))
    directory = tmp_path / "job"
    directory.mkdir()
    guard.main(str(directory))
    assert signalled == [(9, signal.SIGTERM), (9, signal.SIGKILL)]
    assert not directory.exists()
