"""What is remembered of rates changes no result."""

import numpy as np
import pytest

from commsched.core.scheduler import SchedulerConfig
from commsched.simulator import FairShareCache, Rules, equal_workers, simulate
from commsched.simulator import network_sharing as module
from commsched.simulator.network_sharing import CONNECTION

from .models import RATE, model

PROFILE = model([(1, 2, 7), (2, 1, 5), (1, 1, 20), (3, 2, 3)])
CLUSTER = equal_workers(3, RATE, message_seconds=0.1, detailed=True)


@pytest.mark.parametrize("pushes_first", [True, False])
def test_simulations_that_share_a_memory_are_as_without(pushes_first):
    shares = FairShareCache(CLUSTER, pushes_first)
    for partition in (4, 8, 40):
        rules = Rules(SchedulerConfig(partition, 2 * partition), pushes_first=pushes_first)
        alone = simulate(PROFILE, CLUSTER, rules)
        for _ in range(2):
            together = simulate(PROFILE, CLUSTER, rules, shares=shares)
            assert together.step_seconds == pytest.approx(alone.step_seconds, rel=1e-12)


def test_rates_are_by_connection_whatever_their_order(monkeypatch):
    calls = []
    counted = module.fair_rates
    monkeypatch.setattr(module, "fair_rates", lambda *args: calls.append(args) or counted(*args))
    shares = FairShareCache(CLUSTER)
    keys = [(0, 1, True), (0, 2, True), (1, 2, True)]

    def rates(keys):
        return shares.rates(keys, np.array([(*key, 1) for key in keys], CONNECTION))

    forth, back = rates(keys), rates(keys[::-1])
    assert forth.tolist() == back.tolist()[::-1]
    assert len(calls) == 1
    assert sum(forth[:2]) == pytest.approx(RATE)  # worker 0 shares its NIC between two
    rates(keys[:1])
    assert len(calls) == 2


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "_MAX_SETS", 3)
    shares = FairShareCache(CLUSTER)
    simulate(PROFILE, CLUSTER, Rules(SchedulerConfig(4, 8)), shares=shares)
    assert len(shares._remembered) == 3
