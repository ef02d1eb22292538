"""What the profiler says of steps whose times are known, and of a real training."""

import math
from itertools import accumulate

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import Partition
from commsched.core.scheduler import SchedulerConfig
from commsched.core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask
from commsched.simulator import Rules, equal_workers, simulate
from commsched.simulator.profile import LayerProfile, Profile
from commsched.tuner.profiler import Busy, LinkEstimate, Profiler, fitted_link

from .training import SMALL, Training

SPECS = (TensorSpec("a", (100,), "float32"), TensorSpec("b", (300,), "float32"), TensorSpec("c", (200,), "float32"))
MANIFEST = Manifest(SPECS)


def make_task(step, index, nbytes, started, done, *, sent=None, group=0, verb=ALL_REDUCE):
    task = CommTask(group, step, Partition(index, "float32", 0, nbytes, (index,)), None, verb)
    task.started_at, task.sent_at, task.done_at = started, done if sent is None else sent, done
    return task


def step(profiler, number, began, *, ready=(4.0, 3.0, 1.0), waits=(), tasks=(), group=0):
    """Times are from ``began``; ``ready`` of each tensor, waits are (name, start, stop), tasks (bytes, start, stop)."""
    profiler.on_step(group, number, began)
    for tensor in sorted(range(len(ready)), key=ready.__getitem__):
        profiler.on_ready(group, tensor, began + ready[tensor])
    for index, (nbytes, started, done) in enumerate(tasks):
        profiler.on_task(make_task(number, index, nbytes, began + started, began + done, group=group))
    for name, start, stop in waits:
        profiler.on_span("wait", name, began + start, began + stop)


def profile_of(seconds=20.0, manifest=MANIFEST, steps=3, **what):
    profiler = Profiler(0, steps)
    for number in range(steps):
        step(profiler, number, 100 + number * seconds, tasks=[(1000, 1.0, 5.0)], **what)
    assert not profiler.full.is_set()
    profiler.on_step(0, steps, 100 + steps * seconds)
    assert profiler.full.is_set()
    return profiler.result(manifest)


def times(measured):
    return [layer.forward_seconds for layer in measured.profile.layers], [
        layer.backward_seconds for layer in measured.profile.layers
    ]


def test_every_layer_waited():
    measured = profile_of(waits=[("a", 5.0, 6.0), ("b", 8.0, 9.0), ("c", 12.0, 15.0)])
    # Backward ends at 4; 1 until a waits, then a computes 2, b 3, c 5.
    assert times(measured) == ([1.0, 2.0, 3.0, 5.0], [0.0, 1.0, 2.0, 1.0])
    assert [layer.nbytes for layer in measured.profile.layers] == [0, 400, 1200, 800]
    assert [layer.name for layer in measured.profile.layers] == ["before forward", "a", "b", "c"]
    assert (measured.step_seconds, len(measured.samples)) == (20.0, 3)


def test_layers_that_did_not_wait_share_by_their_backward_times():
    measured = profile_of(waits=[("a", 5.0, 6.0)])
    # c's gradient came after 1, but the mean is 4 / 3.
    assert times(measured)[0] == pytest.approx([1.0, 14 * 3 / 13, 14 * 6 / 13, 14 * 4 / 13])


def test_without_any_wait_all_of_forward_is_shared():
    assert times(profile_of())[0] == pytest.approx([0.0, 16 * 3 / 13, 16 * 6 / 13, 16 * 4 / 13])


def test_without_backward_times_the_bytes_count():
    measured = profile_of(ready=(4.0, 4.0, 4.0), waits=[("a", 4.0, 5.0), ("c", 10.0, 15.0)])
    assert times(measured) == ([0.0, 5 * 400 / 1600, 5 * 1200 / 1600, 5.0], [0.0, 0.0, 0.0, 4.0])
    no_times = profile_of(ready=(0.0, 0.0, 0.0))
    assert times(no_times)[0] == [0.0, 20 * 400 / 2400, 20 * 1200 / 2400, 20 * 800 / 2400]


