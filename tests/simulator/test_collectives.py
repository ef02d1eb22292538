"""One resource: the simulator against the closed forms. Two workers, so that an all-reduce moves each byte once."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.core.policies import policy_names
from commsched.core.scheduler import SchedulerConfig
from commsched.simulator import Exchange, Rules, equal_workers, simulate
from commsched.simulator.collectives import hops
from commsched.simulator.lower_bound import clipped_bound, lower_bound, partitioned_bound, wfbp
from commsched.simulator.profile import ITEMSIZE

from .closed_forms import bucketed_wfbp, dear, serial, window_bound
from .models import RATE, model, models, times


def step(profile, rules, overhead=0.0):
    (seconds,) = simulate(profile, equal_workers(2, RATE, message_seconds=overhead), rules).step_seconds
    return seconds


def rules(policy, elements, credit=None, **more):
    config = SchedulerConfig(ITEMSIZE * elements, ITEMSIZE * (credit or elements), policy)
    return Rules(config, Exchange.ALL_REDUCE, **more)


def cut_of(profile, given_rules):
    """Front-most layer and seconds of each partition."""
    grouping = simulate(profile, equal_workers(2, RATE), given_rules).grouping
    return [(layers[0], p.nbytes / ITEMSIZE) for layers, p in zip(grouping.layers_of, grouping.plan.partitions)]


@given(models())
def test_with_tiny_partitions_priority_takes_exactly_the_bound(profile):
    assert step(profile, rules("priority", 1)) == lower_bound(*times(profile))


@given(models(), st.integers(1, 30), st.integers(1, 60), st.integers(0, 3))
def test_priority_stays_within_the_bounds_of_its_cut(profile, elements, credit, overhead):
    forward, backward, _ = times(profile)
    chosen = rules("priority", elements, credit)
    cut = forward, backward, cut_of(profile, chosen)
    took = step(profile, chosen, overhead)
    assert lower_bound(*times(profile)) <= partitioned_bound(*cut, overhead) <= took
    assert took <= window_bound(*cut, credit, overhead)


@given(models(), st.integers(1, 30), st.integers(1, 60), st.sampled_from(policy_names()), st.booleans(), st.booleans())
def test_no_rules_beat_the_bound(profile, elements, credit, policy, barrier, hold):
    took = step(profile, rules(policy, elements, credit, barrier=barrier, hold=hold))
    assert took >= lower_bound(*times(profile))


@given(models(least_elements=1))
def test_fifo_gains_nothing_from_overlap_with_forward(profile):
    expected = wfbp(*times(profile))
    assert step(profile, rules("fifo", 1)) == step(profile, rules("fifo", 1, barrier=True)) == expected


@given(models(), st.integers(1, 30), st.sampled_from(policy_names()))
def test_holding_back_is_serial_with_a_barrier(profile, elements, policy):
    assert step(profile, rules(policy, elements, barrier=True, hold=True)) == serial(*times(profile))


@given(models(), st.integers(1, 60), st.integers(0, 3))
def test_buckets_take_what_the_recursion_says(profile, elements, overhead):
    forward, backward, _ = times(profile)
    chosen = rules("fifo", 1, 10**6, barrier=True, bucket_bytes=ITEMSIZE * elements)
    buckets = list(reversed(cut_of(profile, chosen)))
    assert step(profile, chosen, overhead) == bucketed_wfbp(forward, backward, buckets, overhead)


@given(models(least_elements=1))
def test_dear_takes_what_its_closed_form_says(profile):
    config = SchedulerConfig(ITEMSIZE, 10**9, "fifo")
    chosen = Rules(config, Exchange.REDUCE_SCATTER_ALL_GATHER, bucket_bytes=1)
    assert step(profile, chosen) == dear(*times(profile))


def split(policy, elements, credit=None, **more):
    return replace(rules(policy, elements, credit), exchange=Exchange.SPLIT, **more)


@given(models())
def test_with_tiny_partitions_halves_take_exactly_the_bounds(profile):
    assert step(profile, split("priority", 1)) == lower_bound(*times(profile))
    assert step(profile, split("priority", 1, norm=True)) == clipped_bound(*times(profile))


@given(models(), st.integers(1, 30), st.integers(1, 60), st.integers(0, 3), st.sampled_from(policy_names()), st.booleans())
def test_no_rules_beat_the_clipped_bound(profile, elements, credit, overhead, policy, hold):
    chosen = split(policy, elements, credit, hold=hold, norm=True)
    forward, backward, _ = times(profile)
    least = partitioned_bound(forward, backward, cut_of(profile, chosen), 2 * overhead, first_share=0.5)
    assert clipped_bound(*times(profile)) <= least <= step(profile, chosen, overhead)


def test_a_norm_by_hand():
    """Backward ends at 3. Two reduce-scatters end at 3 + 2 (2 + 1), the norm at 10, and the average of the front layer 3 later.
    Without the norm that average would have come at 9, before the other reduce-scatter."""
    profile = model([(1, 1, 4), (1, 2, 4)])
    chosen = split("priority", 4, hold=True)
    assert step(profile, chosen, 1.0) == 3 + 3 + 3 + 3 + 3 + 1
    assert step(profile, replace(chosen, norm=True), 1.0) == 3 + 3 + 3 + 1 + 3 + 3 + 1


def test_a_layer_without_parameters_does_not_wait_for_the_norm():
    profile = model([(5, 0, 0), (1, 1, 4)])
    assert step(profile, split("priority", 4, norm=True), 1.0) == 1 + 3 + 1 + 3 + 1
    assert step(model([(20, 0, 0), (1, 1, 4)]), split("priority", 4, norm=True), 1.0) == 1 + 20 + 1


@pytest.mark.parametrize(
    ("exchange", "pieces"), [(Exchange.ALL_REDUCE, 3), (Exchange.SPLIT, 3), (Exchange.PARAMETER_SERVER, 4)]
)
def test_collectives_have_no_servers_for_which_tensors_are_cut(exchange, pieces):
    chosen = replace(rules("priority", 500), exchange=exchange)
    outcome = simulate(model([(1, 2, 1500)]), equal_workers(2, RATE), chosen)
    assert len(outcome.grouping.plan.partitions) == pieces


@pytest.mark.parametrize("exchange", [Exchange.ALL_REDUCE, Exchange.REDUCE_SCATTER_ALL_GATHER])
def test_a_norm_needs_an_exchange_in_two_halves(exchange):
    with pytest.raises(ValueError, match="no norm before the averages with: "):
        Rules(SchedulerConfig(), exchange, norm=True)


def test_the_gain_over_fifo_by_hand():
    """Equal layers, backward twice as long as forward, as much communication as computation: 4/3 in the limit."""
    profile = model([(10, 20, 30)] * 100)
    assert step(profile, rules("priority", 1)) == 3020 + 10
    assert step(profile, rules("fifo", 1)) == 4020


def test_more_workers_carry_more_bytes_over_more_hops():
    profile = model([(0, 0, 8)])
    cluster = equal_workers(8, RATE, latency_seconds=0.25, message_seconds=1.0)
    outcome = simulate(profile, cluster, rules("fifo", 8))
    assert outcome.step_seconds == (1 + hops(8) * 0.25 + 2 * 7 / 8 * 8,)
    assert [hops(workers) for workers in (1, 2, 3, 4, 8, 4096)] == [0, 2, 4, 4, 6, 24]


def test_one_worker_does_not_wait():
    outcome = simulate(model([(1, 2, 100)] * 3), equal_workers(1, RATE), rules("fifo", 5))
    assert outcome.step_seconds == pytest.approx((9,))
