"""``python -m tests.gpu``: run everything that needs a GPU on the GPUs of this machine, and print a table of what ran.

These are ``check_device`` with the speed of copies, the tests that need a GPU, those of PyTorch's loops with their models on
the first GPU, and the times of the layers of some models, written as profiles for ``--model`` of the benchmarks. It uses the
packages that are installed and fetches nothing. Exit code 0: all that ran is right. 1: something failed. 2: nothing ran. The
last lines say what this machine lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from commsched.simulator.profile import read_profile

TESTS = Path(__file__).parent.parent

#: What the tests use, by the names under which they are imported.
PACKAGES = ("numpy", "grpc", "xxhash", "cupy", "torch", "jax", "optax", "pytest", "pytest_timeout", "hypothesis")

#: Tests of PyTorch's loops on the CPU, which ``LOOPS_ON`` puts on a GPU (``tests/plugins/torch/where.py``).
LOOPS = ("plugins/torch/test_equality.py", "plugins/torch/test_accumulation.py", "plugins/torch/loops")

#: Models whose layers are timed.
PROFILED = ("resnet50", "bert-base", "gpt2-small")

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


@dataclass
class Row:
    """A line of the table. ``left_out``: why tests did not run. ``output``: what a failure printed."""

    what: str
    result: str
    detail: str = ""
    left_out: list[str] = field(default_factory=list)
    output: str = ""


def main(gpus: list[str] | None = None) -> int:
    """Run it. ``gpus``: the names of the GPUs, in the order of their numbers; None asks the system."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each line of the table")
    parser.add_argument("--profiles", type=Path, default=Path("runs/profiles"), help="where profiles go (default: %(default)s)")
    args = parser.parse_args()
    gpus = find_gpus() if gpus is None else gpus
    versions = find_versions()
    print(f"Python {platform.python_version()}; {', '.join(f'{name} {version}' for name, version in versions.items())}")
    for number, name in enumerate(gpus):
        print(f"cuda:{number}: {name}")
    rows, lacks = [], [] if gpus else ["a GPU: nvidia-smi shows none"]
    lacks += [f"{name}, which is not installed" for name in PACKAGES if name not in versions]
    print("\n| what | result | |\n|---|---|---|", flush=True)
    for row in run(gpus, versions, args.timeout, args.profiles):
        print(f"| {row.what} | {row.result} | {row.detail} |", flush=True)
        rows.append(row)
    for row in rows:
        if row.output:
            print(f"\n{row.what}:\n{row.output}")
    print()
    for what in lacks:
        print(f"This machine lacks {what}.")
    for row in rows:
        for reason in row.left_out:
            print(f"Left out of {row.what}: {reason}.")
    results = {row.result for row in rows}
    if FAILED in results:
        return 1
    if PASSED in results:
        return 0
    print("Nothing ran on a GPU.")
    return 2


def run(gpus: list[str], versions: dict[str, str], timeout: float, profiles: Path) -> Iterator[Row]:
    names = [f"cuda:{number}" for number in range(len(gpus))]
    for name in names or ["cuda:0"]:
        yield check(name, timeout) if names else Row(f"check_device {name}", NOT_RUN, "no GPU")
    tests: list[tuple[Path, str, dict[str, str]]] = [(path, _name(path), {}) for path in marked_files()]
    tests += [(TESTS / path, f"{_name(TESTS / path)} on cuda:0", {"LOOPS_ON": "cuda:0"}) for path in LOOPS]
    for path, what, environ in tests:
        if missing := lacking(gpus, versions, ["pytest", "torch"] if environ else ["pytest"]):
            yield Row(what, NOT_RUN, missing)
        else:
            yield run_tests(path, what, timeout, environ)
    for model in PROFILED:
        if missing := lacking(gpus, versions, ["torch"]):
            yield Row(f"layers of {model}", NOT_RUN, missing)
        else:
            yield profile(model, "cuda", profiles / f"{model}.json", timeout)


def _name(path: Path) -> str:
    return str(path.relative_to(TESTS.parent))


def lacking(gpus: list[str], versions: dict[str, str], packages: list[str]) -> str:
    """Return the name of something that is missing to run it, or an empty string."""
    return "no GPU" if not gpus else next((f"no {package}" for package in packages if package not in versions), "")


def check(name: str, timeout: float) -> Row:
    """Run ``check_device`` and measure copies, in another process: a GPU that has failed is of no more use to its process."""
    what = f"check_device {name}"
    begin = time.monotonic()
    code, output = call([sys.executable, "-m", "tests.gpu.device", name], timeout)
    lines = output.strip().splitlines()
    if code == 2:
        return Row(what, NOT_RUN, lines[-1])
    if code != 0:
        return Row(what, FAILED, f"exit code {code}", output=output)
    rates = ", ".join(f"{key} {value:.3g} GB/s" for key, value in json.loads(lines[-1]).items())
    return Row(what, PASSED, f"{time.monotonic() - begin:.0f} s; {rates}")


def profile(model: str, device: str, out: Path, timeout: float, *options: str) -> Row:
    """Time the layers of ``model`` at full size on ``device``, and write the profile to ``out``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "bench", "profile", "--model", model, "--device", device, "--out", str(out.resolve())]
    what = f"layers of {model}"
    code, output = call([*command, *options], timeout)
    if code == 1 and "torch finds no GPU" in output:
        return Row(what, NOT_RUN, output.strip().splitlines()[-1])
    if code != 0:
        return Row(what, FAILED, f"exit code {code}", output=output)
    measured = read_profile(out)
    times = f"forward {1000 * measured.forward_seconds:.2f} ms, backward {1000 * measured.backward_seconds:.2f} ms"
    return Row(what, PASSED, f"{times}; {out}")


def run_tests(path: Path, what: str, timeout: float, environ: dict[str, str]) -> Row:
    """Run the tests of a file or folder, with ``environ`` in the environment. They may use other versions of packages than
    ``constraints-dev.txt``, which may warn."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        options = ["-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", *options, f"--junitxml={report}", str(path)]
        code, output = call(command, timeout, environ)
        if not report.exists():
            return Row(what, FAILED, f"exit code {code}", output=output)
        cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = [case.find("skipped") for case in cases if case.find("skipped") is not None]
    reasons = sorted({(each.get("message") or "").strip() for each in skipped if each is not None})
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    passed = len(cases) - len(skipped) - failed
    counts = {"passed": passed, "failed": failed, "skipped": len(skipped)}
    detail = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    if failed or code not in (0, 5):
        return Row(what, FAILED, detail or f"exit code {code}", output=output)
    return Row(what, PASSED if passed else NOT_RUN, detail, reasons)


def call(command: list[str], timeout: float, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a command in the root of the repository, with ``environ`` in its environment. Return its exit code and output; -1 is
    for one that took too long."""
    try:
        done = subprocess.run(
            command,
            cwd=TESTS.parent,
            env={**os.environ, **(environ or {})},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return -1, f"{output.decode(errors='replace') if isinstance(output, bytes) else output}\nended after {timeout:g} s"
    return done.returncode, done.stdout


def marked_files() -> list[Path]:
    """The files with tests that carry the mark ``gpu``."""
    return sorted(path for path in TESTS.rglob("test_*.py") if "pytest.mark.gpu" in path.read_text())


def find_gpus() -> list[str]:
    """Name, memory and driver of each GPU."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def find_versions() -> dict[str, str]:
    """The installed versions of ``PACKAGES``. Imports none."""
    distributions = metadata.packages_distributions()
    return {name: metadata.version(distributions[name][0]) for name in PACKAGES if name in distributions}


if __name__ == "__main__":
    sys.exit(main())
