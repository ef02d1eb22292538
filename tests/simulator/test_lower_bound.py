"""The bounds and the times of the usual orders, compared with a link that is followed event by event."""

from __future__ import annotations

import heapq
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched.simulator.lower_bound import clipped_bound, lower_bound, partitioned_bound, wfbp

from .closed_forms import bucketed_wfbp, dear, serial, window_bound

layers = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12).map(
    lambda rows: tuple(list(column) for column in zip(*rows))
)


def simulate(forward: list[int], backward: list[int], comm: list[int], front_first: bool) -> int:
    """One iteration, event by event: a link that always sends the best ready layer, and preempts for a better one."""
    count = len(forward)
    arrivals, now = [], 0
    for layer in reversed(range(count)):
        now += backward[layer]
        arrivals.append((now, layer))
    left, sent_at = list(comm), [0] * count
    ready: list[tuple[int, int]] = []
    now = 0
    while arrivals or ready:
        if not ready:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            layer = arrivals.pop(0)[1]
            heapq.heappush(ready, (layer if front_first else -layer, layer))
        layer = ready[0][1]
        until = min(now + left[layer], arrivals[0][0]) if arrivals else now + left[layer]
        left[layer] -= until - now
        now = until
        if left[layer] == 0:
            heapq.heappop(ready)
            sent_at[layer] = now
    clock = sum(backward)
    barrier = max(sent_at) if not front_first else 0
    for layer in range(count):
        clock = max(clock, sent_at[layer], barrier) + forward[layer]
    return clock


@given(layers)
def test_lower_bound_is_what_preemptive_front_first_takes(times):
    assert lower_bound(*times) == simulate(*times, front_first=True)


@given(layers)
def test_wfbp_is_what_backward_order_with_a_barrier_takes(times):
    assert wfbp(*times) == simulate(*times, front_first=False)


@given(layers)
def test_bounds_are_in_order(times):
    forward, backward, comm = times
    assert max(sum(forward) + sum(backward), sum(comm)) <= lower_bound(*times) <= wfbp(*times) <= serial(*times)
    assert lower_bound(*times) * 2 >= serial(*times)


@given(layers)
def test_priority_gains_no_more_than_the_forward(times):
    forward, backward, _ = times
    compute = sum(forward) + sum(backward)
    assert wfbp(*times) * compute <= lower_bound(*times) * (compute + sum(forward))


@pytest.mark.parametrize(
    ("rho", "serial_gain", "wfbp_gain"),
    [
        (Fraction(1, 4), Fraction(5, 4), 1),
        (Fraction(4, 5), Fraction(9, 5), Fraction(17, 15)),
        (1, 2, Fraction(4, 3)),
        (2, Fraction(3, 2), Fraction(7, 6)),
        (5, Fraction(6, 5), Fraction(16, 15)),
    ],
)
def test_uniform_layers_gain_what_theory_says(rho, serial_gain, wfbp_gain):
    """``b = 2f``, many equal layers, ``rho`` = communication / compute: the limits for infinitely many layers."""
    count = 3000
    forward, backward = [Fraction(1, count)] * count, [Fraction(2, count)] * count
    comm = [Fraction(3, count) * rho] * count
    best = lower_bound(forward, backward, comm)
    assert serial(forward, backward, comm) / best == pytest.approx(float(serial_gain), rel=2e-3)
    assert wfbp(forward, backward, comm) / best == pytest.approx(float(wfbp_gain), rel=2e-3)


def test_a_heavy_first_layer_cannot_be_hidden():
    assert lower_bound([1, 1, 1], [2, 2, 2], [10, 0, 0]) == 6 + 10 + 3  # input-bound: Tb + c_1 + Tf


def test_a_heavy_last_layer_hides_behind_the_rest_of_backward():
    assert lower_bound([1, 1, 1], [2, 2, 2], [0, 0, 6]) == 9
    assert lower_bound([1, 1, 1], [2, 2, 2], [0, 0, 10]) == 2 + 10 + 1  # bandwidth-bound: b_L + Tc + f_L


def test_an_interior_layer_can_bind():
    assert lower_bound([1, 1, 1], [2, 2, 2], [1, 8, 0]) == 4 + 9 + 2


def test_without_communication_nothing_but_compute_is_left():
    times = [1.0, 2.0], [3.0, 4.0], [0.0, 0.0]
    assert lower_bound(*times) == wfbp(*times) == serial(*times) == 10.0