def test_an_engine_that_reads_everything_first_computes_after_the_last_average():
    measured = profile_of(waits=[("a", 5.0, 6.0), ("b", 6.0, 9.0), ("c", 9.0, 15.0)])
    assert times(measured)[0] == [1.0, 0.0, 0.0, 5.0]


def test_other_waits_are_no_computation():
    measured = profile_of(waits=[("flags", 4.5, 5.0), ("a", 5.0, 6.0), ("flags", 7.0, 8.0), ("c", 12.0, 15.0)])
    assert times(measured)[0] == [0.5, 5 * 1 / 3, 5 * 2 / 3, 5.0]


def test_waits_out_of_order_and_overlapping_count_once():
    measured = profile_of(waits=[("b", 5.0, 6.0), ("a", 5.5, 7.0), ("c", 10.0, 15.0)])
    forward = times(measured)[0]
    assert sum(forward) == pytest.approx(20 - 4 - 2 - 5)
    assert forward[2] == pytest.approx(3.0)  # from the last that was waited for until c waits


def test_a_gradient_that_comes_too_early_counts_when_those_behind_it_are_there():
    assert times(profile_of(ready=(0.5, 4.0, 1.0)))[1] == [0.0, 0.0, 3.0, 1.0]


def test_parts_add_up_to_the_whole_even_if_their_medians_do_not():
    profiler = Profiler(0, 3)
    for number, waits in enumerate([("a", 5.0, 5.0), ("b", 5.0, 5.0), ("c", 5.0, 5.0)]):
        step(profiler, number, 20.0 * number, waits=[waits], tasks=[(1000, 1.0, 2.0)])
    profiler.on_step(0, 3, 60.0)
    forward, backward = times(profiler.result(MANIFEST))
    assert sum(forward) == pytest.approx(16.0)
    assert sum(backward) == 4.0


def test_incomplete_steps_and_other_groups_do_not_count():
    profiler = Profiler(1, 2)
    profiler.on_ready(1, 0, 0.0)  # of a step that began before
    profiler.on_span("wait", "a", 0.0, 0.1)
    step(profiler, 0, 1.0, group=0, tasks=[(1000, 0.0, 1.0)])
    step(profiler, 7, 2.0, group=1, ready=(0.3, 0.2, 0.1), tasks=[(1000, 0.1, 0.2)])
    step(profiler, 8, 3.0, group=1, ready=(0.3, 0.2), tasks=[(1000, 0.1, 0.9)])  # c's gradient was not seen
    assert len(profiler.result(MANIFEST).samples) == 1
    profiler.on_step(1, 9, 4.0)
    assert profiler.result(MANIFEST).samples == (1.0,)


def test_nothing_seen():
    profiler = Profiler(0)
    assert profiler.result(MANIFEST) is None
    step(profiler, 0, 1.0)
    profiler.on_step(0, 1, 2.0)
    assert profiler.result(MANIFEST) is None  # nothing was sent
    with pytest.raises(ValueError, match="steps=0: at least 1"):
        Profiler(0, 0)


def test_a_stopped_profiler_ignores_everything():
    profiler = Profiler(0, 2)
    step(profiler, 0, 0.0, tasks=[(1000, 1.0, 2.0)])
    profiler.on_step(0, 1, 20.0)
    before = profiler.result(MANIFEST)
    assert len(before.samples) == 1
    profiler.stop()
    assert profiler.full.is_set()
    step(profiler, 1, 20.0, tasks=[(10**9, 1.0, 2.0)])
    profiler.on_step(0, 2, 40.0)
    assert profiler.result(MANIFEST) == before


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("commsched.tuner.profiler._MAX_RECORDS", 10)
    profiler = Profiler(0, 1)
    profiler.on_step(0, 0, 0.0)
    for at in range(50):
        profiler.on_ready(0, 0, at)
        profiler.on_span("wait", "a", at, at)
        profiler.on_task(make_task(0, 0, 8, at, at + 1))
    assert [len(each) for each in (profiler._ready, profiler._waits, profiler._tasks)] == [10] * 3


