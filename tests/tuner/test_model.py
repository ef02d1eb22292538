"""The model against the simulator itself, against real steps of a link of known rate, and how much it costs."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.scheduler import SchedulerConfig
from commsched.simulator import Exchange, Rules, equal_workers, simulate
from commsched.simulator.profile import LayerProfile, Profile
from commsched.simulator.scenario import bytes_factor
from commsched.tuner.model import Model, _coarser
from commsched.tuner.profiler import LinkEstimate
from commsched.tuner.space import Space

MB = 1_000_000


def uniform(layers=24, megabytes=48, step_seconds=0.3):
    size = megabytes * MB // 4 // layers
    rows = (LayerProfile(f"{i}", ((size,),), step_seconds / 3 / layers, 2 * step_seconds / 3 / layers) for i in range(layers))
    return Profile("made up", tuple(rows), "made up")


def config(partition, ratio, policy="priority"):
    return SchedulerConfig(int(partition * MB), int(partition * MB * ratio), policy)


@pytest.mark.parametrize(
    ("workers", "servers", "ordered"), [(2, 0, False), (4, 0, False), (2, 2, False), (8, 0, False), (4, 0, True)]
)
def test_it_says_what_the_simulator_says(workers, servers, ordered):
    profile, link = uniform(), LinkEstimate(0.3 / (48 * MB), 2e-4)
    model = Model(profile, link, workers, servers=servers, ordered=ordered)
    factor = bytes_factor(workers, servers)
    cluster = equal_workers(
        workers,
        factor / link.seconds_per_byte,
        servers,
        message_seconds=2e-4 / (1 if ordered else factor),
        detailed=not ordered and workers <= 4,
    )
    exchange = Exchange.ALL_REDUCE if ordered else Exchange.PARAMETER_SERVER
    for tried in (config(1, 4), config(4, 2), config(2, 8)):
        outcome = simulate(profile, cluster, Rules(tried, exchange))
        assert model.predict(tried) == pytest.approx(outcome.step_seconds[0], rel=1e-6)


def test_processor_time_of_partitions_prolongs_the_step_whatever_is_hidden():
    link = LinkEstimate(1e-3 / (48 * MB), 5e-5)
    plain, costly = (Model(uniform(), link, 2, processor_seconds=each) for each in (0.0, 1e-4))
    for partition, count in ((2, 24), (0.5, 96)):
        assert costly.predict(config(partition, 4)) == pytest.approx(plain.predict(config(partition, 4)) + count * 1e-4)
    assert costly.calibrate([(config(2, 4), 1.0)]).link == link  # which is not what makes that step so long


@pytest.mark.parametrize("ordered", [False, True])
def test_credit_for_one_partition_is_simulated_as_credit_for_two(ordered):
    model = Model(uniform(), LinkEstimate(0.3 / (48 * MB), 2e-4), 4, ordered=ordered)
    assert model.predict(config(1, 1)) == model.predict(config(1, 2))


def test_smaller_partitions_than_are_simulated_cost_what_they_cost_together():
    profile, link = uniform(), LinkEstimate(0.3 / (48 * MB), 2e-4)
    model = Model(profile, link, 4, anchor_bytes=MB)
    small = config(0.125, 8)  # 384 of them, 6 messages each
    cluster = equal_workers(4, 1.5 / link.seconds_per_byte, message_seconds=2e-4 / 1.5, detailed=True)
    exact = simulate(profile, cluster, Rules(small)).step_seconds[0]
    assert model.predict(small) == pytest.approx(exact, rel=0.07)
    assert model.predict(small) > 0.3 + 384 * 2e-4


def test_between_points_of_the_lattice_it_is_between_their_times():
    model = Model(uniform(), LinkEstimate(0.3 / (48 * MB), 2e-4), 2)
    for (a, b), ratio in ((pair, ratio) for pair in pairwise((0.25, 0.5, 1, 2, 4, 8)) for ratio in (1, 2, 4)):
        ends = model.predict(config(a, ratio)), model.predict(config(b, ratio))
        assert min(ends) * (1 - 1e-9) <= model.predict(config((a * b) ** 0.5, ratio)) <= max(ends) * (1 + 1e-9)


def test_what_is_out_of_bounds_is_as_at_the_bound():
    model = Model(uniform(megabytes=8), LinkEstimate(0.3 / (8 * MB), 2e-4), 2)
    assert model.predict(SchedulerConfig(1, 1)) == model.predict(SchedulerConfig(64_000, 64_000))
    assert model.predict(config(8, 1)) == model.predict(config(200, 1))
    assert model.predict(SchedulerConfig(MB, 1)) == model.predict(SchedulerConfig(MB, MB))
    assert model.predict(config(1, 1000)) == model.predict(config(1, 32))


def link_of(messages=1e-3):
    return LinkEstimate(0.3 / (48 * MB), messages)


def test_small_tensors_that_are_not_merged_are_so_many_partitions():
    """Whatever the partition size is: 300 tensors are as many."""
    profile, small = uniform(layers=300), SchedulerConfig(4 * MB, 16 * MB, fusion_bytes=1)
    for workers in (2, 4):  # simulated as they are, and fewer of them
        model = Model(profile, link_of(), workers)
        merged, apart = model.predict(replace(small, fusion_bytes=None)), model.predict(small)
        assert merged < 0.7
        assert apart == pytest.approx(0.3 + 300 * 1e-3, rel=0.25)
        assert apart > merged


@pytest.mark.parametrize("fusion_bytes", [None, 1])
def test_a_model_of_many_layers_takes_as_long_as_one_of_fewer(fusion_bytes):
    """Which has as many partitions."""
    tried = replace(config(1, 4), fusion_bytes=fusion_bytes)
    many = Model(uniform(1500), link_of(1e-4), 2).predict(tried)
    cost = 1e-4 * (0 if fusion_bytes is None else 1500 - 48)
    few = Model(uniform(400), LinkEstimate((0.3 + cost) / (48 * MB), 1e-4), 2).predict(config(1, 4))
    assert many == pytest.approx(few, rel=0.05)


def test_policies():
    model = Model(uniform(), LinkEstimate(0.3 / (48 * MB), 2e-4), 4, ordered=True)
    in_order, by_need = (model.predict(config(1, 2, policy)) for policy in ("fifo", "priority"))
    assert model.predict(replace(config(1, 2), collective="rsag")) == by_need
    assert in_order > 1.2 * by_need  # a third of the step is forward, which then overlaps with nothing


def test_the_valley_moves_as_theory_says():
    def best(overhead):
        model = Model(uniform(), LinkEstimate(0.3 / (48 * MB), overhead), 2)
        return min((config(2.0**k, 4) for k in range(-4, 4)), key=model.predict).partition_bytes

    assert best(1e-5) < best(2e-3)


def test_a_latency_prolongs_the_step_once_or_twice():
    """Once for partitions of the rank's own shard, else there and back. It is hidden while many partitions are on the way."""
    link = LinkEstimate(0.3 / (48 * MB), 1e-4)
    at_once, later = (Model(uniform(), replace(link, latency_seconds=each), 2).predict(config(0.25, 4)) for each in (0.0, 0.02))
    assert 0.02 <= later - at_once <= 2 * 0.02


