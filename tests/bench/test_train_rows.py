from dataclasses import asdict

import pytest

from bench.layer_times import LayerTimes
from bench.message_cost import MessageCost
from bench.network import Network
from bench.systems import Setup
from bench.train_rows import Header, disturbed, make_rows, wrong

HEADER = Header("made up", 2, 0, 800e6, "800mbit tbf", True, None)
SLOW = LayerTimes(["a", "b"], [0.1, 0.1], [0.2, 0.2], [20_000_000, 40_000_000])
FAST = LayerTimes(["a", "b"], [0.05, 0.05], [0.1, 0.1], [20_000_000, 40_000_000])
NETWORK = Network([100e6, 100e6], [], MessageCost(1e-3, 2e-3))

COMMSCHED = Setup("ps", "partition 10 MB, credit 20 MB", 1e-3, 10_000_000, 20_000_000, None)
DDP = Setup("gloo", "buckets 25 MiB (default)", 3e-4)


def system(setup, seconds, difference=0.0, cpu=0.3):
    return {**asdict(setup), "seconds": seconds, "cpu_seconds": cpu, "max_difference": difference, "timeline": []}


def rank(network=NETWORK, layers=(SLOW, FAST), **systems):
    return {
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
    keys = """system model workers servers bandwidth_bps link emulated transport config partition_bytes credit_bytes
    gradient_bytes link_bytes_per_second per_message_seconds compute_seconds comm_seconds rho step_seconds step_samples
    bound_seconds bound_overhead_seconds fifo_bound_seconds efficiency speedup_vs_ddp speedup_vs_ddp_tuned
    possible_speedup_vs_ddp
    exposed_seconds cpu_seconds_per_step max_difference stands_for simulated_seconds layers timeline"""
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


def test_collectives_do_not_use_the_servers():
    network = Network([100e6] * 2, [100e6], MessageCost(0.0, 0.0))
    commsched, ddp = two_ranks(network, Header("made up", 2, 1, 800e6, "800mbit tbf", True, None))
    assert commsched["comm_seconds"] == pytest.approx(1.2)
    assert ddp["comm_seconds"] == pytest.approx(0.6)


def test_with_unequal_links_the_bound_is_that_of_the_best_placement():
    network = Network([100e6, 100e6, 50e6], [], MessageCost(0.0, 0.0))
    row = two_ranks(network)[0]
    assert row["comm_seconds"] == pytest.approx(60 * 4 / 3 / 50)
    assert row["bound_seconds"] == pytest.approx(0.2 + 60 / 50 + 0.1)  # each worker carries each byte at least once


def test_wrong_weights_are_said():
    assert wrong(two_ranks()) == []
    assert wrong(two_ranks(difference=1e-4)) == []
    assert wrong(two_ranks(difference=2e-3)) == [
        "commsched is wrong: from plain averaging its weights differ by 0.002 of what they were trained"
    ]


def test_faster_than_the_bound_is_said():
    assert disturbed(two_ranks()) == [
        "commsched was faster than T*, so layers or links were disturbed while they were measured alone: measure again"
    ]