# --- the link ---


def link_of(tasks, verbs=()):
    profiler = Profiler(0, 1)
    step(profiler, 0, 0.0)
    for index, (nbytes, started, done) in enumerate(tasks):
        profiler.on_task(make_task(0, index, nbytes, started, done, verb=verbs[index] if verbs else ALL_REDUCE))
    profiler.on_step(0, 1, 20.0)
    return profiler.result(MANIFEST).link


def test_the_rate_is_that_of_busy_times():
    # Six in a row, two on their way at a time, a pause, and a lone one that waited for itself.
    tasks = [(10_000, max(0.0, 0.01 * (index - 1)), 0.01 * (index + 1)) for index in range(6)]
    link = link_of([*tasks, (10_000, 1.0, 1.5)])
    assert link.seconds_per_byte == pytest.approx((0.06 - 6 * 50e-6) / 60_000)
    assert link.partition_seconds == 50e-6


def test_what_plugins_send_besides_gradients_is_not_counted():
    """Flags may be many bytes beside those of small tensors."""
    tasks = [(10_000, 0.01 * index, 0.01 * (index + 1)) for index in range(6)]
    alone = link_of(tasks)
    profiler = Profiler(0, 1, [0, 1].__contains__)
    step(profiler, 0, 0.0, tasks=tasks)
    for index in range(6):
        profiler.on_task(make_task(0, index, 9_000, 0.01 * index, 0.5, group=2))
    profiler.on_step(0, 1, 20.0)
    found = profiler.result(MANIFEST)
    assert (found.link, found.is_shared) == (alone, False)


def test_where_only_another_group_sends_nothing_is_measured():
    profiler = Profiler(0, 1, [0, 1].__contains__)
    step(profiler, 0, 0.0)
    profiler.on_task(make_task(0, 0, 1000, 1.0, 2.0, group=1))
    profiler.on_step(0, 1, 20.0)
    assert profiler.result(MANIFEST) is None


@pytest.mark.parametrize(("nbytes", "is_shared"), [(10_000, True), (10, False)])
def test_the_bytes_of_another_group_use_the_network_too_unless_they_are_few(nbytes, is_shared):
    """Tasks of the two groups take turns."""
    profiler = Profiler(0, 1, [0, 1].__contains__)
    profiler.on_task(make_task(4, 0, nbytes, -1.0, 1e3, group=1))  # of before
    step(profiler, 0, 0.0)
    for index in range(12):
        own = index % 2 == 0
        taken = 0.01 if own or is_shared else 1e-5
        started = 0.01 * index
        profiler.on_task(
            make_task(0, index, 10_000 if own else nbytes, started, started + taken * (2 if own else 1), group=int(not own))
        )
    profiler.on_step(0, 1, 20.0)
    profiler.on_task(make_task(5, 0, nbytes, 20.0, 30.0, group=1))
    found = profiler.result(MANIFEST)
    assert found.is_shared == is_shared
    partitions = 12 if is_shared else 6
    assert found.link.seconds_per_byte == pytest.approx((0.12 - partitions * 50e-6) / (10_000 * partitions), rel=0.02)


def test_a_quick_lone_task_bounds_what_a_partition_costs():
    tasks = [(10_000, 0.01 * index, 0.01 * (index + 2)) for index in range(6)]
    per_byte = 0.07 / 60_000
    assert link_of([*tasks, (10, 1.0, 1.0 + 90e-6)]).partition_seconds == pytest.approx(90e-6 - 10 * per_byte)
    assert link_of([*tasks, (10, 1.0, 2.0)]).partition_seconds == pytest.approx(100e-6)  # no more is believed
    assert link_of([(10, 0.0, 1.0)]).partition_seconds == 50e-6
    assert link_of([(10, 0.0, 1e-5)]).partition_seconds == pytest.approx(0.8e-5)  # never all of the time


