"""Step times as a function of partition and credit, of the shapes that real ones have, and searches over them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commsched.core.scheduler import SchedulerConfig
from commsched.tuner.searchers import Searcher
from commsched.tuner.space import Space
from commsched.tuner.trials import Window


@dataclass(frozen=True)
class Surface:
    """Computation and communication that overlap, but for the first partition and what waits in the credit window."""

    total_bytes: int
    rate: float  # bytes per second
    message_seconds: float
    compute_seconds: float
    round_trip_seconds: float

    def __call__(self, config: SchedulerConfig) -> float:
        partition_bytes, credit_bytes = config.partition_bytes, max(config.credit_bytes, config.partition_bytes)
        rate = self.rate * min(1.0, credit_bytes / (partition_bytes + self.rate * self.round_trip_seconds))
        sending = self.total_bytes / rate + self.message_seconds * self.total_bytes / partition_bytes
        sending += (2 * partition_bytes + credit_bytes) / self.rate
        overlapped = (self.compute_seconds**6 + sending**6) ** (1 / 6)
        return float(overlapped + (partition_bytes + 0.3 * credit_bytes) / self.rate)

    @property
    def space(self) -> Space:
        return Space(SchedulerConfig(), self.total_bytes)

    @property
    def lowest(self) -> float:
        return min(map(self, self.space.lattice(per_octave=2)))


SLOW_NETWORK = Surface(100_000_000, 125e6, 1e-3, 0.3, 2e-3)
FAST_NETWORK = Surface(500_000_000, 1.25e9, 3e-4, 0.35, 1e-3)
LONG_ROUND_TRIP = Surface(200_000_000, 2.5e9, 2e-3, 0.08, 1e-2)


@dataclass(frozen=True)
class Fixed:
    """A model that measurements do not change."""

    predict: Callable[[SchedulerConfig], float]

    def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> Fixed:
        return self


def tilted(surface: Surface) -> Fixed:
    """Wrong by a factor that doubles from one end of the space to the other, and by a constant one."""

    def predict(config: SchedulerConfig) -> float:
        partition, credit = surface.space.to_point(config)
        return 3 * surface(config) * 2.0 ** (partition - credit / 2)

    return Fixed(predict)


def search(
    searcher: Searcher, seconds: Callable[[SchedulerConfig], float], *, trials: int, noise: float = 0.0, random_seed: int = 0
) -> list[SchedulerConfig]:
    """What it asked for. Times have a gaussian error of a part ``noise`` of them."""
    rng = random.Random(random_seed)
    asked = []
    for _ in range(trials):
        candidate = searcher.ask()
        if candidate is None:
            break
        asked.append(candidate.config)
        found = seconds(candidate.config) * (1 + rng.gauss(0, noise))
        searcher.tell(candidate.config, Window(found, noise * found, steps=10))
    return asked
