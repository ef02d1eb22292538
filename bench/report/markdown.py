"""Results as Markdown tables, one for each model on each kind of cluster. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .columns import SHORT
from .group import Group, groups
from .result import Result

#: Markdown's special characters. A bracket alone is not special: only ``](`` makes a link.
_MARKUP = re.compile(r"[\\`*<>|~]|(?<=])\(|\b_|_\b")


def markdown(results: Iterable[Result]) -> str:
    return "\n".join(_table(group) for group in groups(results))


def _table(group: Group) -> str:
    lines = [
        [column.heading for column in SHORT],
        ["---:" if column.numeric else ":---" for column in SHORT],
        *([_escape(column.text(result)) for column in SHORT] for result in group.results),
    ]
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"**{_escape(group.full_title)}**\n\n{rows}"


def _escape(text: str) -> str:
    """Escape markup in ``text``, so that a name shows as it is and a cell remains one cell."""
    return " ".join(_MARKUP.sub(r"\\\g<0>", text).split())