def test_no_layers_take_no_time():
    assert lower_bound([], [], []) == clipped_bound([], [], []) == wfbp([], [], []) == serial([], [], []) == 0


@pytest.mark.parametrize("formula", [lower_bound, clipped_bound, wfbp])
def test_impossible_times_are_refused(formula):
    with pytest.raises(ValueError, match="forward, backward and communication have 2, 1 and 2 layers"):
        formula([1, 1], [1], [1, 1])
    with pytest.raises(ValueError, match="a time is negative"):
        formula([1], [-1], [1])


@given(layers)
def test_one_bucket_for_each_layer_is_wfbp(times):
    forward, backward, comm = times
    buckets = list(reversed(list(enumerate(comm))))
    assert bucketed_wfbp(forward, backward, buckets) == wfbp(*times)
    assert bucketed_wfbp(forward, backward, buckets, 1) <= wfbp(*times) + len(comm)


@given(layers, st.integers(0, 3))
def test_one_bucket_is_serial(times, overhead):
    forward, backward, comm = times
    assert bucketed_wfbp(forward, backward, [(0, sum(comm))], overhead) == serial(*times) + overhead


@given(layers)
def test_dear_stands_between_the_bound_and_no_overlap(times):
    assert lower_bound(*times) <= dear(*times) <= serial(*times)


@given(layers)
def test_dear_is_no_slower_than_wfbp_if_backward_is_at_most_twice_forward(times):
    forward, _, comm = times
    backward = [2 * seconds for seconds in forward]
    assert dear(forward, backward, comm) <= wfbp(forward, backward, comm)


@given(layers, st.integers(0, 3))
def test_whole_layers_with_overhead_are_layers_that_take_longer(times, overhead):
    forward, backward, comm = times
    found = partitioned_bound(forward, backward, list(enumerate(comm)), overhead)
    assert found == lower_bound(forward, backward, [seconds + overhead for seconds in comm])


@given(layers)
def test_cutting_and_merging_cost_what_they_do(times):
    """Pieces of a layer without overhead change nothing, and all layers as one are sent after backward."""
    forward, backward, comm = times
    halves = [(layer, seconds / 2) for layer, seconds in enumerate(comm) for _ in range(2)]
    assert partitioned_bound(forward, backward, halves) == lower_bound(*times)
    assert partitioned_bound(forward, backward, [(0, sum(comm))]) == serial(*times)


def test_the_window_by_hand():
    times = [1, 1], [1, 1]
    partitions = [(0, 2.0), (1, 2.0), (1, 2.0)]
    best = partitioned_bound(*times, partitions, 0.5)
    assert window_bound(*times, partitions, 4.0, 0.5) == best + 4.0 + 2 * 0.5
    assert window_bound(*times, partitions, 0.0, 0.5) == best + 2.0 + 0.5  # one is always committed
    assert window_bound(*times, [], 4.0) == 4


def test_bounds_of_a_cut_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="a partition begins in layer 2, but the layers are 0 to 1"):
        partitioned_bound([1, 1], [1, 1], [(2, 1.0)])
    with pytest.raises(ValueError, match="a time is negative"):
        partitioned_bound([1, 1], [1, 1], [(0, -1.0)])


# --- loops that need the norm of all averages ---


def clipped_step(forward: list[int], backward: list[int], halves: list[int], gathers_wait: bool = False) -> int:
    """One iteration of a clipped loop, second by second: ready first halves, then second halves from the front.

    ``gathers_wait``: no second half is sent before the last first half.
    """
    layers = range(len(forward))
    ready = [sum(backward[layer:]) for layer in layers]
    first, second = list(halves), list(halves)
    sent_at, normed, now = [0] * len(forward), 0, 0
    while any(second):
        summed = [layer for layer in layers if first[layer] and ready[layer] <= now]
        gathered = [layer for layer in layers if second[layer] > first[layer]]
        now += 1
        if summed:
            first[summed[0]] -= 1
            normed = now
        elif gathered and not (gathers_wait and any(first)):
            second[gathered[0]] -= 1
            sent_at[gathered[0]] = now
    return forward_end(forward, backward, halves, normed, sent_at)


def forward_end(forward, backward, halves, normed, sent_at):
    clock = sum(backward)
    for seconds, half, sent in zip(forward, halves, sent_at):
        clock = (max(clock, normed, sent) if half else clock) + seconds
    return clock


