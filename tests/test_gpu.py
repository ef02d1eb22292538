"""``python -m tests.gpu`` says what ran, and what the machine lacks. Its subprocesses are replaced here."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.workloads import load_profile
from commsched.simulator.profile import LayerProfile, Profile
from tests import warm
from tests.gpu import __main__ as gpu

REPORT = """<testsuites><testsuite>
<testcase name="a"/>
<testcase name="b"><skipped message="needs two CUDA devices and NCCL"/></testcase>
{more}
</testsuite></testsuites>"""


@pytest.fixture(autouse=True)
def _in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--profiles", str(tmp_path)])


def write_profile(path: Path) -> None:
    path.write_text(json.dumps(Profile("a model", (LayerProfile("a", ((3,),), 0.001, 0.002),), "made up").to_record()))


def let_calls_be(monkeypatch: pytest.MonkeyPatch, check: tuple[int, str], more: str = "", tests: int = 0) -> list[list[str]]:
    """Let ``check_device`` end like ``check``, and each pytest with exit code ``tests`` and a report that has ``more``."""
    commands = []

    def call(command: list[str], timeout: float, environ: dict[str, str] | None = None) -> tuple[int, str]:
        commands.append([*(f"{name}={value}" for name, value in (environ or {}).items()), *command])
        if "bench" in command:
            write_profile(Path(command[-1]))
            return 0, "what it measured"
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


def test_loops_run_on_the_gpu_and_layers_are_timed_there(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    commands = let_calls_be(monkeypatch, (0, json.dumps({"host to device": 25.123})))
    assert gpu.main(["NVIDIA A, 24 GiB, 580"]) == 0
    out = capsys.readouterr().out
    assert "\n| tests/plugins/torch/loops on cuda:0 | passed | 1 passed, 1 skipped |\n" in out
    on_gpu = [command[-1] for command in commands if command[0] == "LOOPS_ON=cuda:0"]
    assert on_gpu == [str(gpu.TESTS / path) for path in gpu.LOOPS]
    assert all(Path(path).exists() for path in on_gpu)
    said = f"| layers of bert-base | passed | forward 1.00 ms, backward 2.00 ms; {tmp_path / 'bert-base.json'} |\n"
    assert f"\n{said}" in out
    [command] = [command for command in commands if "gpt2-small" in command]
    assert command[command.index("--device") + 1] == "cuda"


@pytest.fixture
def _calls_have_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {**vars(subprocess), "run": partial(warm.run, imports=warm.TORCH)}
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(**started))


LOOP = gpu.TESTS / "plugins/torch/loops/test_ends.py"


@pytest.mark.usefixtures("_calls_have_imported")
def test_loops_take_the_device_of_the_environment() -> None:
    row = gpu.run_tests(LOOP, "loops", 300, {"LOOPS_ON": "simulated"})
    assert row.result == gpu.PASSED, row.output
    row = gpu.run_tests(LOOP, "loops", 300, {"LOOPS_ON": "cuda:0"})
    if torch.cuda.is_available():
        assert row.result == gpu.PASSED, row.output
    else:
        assert (row.result, row.left_out) == (gpu.NOT_RUN, ["needs a CUDA device, a PyTorch for it, and cupy"])


@pytest.mark.usefixtures("_calls_have_imported")
def test_layers_are_those_of_the_shipped_profile_with_other_times(tmp_path: Path) -> None:
    """On the processor, by the real command: its file may take the place of the shipped one."""
    out = tmp_path / "profiles" / "resnet50.json"
    row = gpu.profile("resnet50", "cpu", out, 300, "--batch", "1", "--steps", "1", "--warm-up", "1")
    assert row.result == gpu.PASSED, row.output
    measured, shipped = load_profile(str(out)), load_profile("resnet50")
    assert measured.source.startswith("measured on the processor")
    assert [(layer.name, layer.shapes) for layer in measured.layers] == [(layer.name, layer.shapes) for layer in shipped.layers]
    assert f"forward {1000 * measured.forward_seconds:.2f} ms" in row.detail


@pytest.mark.usefixtures("_calls_have_imported")
def test_a_torch_without_cuda_and_a_benchmark_that_fails_are_told(tmp_path: Path) -> None:
    row = gpu.profile("resnet50", "cuda", tmp_path / "x.json", 300)
    assert row.result == gpu.NOT_RUN
    assert row.detail.endswith("device=cuda, but torch finds no GPU it can use here")
    row = gpu.profile("resnet50", "cpu", tmp_path / "x.json", 300, "--steps", "0")
    assert (row.result, row.detail) == (gpu.FAILED, "exit code 2")
    assert "--steps" in row.output


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
