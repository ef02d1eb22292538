"""The benchmarks as a wheel has them: in the package ``commsched``, so that they meet nobody else's ``bench``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the packages that ``pyproject.toml`` puts into the wheel."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    site = tmp_path_factory.mktemp("site")
    for source, target in [*((name, name) for name in wheel["packages"]), *wheel["force-include"].items()]:
        shutil.copytree(ROOT / source, site / target, ignore=shutil.ignore_patterns("__pycache__"))
    return site


def commsched(where: Path, installed: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "commsched", *argv]
    return subprocess.run(command, cwd=where, env=environ, capture_output=True, text=True, timeout=300, check=False)


def test_a_benchmark_with_ranks_runs_where_bench_is_another_package(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text("raise SystemExit('this is the bench of somebody else')")
    done = commsched(tmp_path, installed, "bench", "collectives", "--sizes", "4KB", "--repetitions", "1", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["wrong_elements"] for row in found["rows"]] == [0]
    assert found["environment"]["commit"] is None


def test_its_name_is_that_of_the_command(installed: Path, tmp_path: Path) -> None:
    done = commsched(tmp_path, installed, "bench", "rounds", "--slow-rank", "2")
    assert (done.returncode, done.stderr) == (1, "commsched bench rounds: slow-rank=2, but the ranks are 0 to 1\n")


def test_profiles_and_the_page_of_reports_are_in_it(installed: Path) -> None:
    bench = installed / "commsched" / "bench"
    assert (bench / "workloads" / "profiles" / "vgg16.json").exists()
    assert (bench / "report" / "page.html.jinja").exists()
