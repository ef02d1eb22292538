"""The pages name what exists: modules, files, commands, options and settings."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.__main__ import COMMANDS
from commsched.cli.main import main
from commsched.core.policies import policy_names
from commsched.settings import NOT_SETTINGS, Settings
from commsched.transports import load_backend, transport_names
from tests.soak.__main__ import WHAT

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
IN_REPOSITORY = ("bench", "commsched", "docs", "environments", "examples", "tests", ".ci")

#: Files that a reader of the pages makes: training scripts and results.
MADE_BY_READERS = {
    "train.py",
    "stats.json",
    "results/tables.md",
    "trace.json",
    "traces/trace.json",
    "figures/regret.svg",
    "docs/<engine>.md",
    "runs/site",
    "runs/profiles",
}
PATH = re.compile(r"(\./)?[\w.-]+(/[\w.-]+)+/?|[\w-]+\.(py|md|json)")


def repository_paths() -> list[str]:
    found = [path.name for path in ROOT.iterdir()]
    for top in IN_REPOSITORY:
        found += [str(path.relative_to(ROOT)) for path in (ROOT / top).rglob("*") if "__pycache__" not in path.parts]
    return found


PATHS = repository_paths()
ENDS = {"/".join(path.split("/")[i:]) for path in PATHS for i in range(path.count("/") + 1)}


def quoted(page: Path) -> Iterator[str]:
    """What the page quotes in backticks on one line, outside of code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return (found.group(1) for found in re.finditer(r"`([^`\n]+)`", text))


def defined_in(module: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def is_there(dotted: str) -> bool:
    """Whether a module of this dotted name exists, or a module that has its last part as a name."""
    path = ROOT / dotted.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    parent = path.parent
    module = parent / "__init__.py" if parent.is_dir() else parent.with_suffix(".py")
    return module.exists() and path.name in defined_in(module)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_exist(page: Path) -> None:
    dotted = set(re.findall(r"\bcommsched(?:\.[A-Za-z_]\w*)+", page.read_text()))
    assert sorted(name for name in dotted if not is_there(name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    named = {name.rstrip("/") for name in quoted(page) if PATH.fullmatch(name)} - MADE_BY_READERS
    assert sorted(name for name in named if not {name, f"{name}.py"} & ENDS) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_benchmarks_exist(page: Path) -> None:
    named = re.findall(r"(?:python -m bench|`bench) ([a-z][\w-]*)", page.read_text().replace("\n", " "))
    assert sorted(set(named) - COMMANDS.keys()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_exist(page: Path) -> None:
    variables = set(re.findall(r"\bCOMMSCHED_[A-Z_]*[A-Z]\b", page.read_text()))
    known = {f"COMMSCHED_{name.upper()}" for name in Settings.__dataclass_fields__} | NOT_SETTINGS
    assert sorted(variables - known) == []


@pytest.mark.parametrize("command", ["run", "tune", "server"])
def test_options_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    known = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
    named = set()
    for page in PAGES:
        for line in re.findall(rf"commsched {command} ([^`\n]*)", page.read_text()):
            named |= set(re.findall(r"--[a-z][\w-]*", re.split(r" -- | # ", line)[0]))
    assert sorted(named - known) == []


def test_every_setting_has_a_row() -> None:
    set_by_commsched = {"tune_end", "record", "launcher_file", "tuned", "given"}
    named = set(quoted(ROOT / "docs" / "settings.md"))
    assert sorted(Settings.__dataclass_fields__.keys() - set_by_commsched - named) == []


def row_of(setting: str) -> str:
    [row] = re.findall(rf"^\| [^|]*`{setting}`[^|]* \|.*", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    return row


def test_every_policy_is_in_the_row_of_policies() -> None:
    assert [name for name in policy_names() if f"`{name}`" not in row_of("policy")] == []


@pytest.mark.parametrize("name", sorted(set(transport_names()) - {"local"}))
def test_every_transport_has_a_row_and_is_in_those_of_its_settings(name: str) -> None:
    assert f"\n| `{name}` | " in (ROOT / "docs" / "transports.md").read_text()
    used = {"transport", *load_backend(name).settings}
    assert sorted(setting for setting in used if f"`{name}`" not in row_of(setting)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_soak_tests_exist(page: Path) -> None:
    named = re.findall(r"python -m tests\.soak ([a-z]+)", page.read_text().replace("\n", " "))
    assert sorted(set(named) - WHAT.keys()) == []


def test_every_extra_is_explained() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`([\w-]+)`", row)) == sorted(extras)


@pytest.mark.parametrize(
    "module", ["commsched", *(f"commsched.plugins.{name}" for name in ("torch", "tensorflow", "jax", "mxnet"))]
)
def test_the_reference_has_every_public_name(module: str) -> None:
    tree = ast.parse((ROOT / module.replace(".", "/") / "__init__.py").read_text())
    [public] = [
        ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and "__all__" in names_of(node)
    ]
    named = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert [name for name in named if not is_there(name)] == []
    known = {name.rpartition(".")[2] for name in named if name.startswith(module)}
    assert sorted(set(public) - known - {"__version__"}) == []


def names_of(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]
