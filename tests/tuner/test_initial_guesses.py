"""Seeds against the closed form, and against the bound that they balance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.core.scheduler import SchedulerConfig
from commsched.simulator.lower_bound import partitioned_bound
from commsched.simulator.profile import LayerProfile, Profile
from commsched.tuner.initial_guesses import MAX_FIRST_PARTITION_BYTES, before_first_step, best_partition, seeds
from commsched.tuner.profiler import LinkEstimate
from commsched.tuner.space import MAX_TUNED_PARTITION_BYTES, MIN_TUNED_PARTITION_BYTES


def uniform(layers=10, elements=2_500_000, forward=0.01, backward=0.02):
    return Profile("made up", tuple(LayerProfile(f"{i}", ((elements,),), forward, backward) for i in range(layers)), "made up")


#: Sizes that are looked at are so far apart.
STEP = 2 ** (1 / 8)


@pytest.mark.parametrize("overhead", [20e-6, 1e-4, 1e-3])
def test_where_all_bytes_are_critical_it_is_the_closed_form(overhead):
    # 700 MB at 10 Gbit/s; with 20 us per message and one message committed it would be 4.2 MB.
    profile, link = uniform(7, 25_000_000, 0, 0), LinkEstimate(8 / 10e9, overhead)
    one_committed = (overhead * 700e6 / link.seconds_per_byte) ** 0.5
    four, two = (config.partition_bytes for config in seeds(profile, link, 8, ordered=True))
    assert one_committed / 2 / STEP < four < one_committed / 2 * STEP
    assert one_committed / 2**0.5 / STEP < two < one_committed / 2**0.5 * STEP


def test_bytes_that_overhead_makes_critical_count_too():
    # As long in communication as in computation: without overhead each layer is as critical as any other, the first too.
    profile, link = uniform(), LinkEstimate(0.3 / 100e6, 1e-4)
    forward, backward = [[getattr(layer, name) for layer in profile.layers] for name in ("forward_seconds", "backward_seconds")]
    sizes = [layer.nbytes for layer in profile.layers]
    by_the_first = (1e-4 * sizes[0] / (3 * link.seconds_per_byte)) ** 0.5  # the closed form for the first layer's bytes
    found = best_partition(profile, link, 3)

    def bound(size):
        pieces = [(layer, nbytes * link.seconds_per_byte) for layer, nbytes in enumerate(sizes)]
        spent = sum(sizes) / size * 1e-4 / len(pieces)
        return partitioned_bound(forward, backward, pieces, spent) + 3 * size * link.seconds_per_byte

    assert bound(found) <= min(bound(by_the_first), *(bound(64_000 * 2**octave) for octave in range(9))) * 1.001


@pytest.mark.parametrize(
    ("workers", "more", "ratios"),
    [(2, {}, [4, 2]), (8, {}, [16, 2]), (4, {"servers": 2}, [16, 2]), (4, {"ordered": True}, [4, 2])],
)
def test_credit_is_for_all_lanes_or_for_one_link(workers, more, ratios):
    found = seeds(uniform(), LinkEstimate(1e-8, 1e-4), workers, policy="fifo", **more)
    assert [config.credit_bytes / config.partition_bytes for config in found] == ratios
    assert {config.policy for config in found} == {"fifo"}


def test_only_the_critical_bytes_count():
    # Heavy last layers hide behind backward: the first one binds, as its gradient comes last.
    few = tuple(LayerProfile(f"{i}", ((10_000 if i == 0 else 10_000_000,),), 10.0, 20.0) for i in range(5))
    assert best_partition(Profile("made up", few, "made up"), LinkEstimate(1e-9, 1e-6), 1) == MIN_TUNED_PARTITION_BYTES
    assert best_partition(Profile("made up", few, "made up"), LinkEstimate(1e-6, 1e-1), 1) > MIN_TUNED_PARTITION_BYTES


@given(st.floats(1e-11, 1e-5), st.floats(0, 1e-2), st.integers(2, 64), st.integers(0, 8), st.booleans())
def test_seeds_are_within_bounds(per_byte, overhead, workers, servers, ordered):
    for config in seeds(uniform(), LinkEstimate(per_byte, overhead), workers, servers=servers, ordered=ordered):
        assert MIN_TUNED_PARTITION_BYTES <= config.partition_bytes <= MAX_TUNED_PARTITION_BYTES
        assert config.credit_bytes >= 2 * config.partition_bytes
        assert isinstance(config, SchedulerConfig)


def test_one_worker_has_nothing_to_tune():
    with pytest.raises(ValueError, match="workers=1: with one there is nothing to tune"):
        seeds(uniform(), LinkEstimate(1e-8, 1e-4), 1)


@pytest.mark.parametrize("times", [(0.0, 1e-4), (-1e-8, 1e-4), (1e-8, -1e-4), (float("nan"), 0.0), (1e-8, float("inf"))])
def test_a_link_has_times(times):
    with pytest.raises(ValueError, match="not the times of a link"):
        LinkEstimate(*times)


@given(st.integers(1, 2**40), st.integers(2, 512), st.integers(0, 8), st.booleans(), st.floats(1e5, 1e12))
def test_sizes_before_the_first_step_are_within_bounds(nbytes, workers, servers, ordered, rate):
    partition, lanes = before_first_step(nbytes, workers, servers=servers, ordered=ordered, rate=rate)
    assert MIN_TUNED_PARTITION_BYTES <= partition <= MAX_FIRST_PARTITION_BYTES
    assert lanes >= 2


def test_a_faster_network_and_more_bytes_have_larger_partitions():
    slow, lanes = before_first_step(72_000_000, 2, rate=62.5e6)
    fast, _ = before_first_step(72_000_000, 2, rate=1.25e9)
    more, _ = before_first_step(720_000_000, 2, rate=62.5e6)
    assert 64_000 < slow < fast
    assert slow < more
    assert lanes == 4
