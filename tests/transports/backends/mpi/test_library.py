"""When the end of a process ends the job; the whole of it is in ``test_jobs``."""

from __future__ import annotations

import atexit
import sys
from types import SimpleNamespace

import pytest

from commsched.core import process_exit, timeouts
from commsched.transports.backends.mpi import library


@pytest.mark.parametrize(
    ("left_behind", "failed", "raised", "aborts"),
    [
        (False, False, False, False),
        (False, False, True, False),  # after the session has ended well
        (False, True, False, False),  # caught, and the program went on without MPI
        (False, True, True, True),
        (True, False, False, True),
        (True, True, False, True),
    ],
)
def test_it_aborts_only_where_others_would_wait(
    left_behind: bool, failed: bool, raised: bool, aborts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[int] = []
    monkeypatch.setattr(timeouts, "MPI_ABORT_SECONDS", 0.0)
    monkeypatch.setattr(atexit, "register", lambda callback: None)
    monkeypatch.setattr(process_exit, "leave_by", lambda way: None)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    if raised:
        monkeypatch.setattr(sys, "last_value", ValueError("no more data"), raising=False)
    else:
        monkeypatch.delattr(sys, "last_value", raising=False)
    MPI = SimpleNamespace(Is_finalized=lambda: False, COMM_WORLD=SimpleNamespace(Abort=aborted.append))
    end = library.AbortAtExit(MPI)
    if failed:
        end.fail()
    if left_behind:
        end.arm()
    end._end()
    assert aborted == ([1] if aborts else [])