def fastest_clipped_step(forward: list[int], backward: list[int], halves: list[int]) -> int:
    """The same by trying everything: in each second, any half that is there, or nothing."""
    layers = range(len(forward))
    ready = [sum(backward[layer:]) for layer in layers]
    states = {(tuple(halves), tuple(halves), 0, (0,) * len(halves))}  # first and second halves left, times of their ends
    best = None
    for now in range(sum(backward) + 2 * sum(halves) + 1):
        for _, second, normed, sent_at in states:
            if not any(second):
                took = forward_end(forward, backward, halves, normed, sent_at)
                best = took if best is None else min(best, took)
        following = set()
        for first, second, normed, sent_at in states:
            following.add((first, second, normed, sent_at))
            for layer in layers:
                if first[layer] and ready[layer] <= now:
                    following.add((less(first, layer), second, now + 1, sent_at))
                if second[layer] > first[layer]:
                    ends = (*sent_at[:layer], now + 1, *sent_at[layer + 1 :])
                    following.add((first, less(second, layer), normed, ends))
        states = following
    return best


def less(left, layer):
    return (*left[:layer], left[layer] - 1, *left[layer + 1 :])


few_halves = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=3).filter(
    lambda rows: sum(halves for _, _, halves in rows) <= 4
)


@settings(max_examples=60, deadline=None)
@given(few_halves.map(lambda rows: tuple(list(column) for column in zip(*rows))))
def test_no_schedule_of_a_clipped_loop_is_faster_than_its_bound(times):
    forward, backward, halves = times
    whole = [2 * half for half in halves]
    assert clipped_bound(forward, backward, whole) == fastest_clipped_step(*times)


@given(layers)
def test_first_halves_first_reach_the_clipped_bound(times):
    forward, backward, halves = times
    assert clipped_bound(forward, backward, [2 * half for half in halves]) == clipped_step(*times)


@given(layers, st.sampled_from([0, Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), 1]))
def test_clipped_loops_are_between_the_bound_and_the_barrier(times, share):
    assert lower_bound(*times) <= clipped_bound(*times, share) <= wfbp(*times)
    assert clipped_bound(*times) <= dear(*times)
    assert clipped_bound(*times, 0) == lower_bound(*times)
    if times[2][0]:  # the barrier holds up a first layer without parameters too, and the norm does not
        assert clipped_bound(*times, 1) == wfbp(*times)


@given(layers)
def test_pieces_of_layers_have_the_clipped_bound_of_the_layers(times):
    forward, backward, comm = times
    pieces = [(layer, seconds / 4) for layer, seconds in enumerate(comm) if seconds for _ in range(4)]
    assert partitioned_bound(forward, backward, pieces, first_share=0.5) == clipped_bound(*times)


@pytest.mark.parametrize("forward_share", [Fraction(1, 3), Fraction(1, 2), Fraction(3, 4)])
@pytest.mark.parametrize("rho", [Fraction(1, 2), 1, Fraction(4, 3), 2, 4])
def test_equal_layers_pay_for_the_norm_only_if_backward_is_short(rho, forward_share):
    """The limits for infinitely many layers. Phases apart (DeAR) lose what the link could carry in backward."""
    count = 3000
    forward, backward = [forward_share / count] * count, [(1 - forward_share) / count] * count
    comm = [Fraction(1, count) * rho] * count
    norm_at = max(1 - forward_share, rho / 2)
    assert clipped_bound(forward, backward, comm, Fraction(1, 2)) == pytest.approx(
        float(max(1, rho, norm_at + forward_share)), rel=2e-3
    )
    assert dear(forward, backward, comm) == pytest.approx(float(norm_at + max(forward_share, rho / 2)), rel=2e-3)


def test_the_norm_waits_for_a_heavy_first_layer_and_the_others_follow_it():
    """4 s of layer 1 end at 3 + 4 = 7 with the norm; its second half ends at 11. Layers 2 and 3 were sent in backward."""
    assert clipped_bound([1, 1, 1], [1, 1, 1], [8, 0, 1]) == 3 + 8 + 3
    assert clipped_bound([1, 1, 1], [1, 1, 1], [2, 0, 12]) == 1 + 6 + 1 + 7 + 1 == lower_bound([1, 1, 1], [1, 1, 1], [2, 0, 12])
    assert clipped_bound([9, 1, 1], [1, 1, 1], [2, 0, 12]) == 1 + 6 + 1 + 1 + 11  # layer 1 waits for the norm, at 8


def test_a_share_is_a_share():
    with pytest.raises(ValueError, match="a share is from 0 to 1, not 2"):
        clipped_bound([1], [1], [1], 2)
