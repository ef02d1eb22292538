"""Lines of ranks that are printed while their job runs."""

import subprocess
import threading
from pathlib import Path

from bench.harness.progress import relayed_lines, say


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
