"""Many NICs: bounds, exact figures by hand, and classes of workers against full detail."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.harness.network_load import least_loads
from commsched.core.policies import policy_names
from commsched.core.scheduler import SchedulerConfig
from commsched.simulator import Cluster, Rules, WorkerClass, equal_workers, simulate
from commsched.simulator.lower_bound import clipped_bound, lower_bound
from commsched.simulator.profile import ITEMSIZE
from commsched.simulator.scenario import bytes_factor

from .closed_forms import window_bound
from .models import RATE, model, models, times


def rules(policy, elements, credit=None, **more):
    return Rules(SchedulerConfig(ITEMSIZE * elements, ITEMSIZE * (credit or elements), policy), **more)


@st.composite
def clusters(draw):
    """Up to five classes with rates and speeds of their own, with or without servers."""
    a_class = st.builds(WorkerClass, st.integers(1, 8).map(float), st.integers(1, 3), st.sampled_from([0.5, 1.0, 2.0]))
    workers = draw(st.lists(a_class, min_size=1, max_size=5))
    servers = draw(st.lists(st.integers(1, 8).map(float), max_size=3))
    return Cluster(tuple(workers), tuple(servers), draw(st.sampled_from([0.0, 0.5])), draw(st.sampled_from([0.0, 0.25])))


@settings(max_examples=60)
@given(models(max_layers=5), clusters(), st.integers(1, 30), st.integers(1, 60), st.sampled_from(policy_names()), st.data())
def test_no_cluster_beats_the_bound_and_none_deadlocks(profile, cluster, elements, credit, policy, data):
    """``simulate`` raises if a worker never finishes: gradients are ready in another order on every class here."""
    options = {option: data.draw(st.booleans()) for option in ("barrier", "hold", "norm", "pushes_first")}
    outcome = simulate(profile, cluster, rules(policy, elements, credit, **options), steps=2)
    worker_rates = [each.rate_bytes_per_second for each in cluster.workers for _ in range(each.count)]
    slowest = profile.scaled(seconds=max(each.compute_factor for each in cluster.workers))
    loads = least_loads(worker_rates, cluster.server_rates, options["norm"])
    bound = max(clipped_bound(*times(slowest, ITEMSIZE * per_byte), share) for per_byte, share in loads)
    # Later steps may begin before the slowest worker has ended the one before: only from the start on is it a bound for all.
    assert outcome.step_seconds[0] >= bound * (1 - 1e-9)
    assert sum(outcome.step_seconds) >= 2 * bound * (1 - 1e-9)


@given(models(), st.integers(1, 30), st.integers(1, 60), st.integers(0, 3))
def test_one_worker_and_one_server_cost_one_partition_more_than_one_link(profile, elements, credit, overhead):
    forward, backward, _ = times(profile)
    outcome = simulate(profile, equal_workers(1, RATE, 1, message_seconds=overhead), rules("priority", elements, credit))
    sizes = [partition.nbytes / ITEMSIZE for partition in outcome.grouping.plan.partitions]
    cut = [(layers[0], size) for layers, size in zip(outcome.grouping.layers_of, sizes)]
    most = window_bound(forward, backward, cut, credit, overhead)
    passed_on = max(sizes, default=0) + overhead
    assert lower_bound(*times(profile)) <= outcome.step_seconds[0] <= (most + passed_on) * (1 + 1e-9)


@pytest.mark.parametrize("workers", [2, 4])
def test_small_partitions_come_near_the_bound(workers):
    profile = model([(10, 20, 60)] * 10)
    per_element = bytes_factor(workers, workers)
    outcome = simulate(profile, equal_workers(workers, RATE, workers, detailed=True), rules("priority", 1, 2 * workers))
    assert outcome.step_seconds[0] == pytest.approx(lower_bound(*times(profile, per_element)), rel=0.05)


def test_a_message_by_hand():
    """2 s of bytes there and 2 s back, each 1 s held longer and 0.5 s on the way, between backward and forward."""
    cluster = equal_workers(1, RATE, 1, latency_seconds=0.5, message_seconds=1.0)
    assert simulate(model([(3, 5, 2)]), cluster, rules("fifo", 2)).step_seconds == (5 + 2 * (2 + 1 + 0.5) + 3,)


def test_a_norm_by_hand():
    """The push has left at 5 + 3 and arrives at 8.5. The question for the norm takes 1 s more, and its answer waits for the
    reply, which has left at 11.5."""
    cluster = equal_workers(1, RATE, 1, latency_seconds=0.5, message_seconds=1.0)
    assert simulate(model([(3, 5, 2)]), cluster, rules("fifo", 2, norm=True)).step_seconds == (11.5 + 1 + 0.5 + 3,)


def test_a_norm_is_that_of_all_shards():
    """The pushes to a fast and to a slow server have left after 8 s, and the slow one's reply has arrived after 16. Its part of
    the norm comes behind that, so the front layer waits as long, although its average has arrived before."""
    cluster = Cluster((WorkerClass(RATE),), (RATE, RATE / 4))
    profile = model([(1, 0, 2), (1, 0, 2)])
    assert simulate(profile, cluster, rules("priority", 2, 4)).step_seconds == (16 + 1,)
    assert simulate(profile, cluster, rules("priority", 2, 4, norm=True)).step_seconds == (16 + 1 + 1,)


@pytest.mark.parametrize("workers", [2, 4])
def test_small_partitions_come_near_the_clipped_bound(workers):
    """Replies use what pushes leave of the link in backward, so the norm costs nearly nothing. The barrier costs 1/4."""
    profile = model([(10, 20, 1500)] * 24)
    cluster = equal_workers(workers, 100 * RATE / 2 * bytes_factor(workers), detailed=True)
    chosen = rules("priority", 250, 250 * workers + 250, norm=True)
    bound = clipped_bound(*times(profile, 0.02))
    clipped, barrier = (
        simulate(profile, cluster, each).step_seconds[0] for each in (chosen, replace(chosen, norm=False, barrier=True))
    )
    assert bound <= clipped < 1.02 * bound < 1.25 * bound < barrier


def test_servers_of_their_own_gain_nothing_but_the_last_replies():
    """Pushes fill one direction until the norm, and replies the other; the barrier waits for the last reply too."""
    profile = model([(10, 20, 60)] * 10)
    cluster = equal_workers(2, RATE, 2)
    chosen = rules("priority", 1, 4, norm=True)
    bound = clipped_bound(*times(profile), 1.0)
    clipped, barrier = (
        simulate(profile, cluster, each).step_seconds[0] for each in (chosen, replace(chosen, norm=False, barrier=True))
    )
    assert bound <= clipped <= barrier < 1.01 * bound


def test_a_server_takes_all_workers_in_turn():
    assert simulate(model([(0, 0, 2)]), equal_workers(4, RATE, 1), rules("fifo", 2)).step_seconds == (4 * 2 + 4 * 2,)


def test_credit_is_back_when_the_bytes_have_left():
    """Two partitions to one server: with credit for one, the second leaves while the first is still on its way."""
    profile = model([(0, 0, 4)])
    cluster = equal_workers(1, RATE, 1, latency_seconds=1.0)
    assert simulate(profile, cluster, rules("fifo", 2, 4)).step_seconds == (2 + 2 + 1 + 2 + 1,)
    assert simulate(profile, cluster, rules("fifo", 2, 2)).step_seconds == (2 + 2 + 1 + 2 + 1,)


def test_a_ranks_own_shard_needs_no_network():
    assert simulate(model([(1, 2, 1000)] * 2), equal_workers(1, RATE), rules("fifo", 7)).step_seconds == (6,)
    halves = simulate(model([(0, 0, 8)]), equal_workers(2, RATE, detailed=True), rules("fifo", 4, 8))
    assert halves.step_seconds == (4 + 4,)  # each pushes one half, then sends the average of the other


def test_the_slow_link_sets_the_pace():
    profile = model([(0, 0, 8)])
    cluster = Cluster((WorkerClass(RATE), WorkerClass(RATE / 4)), (RATE, RATE))
    assert simulate(profile, cluster, rules("fifo", 4, 8)).step_seconds == (4 * 8 + 4 * 8,)  # both halves are there at once


def test_front_layers_overtake():
    """Two layers are ready at 0 and the front one at 1, while the second is on its way: it is next, on both ways."""
    profile = model([(1, 1, 4), (1, 0, 4), (1, 0, 4)])
    outcome = simulate(profile, equal_workers(1, RATE, 1), rules("priority", 4))
    spans = {
        span["name"]: (span["ready"], span["start"], span["stop"]) for span in outcome.timeline if span["track"] == "network"
    }
    assert spans == {"layer1": (0, 0, 8), "layer0": (1, 4, 12), "layer2": (0, 8, 16)}


@pytest.mark.parametrize("workers", [3, 8])
def test_with_servers_a_class_is_exactly_its_members(workers):
    profile = model([(2, 4, 6)] * 8)
    detailed, together = (
        simulate(profile, equal_workers(workers, RATE, workers, message_seconds=0.1, detailed=detail), rules("priority", 2, 16))
        for detail in (True, False)
    )
    assert together.step_seconds == pytest.approx(detailed.step_seconds)


@pytest.mark.parametrize(("workers", "apart"), [(8, 0.15), (16, 0.15)])
@pytest.mark.parametrize("policy", ["priority", "fifo"])
def test_with_shards_on_workers_a_class_is_nearly_its_members(workers, apart, policy):
    profile = model([(4, 8, 40)] * 6)
    chosen = rules(policy, 10, 10 * (workers + 1))
    detailed, together = (
        simulate(profile, equal_workers(workers, 15 * RATE, detailed=detail), chosen).step_seconds[0]
        for detail in (True, False)
    )
    assert together == pytest.approx(detailed, rel=apart)


@pytest.mark.parametrize("workers", [2, 4])
def test_pushes_first_come_nearer_the_bound(workers):
    """A push has its reply still to come, so what it waits for costs more than what the reply waits for."""
    profile = model([(10, 20, 1500)] * 24)
    cluster = equal_workers(workers, 100 * RATE / 2 * bytes_factor(workers), detailed=True)
    fair, first = (
        simulate(profile, cluster, rules("priority", 250, 250 * workers + 250, pushes_first=each)).step_seconds[0]
        for each in (False, True)
    )
    bound = lower_bound(*times(profile, 0.02))
    assert bound <= first < 1.02 * bound < 1.07 * bound < fair


def test_thousands_of_workers():
    profile = model([(4, 8, 400)] * 24)
    outcome = simulate(profile, equal_workers(4096, 1000 * RATE), rules("priority", 100, 10**6))
    assert len(outcome.grouping.plan.partitions) == 96
    assert outcome.step_seconds[0] >= lower_bound(*times(profile, bytes_factor(4096) / 1000))


def test_a_straggler_holds_up_everybody():
    profile = model([(2, 4, 1)] * 5)
    cluster = Cluster((WorkerClass(100 * RATE, 6), WorkerClass(100 * RATE, 1, compute_factor=3.0)))
    outcome = simulate(profile, cluster, rules("priority", 1, 100), steps=4)
    assert all(3 * 30 <= seconds <= 3 * 30 * 1.1 for seconds in outcome.step_seconds)


@pytest.mark.parametrize("norm", [False, True])
def test_equal_steps_of_equal_workers_are_equal(norm):
    outcome = simulate(model([(2, 4, 6)] * 4), equal_workers(4, RATE, 2), rules("priority", 2, 8, norm=norm), steps=3)
    assert outcome.step_seconds[1:] == pytest.approx(outcome.step_seconds[:2])


@given(models(max_layers=4), clusters())
@settings(max_examples=20)
def test_the_same_again_is_the_same(profile, cluster):
    first, second = (simulate(profile, cluster, rules("priority", 3, 9), steps=2) for _ in range(2))
    assert (first.step_seconds, first.timeline) == (second.step_seconds, second.timeline)


def test_a_timeline_has_all_that_happened():
    profile = model([(1, 2, 4)] * 3)
    outcome = simulate(profile, equal_workers(2, RATE, 2), rules("priority", 2, 8), steps=2)
    tracks = {
        track: [span for span in outcome.timeline if span["track"] == track]
        for track in ("forward", "backward", "network", "wait")
    }
    assert [span["name"] for span in tracks["backward"]] == ["layer2", "layer1", "layer0"]
    assert [span["name"] for span in tracks["forward"]] == ["layer0", "layer1", "layer2"]
    assert sorted(span["priority"] for span in tracks["network"]) == list(range(6))
    assert all(span["ready"] <= span["start"] < span["stop"] for span in tracks["network"])
    assert tracks["wait"][0]["name"] == "layer0"
    assert all(before["stop"] <= after["start"] for before, after in pairwise(tracks["forward"]))
    assert tracks["forward"][-1]["stop"] == pytest.approx(outcome.step_seconds[-1])
    assert min(span["start"] for span in outcome.timeline) == 0


def test_impossible_scenarios_are_refused():
    with pytest.raises(ValueError, match="at least 1 step, not 0"):
        simulate(model([(1, 1, 1)]), equal_workers(2, RATE), rules("fifo", 1), steps=0)
    with pytest.raises(ValueError, match="count, rate and compute factor of a worker class are positive"):
        equal_workers(0, RATE)
    with pytest.raises(ValueError, match="at least one worker, and servers with a positive rate"):
        Cluster((), ())
    with pytest.raises(ValueError, match="times are not negative"):
        equal_workers(2, RATE, latency_seconds=-1.0)
