"""The code blocks of the pages, for tests that check or run them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)

#: Lines of a block without a language are commands if each begins with one of these words, after assignments.
_PROGRAMS = "pip|make|commsched|torchrun|mpirun|mpiexec|srun|sbatch|kubectl|docker|git|unshare"
_COMMANDS = re.compile(rf"(export |\w+=\S* )*((sudo|\S*python3?|{_PROGRAMS})(?=\s|$)|export )")


class Block(NamedTuple):
    page: str
    line: int
    language: str  # python, sh, or another; empty for output
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        language, code = found[1], found[2]
        if language in ("", "bash", "shell") and all(_COMMANDS.match(line) for line in _joined(code)):
            language = "sh"
        yield Block(page.name, text.count("\n", 0, found.start()) + 1, language, code)


def all_blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page) if block.language == language]


def python_of(page: str, containing: str) -> str:
    """The one Python block of ``page`` that contains a text."""
    [found] = [block.text for block in all_blocks("python") if block.page == page and containing in block.text]
    return found


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command in a shell block, without assignments, ``sudo`` and comments."""
    for line in _joined(block.text):
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word not in ("&&", "|", ";", ">"):
                words.append(word)
                continue
            while words and (words[0] == "sudo" or re.match(r"\w+=", words[0])):
                del words[0]
            if words:
                yield words
            words = []


def _joined(code: str) -> list[str]:
    """The lines of ``code`` that are neither empty nor comments; those that end with a backslash are joined."""
    lines = code.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]
