from dataclasses import asdict, replace

import pytest

from bench.harness.measure import LayerTimes
from bench.harness.network import Network
from bench.harness.rows import Header, disturbed, make_rows, slowed_bound, wrong
from bench.harness.system import Setup

HEADER = Header("made up", 2, 0, 800e6, "800mbit tbf", True, None, "tcp", "abc")
SLOW = LayerTimes(["a", "b"], [0.1, 0.1], [0.2, 0.2], [20_000_000, 40_000_000], [[20_000_000], [40_000_000]])
FAST = LayerTimes(["a", "b"], [0.05, 0.05], [0.1, 0.1], [20_000_000, 40_000_000], [[20_000_000], [40_000_000]])
NETWORK = Network([100e6, 100e6], [])

COMMSCHED = Setup("ps", "partition 10 MB, credit 20 MB", 1e-3, 10_000_000, 20_000_000, None)
DDP = Setup("gloo", "buckets 25 MiB (default)", 3e-4)


def system(setup, seconds, difference=0.0, cpu=0.3):
    return {**asdict(setup), "seconds": seconds, "cpu_seconds": cpu, "max_difference": difference, "timeline": []}


def rank(network=NETWORK, layers=(SLOW, FAST), slowdowns=None, **systems):
    return {
        "slowdowns": slowdowns,
        "network": asdict(network),
        "layers": [asdict(each) for each in layers],
        "systems": {name.replace("_", "-"): found for name, found in systems.items()},
    }


def two_ranks(network=NETWORK, header=HEADER, difference=0.0):
    first = rank(network, commsched=system(COMMSCHED, [0.9, 0.8, 0.7]), ddp=system(DDP, [1.0, 1.1, 1.2]))
    second = rank(
        network, commsched=system(COMMSCHED, [0.8, 0.85, 0.85], difference, cpu=0.6), ddp=system(DDP, [1.1, 1.1, 1.0])
    )
    return make_rows(header, [first, second])


def test_a_row_has_every_key():
    keys = """system model workers servers bandwidth_bps link emulated transport lane config partition_bytes credit_bytes
    device slowdown slowed_bound_seconds
    gradient_bytes link_bytes_per_second per_message_seconds compute_seconds comm_seconds rho step_seconds step_samples
    clip bound_seconds unclipped_bound_seconds bound_overhead_seconds fifo_bound_seconds efficiency speedup_vs_ddp
    speedup_vs_ddp_tuned possible_speedup_vs_ddp
    exposed_seconds cpu_seconds_per_step max_difference correct stands_for simulated_seconds commit layers timeline"""
    assert [set(row) for row in two_ranks()] == [set(keys.split())] * 2


def test_figures():
    commsched, ddp = two_ranks()
    assert (commsched["system"], ddp["system"]) == ("commsched", "ddp")
    assert commsched["step_samples"] == [0.8, 0.85, 0.85]  # of the rank with the greater median
    assert commsched["step_seconds"] == {"median": 0.85, "low": 0.8, "high": 0.85, "count": 3}
    assert commsched["compute_seconds"] == pytest.approx(0.6)  # of the slow rank, whose bound is greater
    assert commsched["comm_seconds"] == pytest.approx(0.6)
    assert commsched["rho"] == pytest.approx(1)
    assert commsched["bound_seconds"] == pytest.approx(0.2 + 0.6 + 0.1)
    assert commsched["fifo_bound_seconds"] == pytest.approx(0.2 + 0.6 + 0.2)
    assert commsched["bound_overhead_seconds"] == pytest.approx(0.9 + 6e-3)  # six partitions
    assert commsched["efficiency"] == pytest.approx(0.9 / 0.85)
    assert commsched["exposed_seconds"] == pytest.approx(0.25)
    assert commsched["cpu_seconds_per_step"] == pytest.approx(0.15)
    assert commsched["speedup_vs_ddp"] == pytest.approx(1.1 / 0.85)
    assert commsched["possible_speedup_vs_ddp"] == pytest.approx(1.1 / 0.9)
    assert commsched["speedup_vs_ddp_tuned"] is None
    assert ddp["speedup_vs_ddp"] == 1
    assert ddp["bound_overhead_seconds"] is None
    assert ddp["per_message_seconds"] == 3e-4


def test_what_traffic_slows_down_is_in_a_bound_of_its_own():
    """The slow rank computes for 0.6 s, and gradients travel for 0.6 s: at 1.5 times as long, 0.2 s more of computation. The
    fast rank cannot be slower than that, unless it suffers much more."""
    [row] = make_rows(HEADER, [rank(slowdowns=[1.5, 1.0], commsched=system(COMMSCHED, [0.9, 0.8, 0.7]))])
    assert (row["slowdown"], row["bound_seconds"]) == (1.5, pytest.approx(0.9))
    assert row["slowed_bound_seconds"] == pytest.approx(0.9)  # T* has more than that
    [row] = make_rows(HEADER, [rank(slowdowns=[3.0, 1.0], commsched=system(COMMSCHED, [0.9, 0.8, 0.7]))])
    assert row["slowed_bound_seconds"] == pytest.approx(0.6 + 0.4)
    assert slowed_bound(0.9, [SLOW, FAST], 0.6, [1.0, 10.0]) == pytest.approx(0.9)
    assert slowed_bound(0.5, [SLOW, FAST], 0.6, [1.0, 10.0]) == pytest.approx(0.3 + 0.54)


