"""What is said of the cost of communication, from figures that are known."""

from __future__ import annotations

import random
from typing import Any

import pytest

from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.pace import PARTS_KEPT
from commsched.core.scheduler import SchedulerConfig
from commsched.settings import Settings
from commsched.simulator.lower_bound import clipped_bound, lower_bound
from commsched.simulator.profile import LayerProfile, Profile
from commsched.tuner.assessment import assess, in_words, is_open, last_lines
from commsched.tuner.learn import JobFacts
from commsched.tuner.paced import FullWait, Paced
from commsched.tuner.profiler import LinkEstimate, Measured
from commsched.tuner.space import MIN_TELLING_BYTES

#: Ten layers of 1 MB; each takes 10 ms forward and 20 ms backward.
MANIFEST = Manifest(tuple(TensorSpec(f"layer {number}", (250_000,), "float32") for number in range(10)))
PROFILE = Profile(
    "training", tuple(LayerProfile(spec.name, ((250_000,),), 0.010, 0.020) for spec in MANIFEST.tensors), "measured"
)
TIMES = [0.010] * 10, [0.020] * 10


def measured(megabytes_per_second: float, **more: Any) -> Measured:
    return Measured(PROFILE, LinkEstimate(1e-6 / megabytes_per_second, 0.0), (0.3,) * 5, **more)


def paced(step: float, own: float | None = 0.3, **more: Any) -> Paced:
    return Paced(24, step, own, SchedulerConfig(), **more)


def job(world_size: int = 2, transport: str = "ps", servers: int = 0, workers: int | None = None) -> JobFacts:
    return JobFacts(world_size, transport, False, "10.0.0.1", world_size, workers or world_size, servers)


def parts(*own: float) -> dict[int, tuple[float, ...]]:
    """Ranks that take equally long in each part."""
    return {rank: (seconds,) * PARTS_KEPT for rank, seconds in enumerate(own)}


def words(steps: Paced, found: Measured | None, where: JobFacts | None = None, **settings: Any) -> list[str]:
    chosen = Settings.load(settings, {})
    return in_words(assess(steps, MANIFEST, found, where or job(), chosen), chosen)


def test_where_nothing_is_exposed_nothing_can_be_gained() -> None:
    assert words(paced(0.302), measured(1000)) == [
        "after 24 steps, a step takes 302.0 ms: 300.0 ms of computation and 2.0 ms of exposed communication (0.7 %); with this "
        "model and network (1 GB/s of gradients) the bound is 301.0 ms",
        "communication is 0.7 % of a step: nothing can be gained",
    ]


def test_at_the_bound_only_fewer_bytes_help() -> None:
    bound = lower_bound(*TIMES, [1 / 25] * 10)
    first, second = words(paced(1.02 * bound), measured(25), wire="none")
    assert first.endswith(f"the bound is {1e3 * bound:.1f} ms")
    half = lower_bound(*TIMES, [0.5 / 25] * 10)
    assert second == (
        "that is within 5 % of the bound: no other order or size of messages helps; "
        f"wire=bfloat16 (16 bits on the network): {1e3 * half:.1f} ms at best"
    )
    _, again = words(paced(1.02 * bound), measured(25), wire="bfloat16")
    assert again == "that is within 5 % of the bound: no other order or size of messages helps"


def test_more_servers_are_named_where_they_would_carry_less_each() -> None:
    """With a shard on each of 4 workers a card carries 1.5 bytes for a byte of gradient, with 4 servers 1."""
    found = assess(paced(0.6), MANIFEST, measured(25), job(4), Settings())
    assert found.servers == 4
    assert found.served_seconds == pytest.approx(lower_bound(*TIMES, [1 / 25 / 1.5] * 10))
    assert assess(paced(0.6), MANIFEST, measured(25), job(2), Settings()).served_seconds is None  # 1 byte already
    halves = assess(paced(0.6), MANIFEST, measured(25), job(4, servers=2), Settings())
    assert halves.served_seconds == pytest.approx(lower_bound(*TIMES, [1 / 25 / 2] * 10))
    assert assess(paced(0.6), MANIFEST, measured(25), job(4, "gloo"), Settings()).served_seconds is None


def test_a_line_that_waits_for_everything_is_named_with_what_it_costs() -> None:
    wait = FullWait("train.py:53", "gradients are read before step()", 0.25, 0.7)
    _, second = words(paced(0.7, full_wait=wait), measured(25))
    assert second.startswith(
        "train.py:53 waits for all averages (gradients are read before step()), which the next forward cannot "
        "overlap; without that a step takes 430.0 ms at best; "
    )