def test_a_collective_costs_more():
    profiler = Profiler(0, 1)
    step(profiler, 0, 0.0, tasks=[(10_000, 0.1 * index, 0.1 * (index + 1)) for index in range(6)])
    profiler.on_step(0, 1, 20.0)
    assert profiler.result(MANIFEST, ordered=True).link.partition_seconds == 150e-6


@pytest.mark.parametrize(
    ("ordered", "most", "expected"),
    [
        (True, 1e-9, (1e-9, 2e-3 - 10_000 * 1e-9)),
        (True, math.inf, ((2e-3 - 150e-6) / 10_000, 150e-6)),
        (False, 1e-9, (1e-9, 50e-6)),  # there other ranks are late
    ],
)
def test_bytes_take_no_longer_than_the_network_needs(ordered, most, expected):
    """Tasks of 2 ms on a network that is known to need 10 us for their bytes."""
    profiler = Profiler(0, 1)
    step(profiler, 0, 0.0, tasks=[(10_000, 2e-3 * index, 2e-3 * (index + 1)) for index in range(6)])
    profiler.on_step(0, 1, 20.0)
    link = profiler.result(MANIFEST, ordered=ordered, most_seconds_per_byte=most).link
    assert (link.seconds_per_byte, link.partition_seconds) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ordered", "most", "expected"), [(True, math.inf, Busy(0.6, 60_000, 6)), (True, 1e-9, None), (False, math.inf, None)]
)
def test_the_time_of_collectives_is_kept_unless_the_rate_is_assumed(ordered, most, expected):
    profiler = Profiler(0, 1)
    step(profiler, 0, 0.0, tasks=[(10_000, 0.1 * index, 0.1 * (index + 1)) for index in range(6)])
    profiler.on_step(0, 1, 20.0)
    busy = profiler.result(MANIFEST, ordered=ordered, most_seconds_per_byte=most).busy
    assert busy == (None if expected is None else Busy(pytest.approx(expected.seconds), expected.nbytes, expected.partitions))


GUESS = LinkEstimate(1e-7, 4e-4)


def busy_times(per_byte, overhead, *partitions):
    return [Busy(per_byte * 32e6 + overhead * count, 32e6, count) for count in partitions]


@pytest.mark.parametrize("overhead", [1.5e-4, 4e-4, 2e-3])
def test_what_more_partitions_take_for_the_same_bytes_is_their_overhead(overhead):
    link = fitted_link(GUESS, busy_times(1.4e-7, overhead, 100, 1600))
    assert link.partition_seconds == pytest.approx(overhead, rel=0.1)
    assert link.seconds_per_byte == pytest.approx(1.4e-7, rel=0.01)


def test_with_partitions_of_one_size_the_guess_of_their_overhead_stays():
    link = fitted_link(GUESS, busy_times(1.4e-7, 2e-3, 100, 100))
    assert link.partition_seconds == pytest.approx(GUESS.partition_seconds)
    assert link.seconds_per_byte == pytest.approx((1.4e-7 * 32e6 + 100 * (2e-3 - 4e-4)) / 32e6)


def test_a_noisy_time_does_not_make_partitions_free_or_bytes():
    fewer, more = busy_times(1.4e-7, 4e-4, 100, 200)
    link = fitted_link(GUESS, [fewer, Busy(0.99 * more.seconds, more.nbytes, more.partitions)])
    assert GUESS.partition_seconds / 20 < link.partition_seconds < GUESS.partition_seconds
    assert link.seconds_per_byte == pytest.approx(1.4e-7, rel=0.02)
    assert fitted_link(LinkEstimate(1e-7, 10.0), busy_times(1e-9, 0.0, 100_000)) == LinkEstimate(1e-7, 10.0)


