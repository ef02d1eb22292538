"""Copies between devices and hosts: exact figures by hand, bounds, and how little they cost at the rates of PCIe."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.workloads import load_profile
from commsched.core.scheduler import SchedulerConfig
from commsched.simulator import Exchange, Rules, copies, equal_workers, simulate
from commsched.simulator.profile import ITEMSIZE

from .models import RATE, model, models


def rules(elements, exchange=Exchange.ALL_REDUCE, policy="priority", **more):
    return Rules(SchedulerConfig(ITEMSIZE * elements, ITEMSIZE * elements, policy), exchange, **more)


def test_a_copy_each_way_by_hand():
    """One layer of 8 elements: backward 1 s, copy 2 s, all-reduce of two ranks 8 s, copy 2 s, forward 1 s."""
    profile = model([(1, 1, 8)])
    cluster = equal_workers(2, RATE)
    host = simulate(profile, cluster, rules(8)).step_seconds
    copied = simulate(profile, replace(cluster, copy_rate=RATE * 4), rules(8)).step_seconds
    assert copied[0] - host[0] == pytest.approx(2 * 8 * ITEMSIZE / (RATE * 4))


def test_the_network_sees_a_gradient_when_it_is_copied_and_observers_when_it_is_made():
    profile = model([(1, 1, 8)])
    outcome = simulate(profile, replace(equal_workers(2, RATE), copy_rate=RATE), rules(8))
    [task] = [span for span in outcome.timeline if span["track"] == "network"]
    assert task["ready"] == 1
    assert task["start"] == pytest.approx(1 + 8 * ITEMSIZE / RATE)


def test_front_layers_overtake_copies_that_wait(monkeypatch):
    """The copies of the back layers are slow, and the front layer's gradient is made while they wait."""
    profile = model([(1, 1, 2), (1, 1, 8), (1, 1, 8), (1, 1, 8)])
    cluster = replace(equal_workers(2, RATE * 1000), copy_rate=RATE / 4)
    first = {}
    for most in (ITEMSIZE * 8, ITEMSIZE * 1000):
        monkeypatch.setattr(copies, "MAX_BYTES_IN_FLIGHT", most)
        outcome = simulate(profile, cluster, rules(8))
        spans = [span for span in outcome.timeline if span["track"] == "network"]
        first[most] = [span["priority"] for span in sorted(spans, key=lambda span: span["start"])]
    assert first[ITEMSIZE * 8] == [3, 0, 1, 2]
    assert first[ITEMSIZE * 1000] == [3, 2, 1, 0]


@settings(max_examples=40)
@given(models(max_layers=5), st.integers(1, 30), st.sampled_from(Exchange), st.integers(1, 20), st.booleans())
def test_copies_deadlock_nothing_and_save_nothing(profile, elements, exchange, rate, barrier):
    cluster = equal_workers(2, RATE, detailed=True)
    host, copied = (
        simulate(profile, each, rules(elements, exchange, barrier=barrier), steps=2).step_seconds
        for each in (cluster, replace(cluster, copy_rate=RATE * rate))
    )
    if exchange is Exchange.ALL_REDUCE and barrier:  # otherwise another order may happen to be the better one
        assert sum(copied) >= sum(host) * (1 - 1e-9)


@pytest.mark.parametrize("exchange", [Exchange.PARAMETER_SERVER, Exchange.ALL_REDUCE])
@pytest.mark.parametrize("gigabytes", [12, 25])
@pytest.mark.parametrize("name", ["resnet50", "bert-base"])
def test_at_the_rates_of_pcie_a_step_is_within_3_percent_of_the_hosts(name, gigabytes, exchange):
    profile = load_profile(name)
    cluster = equal_workers(8, 25e9 / 8, latency_seconds=10e-6, message_seconds=50e-6)
    with_config = Rules(SchedulerConfig(4_000_000, 16_000_000), exchange)
    host, copied = (
        simulate(profile, each, with_config).step_seconds[0] for each in (cluster, replace(cluster, copy_rate=gigabytes * 1e9))
    )
    assert copied <= 1.03 * host


def test_no_rate_is_refused():
    with pytest.raises(ValueError, match="copies have a positive rate, not 0 bytes per second"):
        replace(equal_workers(2, RATE), copy_rate=0)