def test_a_profile_with_a_full_wait_does_not_show_the_forward_of_each_layer() -> None:
    """All of the forward comes after the last wait, and so seems to belong to the last layer."""
    layers = [LayerProfile(each.name, each.shapes, 0.0, each.backward_seconds) for each in PROFILE.layers]
    layers[-1] = LayerProfile(layers[-1].name, layers[-1].shapes, PROFILE.forward_seconds, layers[-1].backward_seconds)
    found = Measured(Profile("training", tuple(layers), "measured"), LinkEstimate(1e-6 / 25, 0.0), (0.7,) * 5)
    wait = FullWait("train.py:53", "gradients are read before step()", 0.25, 0.7)
    assessed = assess(paced(0.7, full_wait=wait), MANIFEST, found, job(), Settings())
    assert assessed.bound_seconds == pytest.approx(lower_bound(*TIMES, [1 / 25] * 10))


def test_settings_that_stand_in_the_way_are_named() -> None:
    far = paced(0.6)
    assert "40 % above the bound: commsched tune may find better sizes" in words(far, measured(25))[1]
    assert "leave partition and credit open" in words(far, measured(25), credit="64MB")[1]
    fifo = Paced(24, 0.6, 0.3, SchedulerConfig(policy="fifo"))
    assert "try policy=priority" in words(fifo, measured(25), policy="fifo")[1]
    assert "that is the cost of messages" in words(far, measured(25), tune="1")[1]