def test_with_a_latency_smaller_partitions_are_not_starved_of_credit():
    """What is on its way is sent, so it needs no credit."""
    model = Model(uniform(), LinkEstimate(0.3 / (48 * MB), 1e-5, 0.02), 2)
    assert model.predict(config(0.125, 4)) < model.predict(config(1, 4))


# --- calibration ---


def trials(model, *tried):
    return [(each, model.predict(each)) for each in tried]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_calibrated_model_is_near_the_truth_where_nothing_was_tried(ordered):
    profile = uniform()
    truth = Model(profile, LinkEstimate(0.4 / (48 * MB), 6e-4), 2, ordered=ordered)
    guess = Model(profile, LinkEstimate(0.25 / (48 * MB), 1e-4), 2, ordered=ordered)
    found = guess.calibrate(trials(truth, config(0.125, 4), config(4, 4)))
    for other in (config(0.25, 4), config(1, 4), config(2, 2)):
        before, after = (abs(model.predict(other) / truth.predict(other) - 1) for model in (guess, found))
        assert after < 0.04 < before
    assert found.link.seconds_per_byte == pytest.approx(truth.link.seconds_per_byte, rel=0.1)
    assert found.link.partition_seconds == pytest.approx(6e-4, rel=0.25)


def test_a_latency_does_not_pass_for_the_cost_of_a_partition():
    """Otherwise larger partitions would seem better."""
    link = LinkEstimate(0.3 / (48 * MB), 5e-5, 0.015)
    truth = Model(uniform(), replace(link, latency_seconds=0.03), 2)
    found = Model(uniform(), link, 2).calibrate(trials(truth, config(0.25, 4)))
    assert found.predict(config(0.25, 4)) == pytest.approx(truth.predict(config(0.25, 4)), rel=0.02)
    assert found.link.partition_seconds < 1.7 * link.partition_seconds
    assert found.predict(config(0.25, 4)) < found.predict(config(2, 4))


