"""Formatting of sizes and times for people."""

from __future__ import annotations


def size(nbytes: int) -> str:
    """Format a size in decimal units: ``4.0 MB``, ``64 KB``, ``160 bytes``."""
    if nbytes < 1000:
        return f"{nbytes} bytes"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1_000_000 else f"{nbytes / 1e3:.0f} KB"


def milliseconds(seconds: float, like: float | None = None) -> str:
    """Format a time as milliseconds without a unit. The number of decimals gives about three digits to ``like``, or by default
    to the number itself."""
    like = like or seconds
    return f"{seconds * 1e3:.{0 if like >= 1 else 1 if like >= 0.01 else 2}f}"