def test_sizes_are_not_advised_where_there_are_none_to_choose() -> None:
    small = Manifest((TensorSpec("layer 0", (MIN_TELLING_BYTES // 4 - 1,), "float32"),))
    profile = Profile("training", (LayerProfile("layer 0", ((MIN_TELLING_BYTES // 4 - 1,),), 0.1, 0.2),), "measured")
    found = Measured(profile, LinkEstimate(1e-6 / 25, 0.0), (0.3,) * 5)
    for chosen in (Settings.load({}, {}), Settings.load({"credit": "64MB"}, {})):
        (_, second) = in_words(assess(paced(0.6), small, found, job(), chosen), chosen)
        assert "above the bound: that is the cost of messages; so few bytes leave no sizes to choose" in second


def test_ranks_on_the_same_batches_come_first() -> None:
    same = "ranks 0, 1 seem to train on the same batches, so their steps are worth one"
    assert words(paced(0.301, same_gradients=(0, 1)), measured(1000))[1].startswith(f"{same}; communication is 0.3 % of a step")
    assert words(paced(0.6, same_gradients=(0, 1)), measured(25))[1].startswith(f"{same}; 40 % above the bound")


def test_a_slow_rank_is_no_fault_of_the_network() -> None:
    found = assess(paced(0.5, own_by_rank=parts(0.3, 0.48)), MANIFEST, measured(1000), job(), Settings())
    assert (found.slowest_rank, found.late_seconds) == (1, pytest.approx(0.18))
    assert found.bound_seconds == pytest.approx(lower_bound(*([1.6 * each for each in part] for part in TIMES), [0.001] * 10))
    first, second = in_words(found, Settings())
    assert "200.0 ms of exposed communication (40 %), 180.0 ms of which are for rank 1, which computes longer" in first
    assert second == "rank 1 is slow, and no network changes that: give it less work, or a faster machine"


def test_a_rank_that_was_disturbed_for_a_while_is_not_slow() -> None:
    disturbed = {0: (0.3,) * PARTS_KEPT, 1: (*(0.6,) * (PARTS_KEPT - 1), 0.31)}
    steps = paced(0.5, own_by_rank=disturbed)
    assert not is_open(steps)
    found = assess(steps, MANIFEST, measured(25), job(), Settings())
    assert (found.slowest_rank, found.late_seconds) == (None, 0.0)


def test_a_rank_that_seems_slow_is_not_named_before_it_was_slow_for_long() -> None:
    few = paced(0.5, own_by_rank={0: (0.3,) * 3, 1: (0.48,) * 3})
    assert is_open(few)
    assert assess(few, MANIFEST, measured(25), job(), Settings()).slowest_rank is None
    assert not is_open(paced(0.5, own_by_rank=parts(0.3, 0.48)))
    assert not is_open(paced(0.5))


def test_noise_names_nobody() -> None:
    """Eight ranks whose parts vary by a tenth of a step, in a thousand jobs; a rank that is slow by half a step is found."""
    rng, named, found = random.Random(1), 0, 0
    for _ in range(1000):
        own = {rank: tuple(0.3 + rng.gauss(0, 0.05) for _ in range(PARTS_KEPT)) for rank in range(8)}
        named += assess(paced(0.5, own_by_rank=own), MANIFEST, None, job(8), Settings()).slowest_rank is not None
        own[5] = tuple(each + 0.25 for each in own[5])
        found += assess(paced(0.5, own_by_rank=own), MANIFEST, None, job(8), Settings()).slowest_rank == 5
    assert named <= 5
    assert found >= 900


def test_ranks_that_are_nearly_alike_name_nobody() -> None:
    found = assess(paced(0.5, own_by_rank=parts(0.31, 0.32)), MANIFEST, measured(25), job(), Settings())
    assert (found.slowest_rank, found.late_seconds) == (None, 0.0)


def test_a_loop_that_clips_has_the_bound_of_such_loops() -> None:
    for servers, share in ((0, 0.5), (2, 1.0)):
        found = assess(paced(0.6, needs_norm=True), MANIFEST, measured(25), job(servers=servers), Settings())
        assert found.bound_seconds == pytest.approx(clipped_bound(*TIMES, [1 / 25] * 10, share))


def test_late_averages_of_other_ranks_do_not_make_the_network_slow() -> None:
    """A contribution leaves at 50 MB/s, and the averages that leave this rank's shard as well: 25 MB/s of gradients."""

    def rate(found: Measured, where: JobFacts, slowest: float = 0.5) -> float | None:
        steps = paced(0.6, own_by_rank=parts(0.3, slowest))
        return assess(steps, MANIFEST, found, where, Settings()).seconds_per_byte

    late = measured(10, sending_seconds_per_byte=1e-6 / 50)
    assert rate(late, job()) == pytest.approx(1e-6 / 25)
    assert rate(late, job(servers=1)) == pytest.approx(1e-6 / 50)
    assert rate(late, job(4, workers=2)) == pytest.approx(1e-6 / 10)  # the leaders of two hosts send
    assert rate(measured(40, sending_seconds_per_byte=1e-6 / 50), job()) == pytest.approx(1e-6 / 40)
    assert rate(late, job(), slowest=0.3) == pytest.approx(1e-6 / 10)  # nobody is late
    apart = measured(10, sending_seconds_per_byte=1e-6 / 50, transfer_seconds_per_byte=1e-6 / 12)
    assert rate(apart, job(), slowest=0.3) == pytest.approx(1e-6 / 12)


def test_an_engine_that_shows_no_waits_and_steps_without_a_profile_leave_out_what_they_do_not_know() -> None:
    assert words(paced(0.6, None), measured(25)) == [
        "after 24 steps, a step takes 600.0 ms, and the network is busy for 400.0 ms of it; this engine does not show what it "
        "waits for"
    ]
    assert words(paced(0.6, None), measured(2000))[1:] == ["the network is busy for 0.8 % of a step: nothing can be gained"]
    assert words(paced(0.6, None), None) == ["after 24 steps, a step takes 600.0 ms"]
    assert words(paced(0.6), None) == [
        "after 24 steps, a step takes 600.0 ms: 300.0 ms of computation and 300.0 ms of exposed communication (50 %)"
    ]


def test_what_is_not_known_of_groups_that_share_the_network_is_left_out() -> None:
    found = assess(paced(0.6), MANIFEST, measured(25, is_shared=True), job(), Settings())
    assert found.seconds_per_byte == 1 / 25e6
    assert in_words(found, Settings()) == [
        "after 24 steps, a step takes 600.0 ms: 300.0 ms of computation and 300.0 ms of exposed communication (50 %); the "
        "bound is not known, since averages of other tensors use the network, too"
    ]
    assert words(paced(0.6, None), measured(25, is_shared=True)) == [
        "after 24 steps, a step takes 600.0 ms; the bound is not known, since averages of other tensors use the network, too"
    ]


def test_ranks_of_one_host_have_no_network_to_relieve() -> None:
    first, second = words(paced(0.6), measured(200), job(4, workers=1), partition="1MB")
    assert "with this model and network (200 MB/s of gradients within one machine) the bound is" in first
    assert second.endswith("above the bound: within one machine messages take the ranks' own processors, not a network")


def test_a_bound_above_the_step_itself_is_shown_as_the_step() -> None:
    first, second = words(paced(0.40), measured(25))
    assert first.endswith("the bound is 400.0 ms")
    assert second.startswith("that is within 5 % of the bound")


def test_the_line_at_the_end_has_the_last_steps() -> None:
    found = assess(paced(0.6), MANIFEST, measured(25), job(), Settings())
    now = Paced(1000, 0.5, 0.3, SchedulerConfig())
    assert last_lines(found, now) == [
        "1000 steps, at the end 500.0 ms each: 300.0 ms of computation and 200.0 ms of exposed communication (40 %); "
        "the bound was 430.0 ms"
    ]
    assert last_lines(found, paced(0.5, None)) == ["24 steps, at the end 500.0 ms each"]


def test_the_end_names_the_layers_that_were_waited_for_longest() -> None:
    waits = {f"layer {number}": 0.001 * (number + 1) for number in range(10)}
    found = assess(paced(0.6), MANIFEST, measured(25, waited_seconds=waits), job(), Settings())
    assert last_lines(found, paced(0.5))[1] == (
        "in the steps that were profiled, the forward waited for layer 9 (1.0 MB) 10.0 ms, layer 8 (1.0 MB) 9.0 ms, layer 7 "
        "(1.0 MB) 8.0 ms, layer 6 (1.0 MB) 7.0 ms, layer 5 (1.0 MB) 6.0 ms, 5 more 15.0 ms"
    )
    wait = FullWait("train.py:53", "gradients are read before step()", 0.25, 0.7)
    everything = assess(paced(0.6, full_wait=wait), MANIFEST, measured(25, waited_seconds=waits), job(), Settings())
    assert len(last_lines(everything, paced(0.5))) == 1  # one line of the loop waits for all of them
