from __future__ import annotations

import subprocess
import sys

import pytest

from commsched.core import process_exit


def test_it_ends_the_process_with_the_code() -> None:
    script = "import atexit; from commsched.core import process_exit; atexit.register(process_exit.leave, 3)"
    assert subprocess.run([sys.executable, "-c", script], timeout=300, check=False).returncode == 3


def test_another_way_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_exit, "_leave", None)  # put back at the end
    left: list[int] = []
    process_exit.leave_by(left.append)
    process_exit.leave(1)
    assert left == [1]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("boom"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (SystemExit(0), 1),
        (SystemExit(None), 1),
        (SystemExit("no data"), 1),
    ],
)
def test_no_error_ends_a_process_as_if_all_were_well(error: BaseException, code: int) -> None:
    assert process_exit.code_of(error) == code


WATCHED = """
import atexit, sys, threading
from commsched.core import process_exit
process_exit.watch()
process_exit.watch()
atexit.register(lambda: print("at exit:", process_exit.error()))
thread = threading.Thread(target=sys.exit, args=(7,))  # ends the thread
thread.start()
thread.join()
try:
    sys.exit(2)
except SystemExit as caught:
    assert caught.code == 2
    caught.code = 6  # as of any SystemExit
    assert caught.code == 6
assert process_exit.error() is None
{}
"""


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("", 0, None),
        ("sys.exit()", 0, None),
        ("sys.exit(0)", 0, None),
        ("sys.exit(False)", 0, None),
        ("sys.exit(5)", 5, "exit code 5"),
        ("sys.exit('no data')", 1, "SystemExit: no data"),
        ("sys.exit('')", 1, "SystemExit"),
        ("def main():\n    sys.exit(3)\nmain()", 3, "exit code 3"),
        ("{}['key']", 1, "KeyError: 'key'"),
        ("raise SystemExit(4)", 4, None),  # not known
    ],
)
def test_an_exit_handler_knows_the_error_that_ends_the_process(end: str, code: int, error: str | None) -> None:
    """``sys.exit`` that was caught, or ended another thread, counts for nothing."""
    ended = subprocess.run([sys.executable, "-c", WATCHED.replace("{}", end, 1)], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (code, f"at exit: {error}\n"), ended.stderr
    assert "Exception in thread" not in ended.stderr
