"""The code blocks of the pages: Python compiles and names what exists, commands are ones that the programs take, and what needs
neither a network nor another engine runs. Whole scripts run in ``tests/examples/test_first_hour.py``,
``tests/plugins/test_sixth_engine.py`` and ``tests/plugins/<engine>/test_page.py``."""

from __future__ import annotations

import argparse
import ast
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import commsched
from bench.__main__ import main as bench
from commsched.cli.main import main as command_line
from tests.code_blocks import Block, all_blocks, commands_of, python_of
from tests.jobs.job import run_job
from tests.test_docs import is_there

PYTHON, SHELL = all_blocks("python"), all_blocks("sh")


def test_blocks_are_found() -> None:
    assert len(PYTHON) > 15
    assert len(SHELL) > 30


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles_and_imports_what_exists(block: Block) -> None:
    imported = set()
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert sorted(name for name in imported if name.startswith("commsched.") and not is_there(name)) == []


@pytest.mark.parametrize("page", ["pytorch.md", "jax.md", "mxnet.md", "README.md", "first_hour.md"])
def test_names_of_a_plugin_exist(page: str) -> None:
    """``cs`` is the plugin of the page's engine."""
    plugin = {"jax.md": "jax", "mxnet.md": "mxnet"}.get(page, "torch")
    trees = [ast.parse(block.text) for block in PYTHON if block.page == page]
    attributes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    named = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "cs"}
    assert named
    assert sorted(name for name in named if not is_there(f"commsched.plugins.{plugin}.{name}")) == []


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_the_shell_reads_a_block(block: Block) -> None:
    shell = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
    assert shell.stderr == ""


class Taken(BaseException):
    """The command line was parsed; nothing is to run."""


@pytest.fixture
def only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(*arguments: Any) -> None:
        parse(*arguments)
        raise Taken

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)


def own_commands(block: Block) -> Iterator[tuple[Callable[[list[str]], int], list[str]]]:
    for words in commands_of(block):
        if words[0] == "commsched":
            yield command_line, words[1:]
        elif words[0].rpartition("/")[2] in ("python", "python3") and words[1:3] == ["-m", "bench"]:
            yield bench, words[3:]


@pytest.mark.usefixtures("only_parse")
@pytest.mark.parametrize("block", [block for block in SHELL if any(own_commands(block))], ids=str)
def test_commands_are_taken(block: Block) -> None:
    for program, arguments in own_commands(block):
        with pytest.raises(Taken):
            program(arguments)


@pytest.fixture
def job_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COMMSCHED_LOG", "warning")
    yield
    commsched.shutdown()


@pytest.mark.usefixtures("job_of_one")
def test_the_two_lines_and_a_join() -> None:
    import torch

    for page in ("README.md", "pytorch.md"):
        model = torch.nn.Linear(2, 1)
        names: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "torch": torch}
        exec(python_of(page, "# line 2"), names)
        before = model.weight.detach().clone()
        model(torch.ones(1, 2)).sum().backward()
        names["optimizer"].step()
        assert not torch.equal(model.weight, before)
    exec(python_of("pytorch.md", "optimizer.join()"), {**names, "loader": [(1, 2)]})


@pytest.mark.usefixtures("job_of_one")
def test_statistics_for_a_logger() -> None:
    class Writer:
        written: dict[str, float] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.written[name] = value

        def log(self, values: dict[str, float], step: int) -> None:
            self.logged = values

    writer = Writer()
    exec(python_of("diagnosis.md", "scalars()"), {"commsched": commsched, "writer": writer, "wandb": writer, "step": 1})
    assert writer.logged == writer.written


@pytest.mark.usefixtures("job_of_one")
def test_preemption() -> None:
    saved: list[bool] = []
    names = {"commsched": commsched, "signal": signal, "batches": range(60), "save_checkpoint": lambda: saved.append(True)}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        exec(python_of("reliability.md", "SIGTERM"), names)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert (names["step"], saved) == (59, [True])


def test_the_check_of_an_installation() -> None:
    install = [words for block in SHELL if block.page == "install.md" for words in commands_of(block)]
    [words] = [words for words in install if words[:2] == ["commsched", "run"]]
    code, out, err = run_job(*words[2:5], sys.executable, *words[6:], timeout_seconds=60, imports=())
    assert (code, sorted(out.replace("\n", "")), err) == (0, ["0", "1"], "")  # ranks may write within each other's lines