def test_what_computation_hides_says_nothing_of_the_link():
    profile = uniform(megabytes=1)
    guess = Model(profile, LinkEstimate(1e-9, 1e-5), 2)
    found = guess.calibrate([(config(0.25, 4), 0.3)])
    assert found.link.seconds_per_byte == pytest.approx(1e-9, rel=0.05)
    assert found.link.partition_seconds == pytest.approx(1e-5, rel=0.05)


def test_an_impossible_measurement_does_not_run_away():
    found = Model(uniform(), LinkEstimate(0.3 / (48 * MB), 1e-4), 2).calibrate([(config(1, 4), 1e-3), (config(1, 4), 1e3)])
    assert 1e-12 < found.link.seconds_per_byte < 1e-4
    assert 0 < found.predict(config(1, 4)) < 1e4


def test_calibrating_by_nothing_changes_nothing():
    model = Model(uniform(), LinkEstimate(0.3 / (48 * MB), 1e-4), 2)
    assert model.calibrate([]).link == model.link


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none(seconds):
    with pytest.raises(ValueError, match="not the times of steps"):
        Model(uniform(), LinkEstimate(1e-8, 1e-4), 2).calibrate([(config(1, 4), seconds)])


def test_nothing_to_send():
    with pytest.raises(ValueError, match="1 workers"):
        Model(uniform(), LinkEstimate(1e-8, 1e-4), 1)
    with pytest.raises(ValueError, match="0 bytes"):
        Model(Profile("empty", (LayerProfile("a", (), 1.0, 1.0),), "made up"), LinkEstimate(1e-8, 1e-4), 2)


def test_a_step_of_thousands_of_tensors_costs_no_more():
    """About 0.1 s of CPU each, wherever; the limit is for busy machines."""
    model = Model(uniform(3000, 400), LinkEstimate(0.3 / (400 * MB), 1e-4), 4, anchor_bytes=4 * MB)
    tried = [config(partition, ratio) for partition in (0.0625, 1, 32) for ratio in (1, 32)]
    began = time.thread_time()
    for fusion_bytes in (None, 1):
        assert all(0.29 < model.predict(replace(each, fusion_bytes=fusion_bytes)) < 30 for each in tried)
    assert time.thread_time() - began < 30


def test_a_whole_lattice_costs_little():
    """Of a large model. It takes less than 2 s of CPU; the limit is for busy machines."""
    profile = uniform(150, 400)
    model = Model(profile, LinkEstimate(0.3 / (400 * MB), 1e-4), 2, anchor_bytes=4 * MB)
    lattice = Space(config(4, 4), 400 * MB).lattice(per_octave=2)
    began = time.thread_time()
    seconds = [model.predict(each) for each in lattice]
    model.calibrate([(config(4, 4), 0.4), (config(1, 4), 0.4)])
    assert time.thread_time() - began < 30
    assert len(lattice) > 100
    assert all(0.29 < each < 30 for each in seconds)


def test_a_coarser_configuration_merges_as_many_more_tensors() -> None:
    manifest = Manifest(tuple(TensorSpec(f"w{index}", (125_000,), "float32") for index in range(810)))
    config = SchedulerConfig(1_000_000, 4_000_000)
    coarser = _coarser(config, 4, 500_000)
    assert len(cut(manifest, config.partition_bytes).partitions) == 810
    assert len(cut(manifest, coarser.partition_bytes, coarser.fusion_bytes).partitions) == pytest.approx(810 / 4, rel=0.05)
