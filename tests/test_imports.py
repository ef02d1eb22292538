"""The arrows of the design, and what the package must never do, held by reading its source."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import commsched

PACKAGE = Path(commsched.__file__).parent


class Source(NamedTuple):
    """``name`` is the dotted name of the module; relative imports start at ``package``."""

    name: str
    package: str
    tree: ast.Module

    @classmethod
    def of(cls, name: str, text: str, is_package: bool = False) -> Source:
        return cls(name, name if is_package else name.rpartition(".")[0], ast.parse(text))


@cache
def sources() -> dict[str, Source]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Source.of(name, path.read_text(encoding="utf-8"), is_package)
    return found


def imports(source: Source) -> set[str]:
    """Every module that ``source`` imports, wherever in it: at the top, in a function, for type checking only."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = source.package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            submodules = {f"{module}.{alias.name}" for alias in node.names} & sources().keys()
            named = {alias.name for alias in node.names}
            found |= submodules
            if len(submodules) < len(named):  # at least one name is the module's own
                found.add(module)
    return found


def within(module: str, *parents: str) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def modules_in(*parents: str) -> list[Source]:
    return [source for name, source in sources().items() if within(name, *parents)]


def not_allowed(source: Source, *, ours: tuple[str, ...], others: tuple[str, ...] = ()) -> list[str]:
    """What ``source`` imports apart from the standard library, these parts of commsched, and these other packages."""
    return sorted(
        module
        for module in imports(source)
        if not (within(module, *ours) if within(module, "commsched") else within(module, *sys.stdlib_module_names, *others))
    )


# --- the arrows ---


@pytest.mark.parametrize(
    ("part", "ours", "others"),
    [
        ("commsched.core", (), ()),
        ("commsched.version", (), ()),
        ("commsched.trace", ("commsched.core",), ("numpy",)),
        (
            "commsched.session",
            ("commsched.core", "commsched.control.listener", "commsched.session_listener", "commsched.trace"),
            (),
        ),
        ("commsched.session_listener", ("commsched.core",), ()),
        ("commsched.simulator", ("commsched.core",), ("numpy",)),
        ("commsched.tuner", ("commsched.core", "commsched.simulator", "commsched.version"), ("numpy", "skopt")),
        ("commsched.rpc", ("commsched.core",), ("grpc",)),
        ("commsched.control", ("commsched.core", "commsched.rpc", "commsched.version"), ("grpc",)),
        (
            "commsched.transports",
            ("commsched.core", "commsched.rpc", "commsched.version"),
            ("grpc", "mpi4py", "numpy", "torch"),
        ),
    ],
)
def test_each_part_imports_only_what_lies_below_it(part: str, ours: tuple[str, ...], others: tuple[str, ...]) -> None:
    wrong = {source.name: not_allowed(source, ours=(part, *ours), others=others) for source in modules_in(part)}
    assert {name: modules for name, modules in wrong.items() if modules} == {}


SHARED_BY_PLUGINS = ("commsched.plugins.beginning", "commsched.plugins.flat")

#: Plugins for what is built on PyTorch are built on its plugin.
BELOW_PLUGIN = {
    "commsched.plugins.accelerate": ("commsched.plugins.torch",),
    "commsched.plugins.lightning": ("commsched.plugins.torch",),
    "commsched.plugins.transformers": ("commsched.plugins.accelerate", "commsched.plugins.torch"),
}


def test_plugins_import_their_engine_core_and_the_public_names() -> None:
    public = set(commsched.__all__)
    for source in modules_in("commsched.plugins"):
        engine = ".".join(source.name.split(".")[:3])
        ours = ("commsched.core", engine, *SHARED_BY_PLUGINS, *BELOW_PLUGIN.get(engine, ()))
        wrong = [
            module
            for module in imports(source)
            if within(module, "commsched") and module != "commsched" and not within(module, *ours)
        ]
        assert wrong == [], source.name
        assert attributes_of(source, "commsched") <= public, source.name


def attributes_of(source: Source, name: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }


def importers_of(module: str) -> set[str]:
    return {name for name, source in sources().items() if module in imports(source)}


def test_nothing_but_the_top_imports_the_session_and_what_opens_it() -> None:
    """``check_plugin`` and ``check_transport`` stand above it: they open whole worlds."""
    checks = {"commsched.testing.check_plugin", "commsched.testing.checked_world"}
    assert importers_of("commsched.session") <= {
        "commsched",
        "commsched.local",
        "commsched.opening",
        "commsched.process_session",
        *checks,
    }
    assert importers_of("commsched.local") <= {"commsched.opening", *checks}
    assert importers_of("commsched.opening") <= {"commsched.cli", "commsched.process_session"}
    assert importers_of("commsched.process_session") == {"commsched"}


def test_modules_are_looked_up_by_name_only_where_a_name_is_a_setting() -> None:
    dynamic = {
        name
        for name, source in sources().items()
        if {call for call, _ in calls(source)} & {"importlib.import_module", "importlib.__import__", "__import__"}
    }
    assert dynamic <= {"commsched.core.policies", "commsched.transports.opening", "commsched.tuner.searchers", "commsched.cli"}


