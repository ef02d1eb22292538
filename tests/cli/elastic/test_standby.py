"""A script that a process on standby runs finds itself as if Python had started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commsched.cli.elastic import standby

SCRIPT = """
import json, os, sys
import fractions, beside, inside.deep
from xml import dom

class Mine:
    pass

if __name__ == "__main__":
    import multiprocessing
    main = sys.modules["__main__"]
    told = [sys.argv, __file__, main.__file__, main.Mine is Mine, Mine.__module__, os.environ.get("RANK"), sys.path[0]]
    print(json.dumps([*told, sorted(name for name in globals() if name not in ("told", "main", "__builtins__", "__loader__"))]))
    print(beside.RANK, inside.deep.RANK, flush=True)
    raise SystemExit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "inside").mkdir()
    for name in ("beside.py", "inside/__init__.py", "inside/deep.py"):
        (tmp_path / name).write_text("import os\nRANK = os.environ.get('RANK')\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run_on_standby(script: Path, line: bytes, *arguments: str) -> subprocess.CompletedProcess[str]:
    reading, writing = os.pipe()
    os.write(writing, line)
    os.close(writing)
    command = [sys.executable, standby.__file__, str(reading), script.name, *arguments]
    environ = {name: value for name, value in os.environ.items() if name != "RANK"}
    ended = subprocess.run(
        command, pass_fds=[reading], cwd=script.parent, env=environ, capture_output=True, text=True, timeout=60
    )
    os.close(reading)
    return ended


def test_a_script_runs_as_by_python(script: Path) -> None:
    command = [sys.executable, script.name, "--lr", "1"]
    plain = subprocess.run(
        command, cwd=script.parent, env={**os.environ, "RANK": "7"}, capture_output=True, text=True, timeout=60
    )
    found = run_on_standby(script, json.dumps({"RANK": "7"}).encode() + b"\n", "--lr", "1")
    assert plain.returncode == 3
    assert (found.returncode, found.stdout, found.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert found.stdout.splitlines()[1] == "7 7"


def test_it_ends_without_a_word_if_the_launcher_does(script: Path) -> None:
    found = run_on_standby(script, b"")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_modules_beside_the_script_are_left_to_it(script: Path) -> None:
    assert standby.modules_of(str(script)) == ["json", "os", "sys", "fractions", "xml"]


def test_a_script_that_is_wrong_says_so_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import no_such_module\n")
    found = run_on_standby(script, b"{}\n")
    assert found.returncode == 1
    assert found.stderr.endswith("ModuleNotFoundError: No module named 'no_such_module'\n")
    script.write_text("import (\n")
    found = run_on_standby(script, b"{}\n")
    assert found.returncode == 1
    assert "SyntaxError" in found.stderr
