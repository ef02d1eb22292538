"""``python -m tests.gpu`` says what ran, and what the machine lacks. Its subprocesses are replaced here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as gpu

REPORT = """<testsuites><testsuite>
<testcase name="a"/>
<testcase name="b"><skipped message="needs two CUDA devices and NCCL"/></testcase>
{more}
</testsuite></testsuites>"""


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tests.gpu"])


def let_calls_be(monkeypatch: pytest.MonkeyPatch, check: tuple[int, str], more: str = "", tests: int = 0) -> list[list[str]]:
    """Let ``check_device`` end like ``check``, and each pytest with exit code ``tests`` and a report that has ``more``."""
    commands = []

    def call(command: list[str], timeout: float) -> tuple[int, str]:
        commands.append(command)
        if "pytest" not in command:
            return check
        [report] = [option.partition("=")[2] for option in command if option.startswith("--junitxml=")]
        Path(report).write_text(REPORT.format(more=more))
        return tests, "the output of pytest"

    monkeypatch.setattr(gpu, "call", call)
    return commands


def test_without_a_gpu_nothing_runs_and_it_says_so() -> None:
    """The whole command, on a machine where nvidia-smi finds nothing."""
    code = "import sys; from tests.gpu.__main__ import main; sys.exit(main([]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert "| check_device cuda:0 | not run | no GPU |\n" in done.stdout
    assert "| tests/plugins/torch/test_cuda.py | not run | no GPU |\n" in done.stdout
    assert "\nThis machine lacks a GPU: nvidia-smi shows none.\n" in done.stdout
    assert done.stdout.endswith("\nNothing ran on a GPU.\n")


def test_files_with_marked_tests_are_found() -> None:
    names = [str(path.relative_to(gpu.TESTS)) for path in gpu.marked_files()]
    assert "devices/backends/test_cuda.py" in names
    assert "transports/backends/nccl/test_device.py" in names
    assert "test_gpu.py" not in names


def test_a_table_and_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    commands = let_calls_be(monkeypatch, (0, f"something\n{json.dumps({'host to device': 25.123})}\n"))
    assert gpu.main(["NVIDIA A, 24 GiB, 580", "NVIDIA B, 24 GiB, 580"]) == 0
    out = capsys.readouterr().out
    assert "\ncuda:1: NVIDIA B, 24 GiB, 580\n" in out
    assert "\n| check_device cuda:1 | passed | 0 s; host to device 25.1 GB/s |\n" in out
    assert "\n| tests/devices/backends/test_cuda.py | passed | 1 passed, 1 skipped |\n" in out
    assert "\nLeft out of tests/plugins/torch/test_cuda.py: needs two CUDA devices and NCCL.\n" in out
    assert [command[-1] for command in commands[:2]] == ["cuda:0", "cuda:1"]


def test_a_failure_shows_its_output(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    let_calls_be(monkeypatch, (1, "AssertionError: wrong bytes"), "<testcase name='c'><failure message='no'/></testcase>", 1)
    assert gpu.main(["NVIDIA A, 24 GiB, 580"]) == 1
    out = capsys.readouterr().out
    assert "\n| check_device cuda:0 | FAILED | exit code 1 |\n" in out
    assert "\ncheck_device cuda:0:\nAssertionError: wrong bytes\n" in out
    assert "\n| tests/plugins/torch/test_cuda.py | FAILED | 1 passed, 1 failed, 1 skipped |\n" in out
    assert "\ntests/plugins/torch/test_cuda.py:\nthe output of pytest\n" in out


def test_a_gpu_without_cupy_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    let_calls_be(monkeypatch, (2, "a warning\nthe device 'cuda:0' needs cupy: pip install it\n"))
    assert gpu.main(["NVIDIA A, 24 GiB, 580"]) == 0
    out = capsys.readouterr().out
    assert "\n| check_device cuda:0 | not run | the device 'cuda:0' needs cupy: pip install it |\n" in out


def test_a_call_that_takes_too_long_is_ended() -> None:
    code, output = gpu.call([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], 2)
    assert (code, output) == (-1, "begun\n\nended after 2 s")
