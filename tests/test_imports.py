"""What importing the package does, and what plugins use of it; import-linter and ruff hold the other rules (pyproject.toml)."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import commsched

PACKAGE = Path(commsched.__file__).parent

WATCH = """
import json, sys, threading
events = []
sys.addaudithook(lambda event, args: events.append(event) if event.split(".")[0] in ("socket", "subprocess") else None)
import commsched
print(json.dumps({"modules": list(sys.modules), "threads": [t.name for t in threading.enumerate()], "events": events}))
"""

HEAVY = {"grpc", "mpi4py", "torch", "tensorflow", "jax", "mxnet", "cupy", "numpy"}


@pytest.fixture(scope="module")
def after_import() -> dict[str, Any]:
    """What a new interpreter is like after ``import commsched``."""
    done = subprocess.run(
        [sys.executable, "-c", WATCH], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_importing_starts_no_thread_and_opens_no_socket(after_import: dict[str, Any]) -> None:
    assert after_import["threads"] == ["MainThread"]
    assert after_import["events"] == []


def test_importing_imports_no_engine_no_grpc_and_no_mpi(after_import: dict[str, Any]) -> None:
    modules = after_import["modules"]
    assert [name for name in modules if name.split(".")[0] in HEAVY or name.startswith("commsched.plugins")] == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "plugins").rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_plugins_use_public_names_of_the_package(path: Path) -> None:
    used = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "commsched"
    }
    assert used <= set(commsched.__all__)
