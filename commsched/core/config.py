"""The settings that may change while training runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

#: The values of ``SchedulerConfig.collective``.
COLLECTIVES = ("all_reduce", "rsag")

#: The largest partition. It bounds the size of one message from any peer before a manifest is known.
MAX_PARTITION_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The settings that may change while training runs. Ranks replace them as a whole, at a step number that all agreed on.

    ``collective`` says of which tasks an average is made: one all-reduce, or a reduce-scatter and then an all-gather
    (``rsag``). A more urgent task may go between the two, and neither waits for the end of the other. DeAR (ICDCS'23) sends all
    reduce-scatters in backward and all all-gathers in the next forward. Here both are in one queue, in the policy's order.
    """

    partition_bytes: int = 4_000_000
    credit_bytes: int = 16_000_000
    policy: str = "priority"
    fusion_bytes: int | None = None  # small neighbours are merged up to this size; None means partition_bytes
    collective: str = "all_reduce"

    def to_record(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