def test_threads_that_wait_cost_a_collective_a_bounded_time():
    profiler = Profiler(0, 1)
    step(profiler, 0, 0.0, tasks=[(10_000, 0.1 * index, 0.1 * (index + 1)) for index in range(6)])
    profiler.on_step(0, 1, 20.0)
    assert profiler.result(MANIFEST, ordered=True, most_seconds_per_byte=1e-9).link.partition_seconds == 5e-3


@pytest.mark.parametrize("ordered", [False, True])
def test_the_latency_is_half_of_the_time_after_the_push_without_the_bytes_of_the_reply(ordered):
    """Sixteen in a row; each is done 0.02 s of the reply's bytes and two latencies of 0.03 s after its push. The last four
    also waited for another rank."""
    profiler = Profiler(0, 1)
    step(profiler, 0, 0.0)
    for index in range(16):
        late = 0.2 if index > 11 else 0.0
        done = 0.02 * (index + 4 + 1) + late
        profiler.on_task(make_task(0, index, 10_000, 0.02 * index, done, sent=done - late - 0.02 - 2 * 0.03))
    profiler.on_step(0, 1, 20.0)
    link = profiler.result(MANIFEST, ordered=ordered).link
    busy = 0.02 * (15 + 4 + 1) + 0.2
    expected = (0.02 + 2 * 0.03 - 10_000 * busy / 160_000) / 2
    assert expected > 0
    assert link.latency_seconds == (0.0 if ordered else pytest.approx(expected))


def test_a_network_without_a_queue_has_no_latency():
    assert link_of([(10_000, 0.01 * index, 0.01 * (index + 1)) for index in range(6)]).latency_seconds == 0.0


def test_halves_of_an_average_are_half_as_many_bytes():
    whole = link_of([(1000, 0.0, 0.2)])
    halves = link_of([(1000, 0.0, 0.1), (1000, 0.1, 0.2)], [REDUCE_SCATTER, ALL_GATHER])
    assert whole.seconds_per_byte == pytest.approx(halves.seconds_per_byte, rel=1e-3)


# --- against the simulator, whose times are exact ---


def replay(outcome, profile, steps=2):
    """A profiler that saw the simulated step, and the manifest."""
    profiler = Profiler(0, steps)
    specs = tuple(TensorSpec(layer.name, layer.shapes[0], "float32") for layer in profile.layers)
    ready = list(accumulate(layer.backward_seconds for layer in reversed(profile.layers)))[::-1]
    spans = outcome.timeline
    tasks = [each for each in spans if each["track"] == "network"]
    for number in range(steps):
        began = number * outcome.step_seconds[0]
        step(profiler, number, began, ready=ready)
        for each in tasks:
            partition = outcome.grouping.plan.partitions[each["priority"]]
            profiler.on_task(make_task(number, partition.index, partition.nbytes, began + each["start"], began + each["stop"]))
        for each in spans:
            if each["track"] == "wait":
                profiler.on_span("wait", each["name"], began + each["start"], began + each["stop"])
    profiler.on_step(0, steps, steps * outcome.step_seconds[0])
    return profiler, Manifest(specs)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8), st.integers(1, 30))
