"""Output to stdout and stderr. They may be closed, a broken pipe or a full disk, and none of these must end a job."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import TextIO

from .errors import ConfigError


def say_error(line: str) -> None:
    """Write ``line`` to stderr if possible. Any thread. Raises nothing."""
    _say(line, sys.stderr)


def say_out(line: str) -> None:
    """Write ``line`` to stdout if possible. Any thread. Raises nothing."""
    _say(line, sys.stdout)


def say_result(line: str) -> None:
    """Write ``line``, a part of a command's result, to stdout. Whoever reads a pipe may have seen enough and be gone.

    Raises:
        ConfigError: the line is lost, as on a full disk.
    """
    try:
        _write(line, sys.stdout)
    except BrokenPipeError:
        pass
    except OSError as error:
        raise ConfigError(f"the result cannot be written to stdout: {error.strerror}") from error


def flush_all() -> None:
    """Flush log handlers, stdout and stderr. Call it before this process ends without the interpreter's own shutdown. Raises
    nothing."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()


def occupy() -> None:
    """Open the null device in place of each of stdin, stdout and stderr that is closed. Otherwise a connection would get the
    free descriptor, and a C library's output would be sent to another rank. Idempotent."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open returns the lowest free one, which is this one


def _say(line: str, stream: TextIO | None) -> None:
    with suppress(OSError):  # the stream is a broken pipe, or full
        _write(line, stream)


def _write(line: str, stream: TextIO | None) -> None:
    if stream is not None:
        with suppress(ValueError):  # it is closed
            stream.write(f"{line}\n")  # in one write, so that it does not mix with other processes' output
            stream.flush()
