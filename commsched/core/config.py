"""The settings that may change while training runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

#: The largest partition. It bounds the size of one message from any peer before a manifest is known.
MAX_PARTITION_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The settings that may change while training runs. Ranks replace them as a whole, at a step number that all agreed on."""

    partition_bytes: int = 4_000_000
    credit_bytes: int = 16_000_000
    policy: str = "priority"
    fusion_bytes: int | None = None  # small neighbours are merged up to this size; None means partition_bytes

    def to_record(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
