import math
import random

import pytest

from bench.tune.case import Surface
from commsched.core.scheduler import SchedulerConfig
from commsched.tuner.space import Space

TOTAL_BYTES = 16_000_000


def step_seconds(config):
    """Like the real thing: what messages cost, against what cannot be called back, and a link that must not fall idle."""
    size, credit = config.partition_bytes, max(config.partition_bytes, config.credit_bytes)
    idle = 0.15 * max(0.0, 1 - math.log2(credit / size) / 2)
    return 0.25 + 2e-4 * TOTAL_BYTES / size + (size + 0.3 * credit) / 62.5e6 + idle * size / 2e6


@pytest.fixture
def space():
    return Space(SchedulerConfig(), TOTAL_BYTES)


@pytest.fixture
def surface(space):
    """Three windows of five steps for each configuration of a lattice, with 1 % of noise."""
    chance = random.Random(1)
    return Surface(
        {
            config: [[step_seconds(config) * chance.gauss(1, 0.01) for _ in range(5)] for _ in range(3)]
            for config in space.lattice()
        }
    )
