"""Visible output of the logger ``commsched``: as the script has set up logging, or else a few one-time lines and warnings."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from ..core.standard_streams import say_error

log = logging.getLogger("commsched")


def say(line: str) -> None:
    """Show the user a line that is visible by default. If the script has set up logging in any way, the line goes through
    logging, whose set-up then decides; otherwise it goes to stderr."""
    if _is_set_up() or log.level != logging.NOTSET or log.manager.disable >= logging.INFO:
        log.info("%s", line)
    else:
        say_error(f"commsched: {line}")


def set_level(level: str) -> None:
    """Apply ``COMMSCHED_LOG``: records of ``level`` (``warning``, ``info``, ``debug``) and above are shown, and none below.
    They go to stderr if the script has not set up logging."""
    log.setLevel(level.upper())
    say_whose_warnings()


def say_whose_warnings() -> None:
    """Let warnings begin with "commsched: " where the script has not set up logging. Idempotent."""
    if not any(isinstance(handler, _LastResort) for handler in log.handlers):
        log.addHandler(_LastResort())


def _is_set_up() -> bool:
    return any(not isinstance(handler, _LastResort) for handler in (*log.handlers, *logging.getLogger().handlers))


class _LastResort(logging.StreamHandler[TextIO]):
    """Like ``logging.lastResort``, for every level. Silent once the script has set up logging, whether earlier or later."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("commsched: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr  # the current one: it may have been replaced

    def filter(self, record: logging.LogRecord) -> bool:
        return not _is_set_up()
