"""What is seen of the logger ``commsched``: what the script has set up, or else what is said once, and warnings."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

log = logging.getLogger("commsched")


def say(line: str) -> None:
    """Tell the user what is to be seen without asking: through logging, if the script has set it up in any way, which then
    decides; else on stderr."""
    if log.hasHandlers() or log.level != logging.NOTSET or log.manager.disable >= logging.INFO:
        log.info("%s", line)
    else:
        print(f"commsched: {line}", file=sys.stderr, flush=True)


def set_level(level: str) -> None:
    """As ``COMMSCHED_LOG`` asks: all of ``level`` (``warning``, ``info``, ``debug``) and above is seen, and nothing below; on
    stderr where the script has not set up logging."""
    log.setLevel(level.upper())
    if not any(isinstance(handler, _LastResort) for handler in log.handlers):
        log.addHandler(_LastResort())


class _LastResort(logging.StreamHandler[TextIO]):
    """Like ``logging.lastResort``, for every level: silent once the script has set up logging, be it before or after."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("commsched: %(message)s"))

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(handler is not self for handler in (*log.handlers, *logging.getLogger().handlers))
