"""Checks whether the ranks' processors are of one kind. Different kinds may round an update differently, without any error."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..settings import Settings

log = logging.getLogger("commsched")

_CPUINFO = Path("/proc/cpuinfo")
#: Libraries choose their kernels by these fields. Others, such as the clock rate, do not change a result.
_CHOOSES_KERNELS = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU architecture", "CPU part", "Features")


def processor_kind() -> str:
    """A digest of the first processor's description. It is equal on machines that compute alike."""
    try:
        first = _CPUINFO.read_text().split("\n\n", 1)[0]
    except OSError:
        return platform.processor()
    fields = dict(line.split(":", 1) for line in first.replace("\t", "").splitlines() if ":" in line)
    return hashlib.sha256(repr([fields.get(name) for name in _CHOOSES_KERNELS]).encode()).hexdigest()[:16]


def steps_between_comparisons(settings: Settings, rank: int, gather: Callable[[Any], list[Any]]) -> int:
    """The value of ``check_weights`` for all ranks: 0 if processors differ, unless the user has set it. Collective.

    Weights are compared bit by bit, so ranks that round differently would end a job that trains well.
    """
    kinds = gather(processor_kind())
    unlike = next((other for other, kind in enumerate(kinds) if kind != kinds[0]), None)
    if unlike is None or not settings.check_weights or "check_weights" in settings.given:
        return settings.check_weights
    if rank == 0:
        log.warning(
            "weights are not compared between ranks, since the processors of ranks 0 and %d are of different kinds and may "
            "round updates differently; check_weights=%d compares them all the same",
            unlike,
            settings.check_weights,
        )
    return 0
