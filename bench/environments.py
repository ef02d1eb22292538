"""What of an environment stays the same from one measurement to the next on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_THE_MOMENT = frozenset({"time", "command", "load_average"})


def lasting(environment: Mapping[str, Any]) -> dict[str, Any]:
    """``results.environment()`` without what differs between two runs of one program on one machine."""
    return {name: value for name, value in environment.items() if name not in _OF_THE_MOMENT}
