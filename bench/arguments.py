"""Kinds of command-line arguments that several benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from commsched.core.config import parse_bytes
from commsched.core.errors import ConfigError

FLOAT32_BYTES = 4


def at_least(least: int) -> Callable[[str], int]:
    """For ``type=``: a whole number of at least ``least``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return int(text)

    return parse


def setting(parse: Callable[[object, str], object]) -> Callable[[str], str]:
    """For ``type=``: a text that ``parse`` of ``core.config`` takes, passed on as it is."""

    def check(text: str) -> str:
        try:
            parse(text, "it")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text

    return check


def float32_bytes(text: str) -> int:
    """For ``type=``: a size such as ``64KB``, in bytes, rounded down to whole float32 elements."""
    try:
        size = parse_bytes(text, "it") // FLOAT32_BYTES * FLOAT32_BYTES
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is less than one float32 element")
    return size


def float32_sizes(text: str) -> list[int]:
    """For ``type=``: ``FROM:TO``, ``FROM:TO:FACTOR`` (4 if not given) or ``SIZE,SIZE,...``; TO itself is the last."""
    if ":" not in text:
        return [float32_bytes(part) for part in text.split(",")]
    first, last, *rest = text.split(":")
    factor = at_least(2)(rest[0]) if rest else 4
    size, most = float32_bytes(first), float32_bytes(last)
    if len(rest) > 1 or size > most:
        raise argparse.ArgumentTypeError(f"{text!r} is not FROM:TO or FROM:TO:FACTOR with FROM at most TO")
    sizes = []
    while size < most:
        sizes.append(size)
        size *= factor
    return [*sizes, most]
