"""What a rank sees of its steps while it trains, without a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..core.scheduler import SchedulerConfig


@dataclass(frozen=True, slots=True)
class FullWait:
    """A line of the user's at which all averages of a step are waited for: ``file:line``, the reason as a clause, and medians
    of the seconds that it waits and of the whole step."""

    line: str
    why: str
    seconds: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Paced:
    """Steps of one group as rank 0 sees them, with the configuration in use.

    Attributes:
        steps: steps that have begun so far.
        step_seconds: median time of the last few steps.
        own_seconds: median time of these steps without waiting for averages; None if the engine waits where commsched does not
            see it.
        own_by_rank: each rank's own seconds in the same few parts of the last steps; may be empty.
        needs_norm: whether every update needs a norm of all averages.
        full_wait: a line at which all averages are waited for; None if there is none.
        same_gradients: the ranks that seem to train on the same batches.
    """

    steps: int
    step_seconds: float
    own_seconds: float | None
    config: SchedulerConfig
    own_by_rank: Mapping[int, Sequence[float]] = field(default_factory=dict)
    needs_norm: bool = False
    full_wait: FullWait | None = None
    same_gradients: Sequence[int] = ()
