"""Lines of ranks that are printed while their job runs."""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from bench.harness.progress import _relay, relayed_lines, say


def test_lines_of_another_process_are_printed_in_order(capfd):
    with relayed_lines() as path:
        say(path, "from here")
        subprocess.run(["sh", "-c", 'echo one > "$0"; echo two > "$0"', path], check=True, timeout=300)
    assert capfd.readouterr().out == "from here\none\ntwo\n"
    assert not Path(path).exists()


def test_nobody_says_anything(capfd):
    with relayed_lines():
        pass
    assert capfd.readouterr().out == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "commsched-bench-progress"]


def test_half_a_line_of_a_process_that_was_killed_is_printed_too(capfd):
    with relayed_lines() as path, open(path, "w") as pipe:
        pipe.write("pass 1 o")
        pipe.flush()
    assert capfd.readouterr().out == "pass 1 o\n"


def test_a_line_for_a_process_that_has_ended_is_dropped(tmp_path):
    path = tmp_path / "progress"
    os.mkfifo(path)
    saying = threading.Thread(target=say, args=(str(path), "to nobody"), daemon=True)
    saying.start()
    saying.join(300)
    assert not saying.is_alive()
    path.unlink()
    say(str(path), "to nobody")


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError("I/O operation on closed file")])
def test_ranks_do_not_wait_for_an_output_that_nobody_reads(monkeypatch, error):
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("builtins.print", refuse)
    lines = iter(["one\n", "two\n", "\0\n", "of the next job\n"])
    _relay(lines)
    assert list(lines) == ["of the next job\n"]
