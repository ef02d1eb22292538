"""A training whose true step times are known: what tuning is tested on, without any time passing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from random import Random

from commsched.core.scheduler import SchedulerConfig
from commsched.tuner.searchers import Candidate
from commsched.tuner.trials import Window

TOTAL_BYTES = 100_000_000
DEFAULT = SchedulerConfig()


def step_seconds(config: SchedulerConfig, message_seconds: float = 5e-5) -> float:
    """Compute, an overhead per message, and a partition and a credit's worth of bytes that nothing hides."""
    nbytes = config.partition_bytes + max(config.credit_bytes, config.partition_bytes)
    return 0.25 + message_seconds * TOTAL_BYTES / config.partition_bytes + nbytes / 400e6


class Training:
    """``measure`` takes medians of steps with gaussian noise of a part ``noise`` of them; ``now`` is its clock.

    ``bias(number, changed)`` is a factor on the window of that number, ``changed`` whether another configuration was measured
    before it.
    """

    def __init__(
        self,
        true: Callable[[SchedulerConfig], float] = step_seconds,
        noise: float = 0.0,
        seed: int = 0,
        bias: Callable[[int, bool], float] = lambda number, changed: 1.0,
    ) -> None:
        self.measured: list[SchedulerConfig] = []
        self.steps: list[int] = []
        self.applied: list[SchedulerConfig] = []
        self.now = 0.0
        self._true = true
        self._noise = noise
        self._random = Random(seed)
        self._bias = bias

    def measure(self, config: SchedulerConfig, steps: int) -> Window:
        factor = self._bias(len(self.measured), self.measured[-1:] != [config])
        self.measured.append(config)
        self.steps.append(steps)
        taken = [self._true(config) * factor * max(0.05, self._random.gauss(1, self._noise)) for _ in range(3 + steps)]
        self.now += sum(taken)
        seconds = statistics.median(taken[3:])
        deviation = 1.4826 * statistics.median(abs(one - seconds) for one in taken[3:])
        return Window(seconds, 1.2533 * deviation / math.sqrt(steps), steps)

    def clock(self) -> float:
        return self.now


class InTurn:
    """A searcher that asks for what it was given, and believes every number. ``gains`` are expected of them, if known."""

    def __init__(self, configs: Sequence[SchedulerConfig], gains: Sequence[float | None] = ()) -> None:
        self._candidates = [
            Candidate(config, gain) for config, gain in zip(configs, gains or [None] * len(configs), strict=True)
        ]
        self.told: list[tuple[SchedulerConfig, Window | None]] = []

    def ask(self) -> Candidate | None:
        known = {config for config, _ in self.told}
        return next((candidate for candidate in self._candidates if candidate.config not in known), None)

    def tell(self, config: SchedulerConfig, window: Window | None) -> None:
        self.told.append((config, window))

    def best(self) -> SchedulerConfig | None:
        succeeded = [(window.seconds, place) for place, (_, window) in enumerate(self.told) if window is not None]
        return self.told[min(succeeded)[1]][0] if succeeded else None