def test_a_simulated_training_is_seen_as_it_is(rows, rate):
    layers = tuple(LayerProfile(f"{i}", ((1000 * size,),), 0.01 * f, 0.01 * b) for i, (f, b, size) in enumerate(rows))
    profile = Profile("made up", layers, "made up")
    outcome = simulate(profile, equal_workers(2, 1e4 * rate, detailed=True), Rules(SchedulerConfig(2000, 4000)))
    assume(outcome.step_seconds[0] < math.inf)
    profiler, manifest = replay(outcome, profile)
    measured = profiler.result(manifest)
    assert measured.step_seconds == pytest.approx(outcome.step_seconds[0])
    assert [layer.nbytes for layer in measured.profile.layers[1:]] == [layer.nbytes for layer in layers]
    assert measured.profile.forward_seconds == pytest.approx(profile.forward_seconds)
    assert [layer.backward_seconds for layer in measured.profile.layers[1:]] == pytest.approx(
        [layer.backward_seconds for layer in layers]
    )
    waited = {each["name"] for each in outcome.timeline if each["track"] == "wait"}
    if waited == {layer.name for layer in layers}:
        assert [layer.forward_seconds for layer in measured.profile.layers[1:]] == pytest.approx(
            [layer.forward_seconds for layer in layers]
        )


# --- a real training ---


def test_a_real_training():
    profilers = {}

    def open_rank(session):
        if session.rank == 0:
            session.on_register(lambda group, manifest: profilers.setdefault(group, (Profiler(group, 5), manifest)))

    def before_step(session, step):
        if session.rank == 0 and step == 3:
            for profiler, _ in profilers.values():
                session.observe(profiler)

    training = Training(steps=12, config=SMALL, before_step=before_step, open_rank=open_rank)
    training.run()
    seen = [(profiler, manifest) for profiler, manifest in profilers.values() if profiler.full.is_set()]
    assert len(seen) == 1  # broadcasts of the beginning are groups too, over by then
    profiler, manifest = seen[0]
    measured = profiler.result(manifest)
    assert len(measured.samples) == 5
    assert [layer.name for layer in measured.profile.layers[1:]] == [spec.name for spec in manifest.tensors]
    assert 0 < measured.profile.backward_seconds < measured.step_seconds
    assert 0 < measured.profile.forward_seconds < measured.step_seconds
    assert measured.profile.compute_seconds <= measured.step_seconds * 2  # each a median of few
    assert 0 < measured.link.seconds_per_byte < 1


# --- for the bound ---


def test_a_busy_period_has_one_latency_besides_its_bytes_and_what_leaves_first_only_fills_queues():
    """Each of 4 tasks of 1000 bytes takes 0.25 s on the link. It leaves then, and its average is there 0.4 s later."""
    profiler = Profiler(0, 1)
    step(profiler, 0, 100.0)
    for index in range(4):
        sent = 101.0 + 0.25 * (index + 1)
        profiler.on_task(make_task(0, index, 1000, 101.0 if index < 2 else sent - 0.5, sent + 0.4, sent=sent))
    profiler.on_step(0, 1, 120.0)
    measured = profiler.result(MANIFEST)
    busy = 4 * 0.25 + 0.4
    latency = (0.4 - busy / 4) / 2
    assert measured.transfer_seconds_per_byte == pytest.approx((busy - latency) / 4000)
    assert measured.sending_seconds_per_byte == pytest.approx(0.25 / 1000)
    limited = profiler.result(MANIFEST, most_seconds_per_byte=1e-4)
    assert limited.transfer_seconds_per_byte == 1e-4
    collective = profiler.result(MANIFEST, ordered=True)
    assert (collective.transfer_seconds_per_byte, collective.sending_seconds_per_byte) == (None, None)


def test_few_tasks_do_not_show_how_fast_they_leave():
    assert profile_of().sending_seconds_per_byte is None


def test_waits_are_medians_over_steps_of_all_waits_for_a_tensor():
    profiler = Profiler(0, 3)
    for number, second in enumerate((1.0, 2.0, 4.0)):
        waits = [("a", 5.0, 6.0), ("a", 7.0, 7.0 + second), *([("b", 8.5, 9.0)] if number == 0 else [])]
        step(profiler, number, 100 + 20 * number, waits=waits, tasks=[(1000, 1.0, 5.0)])
    profiler.on_step(0, 3, 160)
    assert profiler.result(MANIFEST).waited_seconds == pytest.approx({"a": 3.0, "b": 0.0})
