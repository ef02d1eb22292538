"""What the ranks of the tests' jobs have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import commsched


def say(descriptor: int, line: str) -> None:
    """In one write, so that the lines of several ranks do not mix."""
    os.write(descriptor, f"{line}\n".encode())


def run(main: Callable[[], None]) -> None:
    """``main``; an error of ours is one line on stderr and exit code 1."""
    try:
        main()
    except commsched.CommschedError as error:
        say(2, f"{type(error).__name__}: {error}")
        sys.exit(1)
