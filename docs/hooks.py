"""What the site needs besides the pages: docstrings name things by ``:class:`` and the like, which Markdown does not know."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **rest: Any) -> str:
    return re.sub(r":(?:class|func|meth|mod|data):(?=<code)", "", html)
