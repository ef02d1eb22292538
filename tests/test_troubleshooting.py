"""The headings of docs/troubleshooting.md are messages of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import commsched

PACKAGE = Path(commsched.__file__).parent
PAGE = PACKAGE.parent / "docs" / "troubleshooting.md"
HEADINGS = re.findall(r"^### `(.+)`$", PAGE.read_text(), re.MULTILINE)

#: Stands in a message for what is filled in.
FILLED_IN = "\0"


def text_of(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\.\d)?[sdfg]", FILLED_IN, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or FILLED_IN for part in node.values)
    if isinstance(node, ast.BinOp):
        parts = (text_of(node.left), text_of(node.right))
        return None if parts == (None, None) else "".join(part or FILLED_IN for part in parts)
    return None


def texts(module: Path) -> Iterator[str]:
    """All texts of ``module`` but docstrings."""
    tree = ast.parse(module.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in docstrings and (text := text_of(node)) is not None:
            yield text


@cache
def messages() -> list[str]:
    return [text for module in sorted(PACKAGE.rglob("*.py")) for text in texts(module) if " " in text]


def test_there_are_headings() -> None:
    assert len(HEADINGS) > 50
    assert len(set(HEADINGS)) == len(HEADINGS)


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_heading_is_a_message(heading: str) -> None:
    """``...`` in a heading stands for anything, including the end of the message."""
    wanted = re.compile(".*".join(re.escape(part) for part in heading.split("...")), re.DOTALL)
    assert any(wanted.search(message) for message in messages())