# --- the environment ---


def reads_environment(source: Source) -> bool:
    wanted = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os" and wanted & {alias.name for alias in node.names}:
            return True
        if isinstance(node, ast.Attribute) and node.attr in wanted and resolve(node, aliases(source)).startswith("os."):
            return True
    return False


@pytest.mark.parametrize("name", sorted(sources().keys() - {"commsched.opening", "commsched.process_session", "commsched.cli"}))
def test_only_the_composition_root_reads_the_environment(name: str) -> None:
    assert not reads_environment(sources()[name])


def test_a_reading_of_the_environment_is_seen() -> None:
    for text in (
        "import os\nos.environ['A']",
        "import os as o\ndef f():\n return o.getenv('A')",
        "from os import environ as e",
    ):
        assert reads_environment(Source.of("commsched.x", text))
    assert not reads_environment(Source.of("commsched.x", "def f(environ): return environ['A']"))


# --- what would run what others send ---

FORBIDDEN_MODULES = ("pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "codeop")
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "builtins.eval",
    "builtins.exec",
    "builtins.compile",
    "torch.load",
    "torch.jit.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
}


def aliases(source: Source) -> dict[str, str]:
    """What each imported name stands for."""
    names = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names |= {alias.asname: alias.name} if alias.asname else {top: top}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def resolve(node: ast.expr, names: dict[str, str]) -> str:
    """``torch.load`` for ``t.load`` after ``import torch as t``; empty for what is no dotted name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (value := resolve(node.value, names)):
        return f"{value}.{node.attr}"
    return ""


def calls(source: Source) -> Iterator[tuple[str, ast.Call]]:
    names = aliases(source)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and (called := resolve(node.func, names)):
            yield called, node


def dangers(source: Source) -> list[str]:
    found = [module for module in imports(source) if within(module, *FORBIDDEN_MODULES)]
    for called, node in calls(source):
        allows_pickle = any(
            keyword.arg == "allow_pickle" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
            for keyword in node.keywords
        )
        if called in FORBIDDEN_CALLS or allows_pickle:
            found.append(called)
    return sorted(found)


def test_nothing_in_the_package_can_run_what_others_send() -> None:
    assert {name: found for name, source in sources().items() if (found := dangers(source))} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pickle", ["pickle"]),
        ("def f():\n from pickle import loads", ["pickle"]),
        ("import marshal as m", ["marshal"]),
        ("eval('1')", ["eval"]),
        ("import torch as t\nt.load(f)", ["torch.load"]),
        ("from torch import load as l\nl(f)", ["torch.load"]),
        ("import yaml\nyaml.load(f)", ["yaml.load"]),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", ["numpy.load"]),
        ("import numpy as np\nnp.load(f, allow_pickle=False)", []),
        ("import re\nre.compile('x')", []),
        ("model.eval()", []),
        ("import json\njson.load(f)", []),
    ],
)
def test_a_danger_is_seen(text: str, found: list[str]) -> None:
    assert dangers(Source.of("commsched.x", text)) == found


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("commsched.core.x", "from .task import CommTask", {"commsched.core.task"}),
        ("commsched.core.x", "from . import task", {"commsched.core.task"}),
        ("commsched.core.x", "from .. import session", {"commsched.session"}),
        ("commsched.core.x", "from .. import init", {"commsched"}),
        ("commsched.core.x", "def f():\n from ..session import init", {"commsched.session"}),
        ("commsched.core.x", "from commsched import session, init", {"commsched", "commsched.session"}),
        ("commsched.core.policies.x", "from ...session import init", {"commsched.session"}),
        ("commsched.core.x", "import numpy.linalg", {"numpy.linalg"}),
    ],
)
def test_an_import_is_seen_as_what_it_is(name: str, text: str, found: set[str]) -> None:
    assert imports(Source.of(name, text)) == found


# --- what importing does ---

WATCH = """
import json, sys, threading
events = []
sys.addaudithook(lambda event, args: events.append(event) if event.split(".")[0] in ("socket", "subprocess") else None)
import commsched
print(json.dumps({"modules": list(sys.modules), "threads": [t.name for t in threading.enumerate()], "events": events}))
"""


@pytest.fixture(scope="module")
def after_import() -> dict[str, Any]:
    """What a new interpreter is like after ``import commsched``."""
    done = subprocess.run(
        [sys.executable, "-c", WATCH], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_importing_starts_no_thread_and_opens_no_socket(after_import: dict[str, Any]) -> None:
    assert after_import["threads"] == ["MainThread"]
    assert after_import["events"] == []


def test_importing_imports_no_engine_no_grpc_and_no_mpi(after_import: dict[str, Any]) -> None:
    heavy = ("grpc", "mpi4py", "torch", "tensorflow", "jax", "mxnet", "cupy", "numpy", "commsched.plugins")
    assert [module for module in after_import["modules"] if within(module, *heavy)] == []