def test_clipped_rows_have_the_bound_of_the_norm():
    """Layer b is ready at 0.2, and its halves take 0.2 each. The norm is known at 0.5, 0.1 after layer a is ready."""
    commsched, ddp = two_ranks(header=replace(HEADER, clip="norm"))
    assert commsched["clip"] == ddp["clip"] == "norm"
    assert commsched["unclipped_bound_seconds"] == two_ranks()[0]["bound_seconds"] == pytest.approx(0.9)
    assert commsched["bound_seconds"] == pytest.approx(0.9)  # the same here
    network = Network([100e6] * 2, [100e6] * 2)
    pushed, theirs = two_ranks(network, replace(HEADER, servers=2, clip="scaler"))
    assert pushed["bound_seconds"] == pytest.approx(pushed["fifo_bound_seconds"]) == pytest.approx(0.2 + 0.6 + 0.2)
    assert pushed["bound_overhead_seconds"] == pytest.approx(1.0 + 6e-3)
    assert theirs["bound_seconds"] == pytest.approx(0.9)  # collectives do not use the servers


def test_a_row_says_its_lane_and_commit():
    commsched, ddp = two_ranks()
    assert (commsched["lane"], commsched["config"]) == ("tcp", "partition 10 MB, credit 20 MB, tcp lane")
    assert (ddp["lane"], ddp["config"]) == (None, "buckets 25 MiB (default)")
    assert commsched["commit"] == "abc"


def test_cores_on_the_cluster_that_it_stands_for():
    """Ten times the bytes in a quarter of the time: 40 times the rate, and as many times the cores."""
    real = {"gradient_bytes": 600e6, "compute_seconds": 0.15, "bandwidth_bps": 40 * 800e6}
    commsched = two_ranks(header=replace(HEADER, stands_for=real))[0]
    cpu, step = commsched["cpu_seconds_per_step"], commsched["step_seconds"]["median"]
    assert commsched["stands_for"] == {**real, "host_cores": pytest.approx(cpu * 10 / (step / 4))}


def test_a_tensor_that_is_never_merged_is_a_message():
    whole = replace(COMMSCHED, partition_bytes=10**8, fusion_bytes=1)
    layers = replace(SLOW, tensors=[[10_000_000] * 2, [10_000_000] * 4])
    rows = make_rows(HEADER, [rank(layers=[layers] * 2, tictac=system(whole, [0.9]))] * 2)
    assert rows[0]["bound_overhead_seconds"] == pytest.approx(0.9 + 6e-3)


def test_collectives_do_not_use_the_servers():
    network = Network([100e6] * 2, [100e6])
    commsched, ddp = two_ranks(network, Header("made up", 2, 1, 800e6, "800mbit tbf", True, None))
    assert commsched["comm_seconds"] == pytest.approx(1.2)
    assert ddp["comm_seconds"] == pytest.approx(0.6)


def test_with_unequal_links_the_bound_is_that_of_the_best_placement():
    network = Network([100e6, 100e6, 50e6], [])
    row = two_ranks(network)[0]
    assert row["comm_seconds"] == pytest.approx(60 * 4 / 3 / 50)
    assert row["bound_seconds"] == pytest.approx(0.2 + 60 / 50 + 0.1)  # each worker carries each byte at least once


def test_wrong_weights_are_said():
    assert wrong(two_ranks()) == []
    assert wrong(two_ranks(difference=1e-4)) == []
    assert wrong(two_ranks(difference=2e-3)) == [
        "commsched is wrong: its weights differ from plain averaging by 0.002 of the change that training made"
    ]


def test_weights_that_are_not_finite_are_wrong():
    row = two_ranks(difference=float("inf"))[0]
    assert (row["max_difference"], row["correct"]) == (None, False)
    assert wrong([row]) == ["commsched is wrong: its weights are not finite, or training should have changed nothing"]


def test_a_row_of_before_there_was_a_verdict_is_judged():
    rows = [{"system": "p3", "max_difference": difference} for difference in (1e-5, 0.5)]
    assert wrong(rows) == ["p3 is wrong: its weights differ from plain averaging by 0.5 of the change that training made"]


def test_faster_than_the_bound_is_said():
    assert disturbed(two_ranks()) == [
        "commsched was faster than T*, so layers or links were disturbed while they were measured alone: measure again"
    ]


def test_of_asynchronous_training_neither_is_said():
    row = {"system": "a", "correct": None, "max_difference": 0.5, "step_seconds": {"high": 1.0}, "bound_seconds": 2.0}
    assert (wrong([row]), disturbed([row])) == ([], [])
    row["correct"] = False
    assert (len(wrong([row])), len(disturbed([row]))) == (1, 1)
