from __future__ import annotations

import subprocess
import sys

import pytest

from commsched.core import process_exit


def test_it_ends_the_process_with_the_code() -> None:
    script = "import atexit; from commsched.core import process_exit; atexit.register(process_exit.leave, 3)"
    assert subprocess.run([sys.executable, "-c", script], timeout=30, check=False).returncode == 3


def test_another_way_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_exit, "_leave", None)  # put back at the end
    left: list[int] = []
    process_exit.leave_by(left.append)
    process_exit.leave(1)
    assert left == [1]
