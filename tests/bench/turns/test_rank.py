"""What each rank's process does, with threads as ranks."""

from __future__ import annotations

from time import perf_counter

import pytest

from bench.harness import network
from bench.harness import system as harness_system
from bench.harness.loop import Loop
from bench.systems import SYSTEMS, names
from bench.turns import rank as train_rank
from bench.workloads import load_profile
from commsched.core.errors import TransportError
from commsched.core.scheduler import SchedulerConfig
from commsched.session.local import local_sessions
from commsched.testing.world import run_world

PROFILE = load_profile("uniform").scaled(nbytes=0.002, seconds=0.002)
ASSIGNMENT = {
    "workload": {"kind": "emulated", "profile": PROFILE.to_record()},
    "systems": ["commsched"],
    "rounds": 2,
    "steps": 3,
    "settle": 2,
    "carrier": {"transport": "local", "order": "agreed"},
    "bytes_scale": 1.0,
    "servers": 0,
    "nominal_rates": None,
    "capped": False,
    "server_pids": [],
}


class Corrupting:
    """A transport that changes a little the averages of all but small tensors, on this rank only."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def start(self, task, completion):
        self._inner.start(task, _Damage(completion) if task.nbytes >= 3000 else completion)


class _Damage:
    def __init__(self, completion):
        self.on_sent = completion.on_sent
        self._completion = completion

    def on_done(self, task):
        task.data[2] ^= 0x80  # the highest bit of the mantissa of the first element
        self._completion.on_done(task)


@pytest.fixture(autouse=True)
def _small_and_here(monkeypatch):
    monkeypatch.setattr(network, "UNSHAPED_BYTES", 300_000)
    monkeypatch.setattr(network, "_MESSAGE_BYTES", (100_000, 100_000))


def run_ranks(assignment, world_size=2, wrap_transport=None):
    sessions = local_sessions(world_size, SchedulerConfig(4000, 24_000), wrap_transport=wrap_transport)

    def rank(number):
        with sessions[number] as session:
            return train_rank.rank_main(session, assignment)

    try:
        return run_world(world_size, rank, timeout_seconds=300)
    finally:
        for session in sessions:
            session.abort("the test is over")


def test_the_processor_time_of_a_server_counts_once(monkeypatch):
    monkeypatch.setattr(harness_system, "cpu_seconds", lambda pids: len(pids) * perf_counter())
    first, second = run_ranks({**ASSIGNMENT, "servers": 1, "server_pids": [1]})
    assert first["systems"]["commsched"]["cpu_seconds"] > 0
    assert second["systems"]["commsched"]["cpu_seconds"] == 0


def test_every_system_on_commsched_trains_as_plain_averaging_does():
    chosen = [name for name in names() if SYSTEMS[name].is_on_commsched]
    for found in run_ranks({**ASSIGNMENT, "systems": chosen}, world_size=3):
        assert list(found["systems"]) == chosen
        for name, system in found["systems"].items():
            assert system["max_difference"] < 1e-5, name
            assert len(system["seconds"]) == 6, name
            assert min(system["seconds"]) >= PROFILE.compute_seconds, name
            assert system["cpu_seconds"] > 0, name
            assert {entry["track"] for entry in system["timeline"]} >= {"forward", "backward", "network"}, name
        sizes = {name: (system["partition_bytes"], system["credit_bytes"]) for name, system in found["systems"].items()}
        assert sizes["commsched"] == sizes["fifo"] == sizes["wfbp"] == sizes["serial"] == (4000, 24_000)
        assert sizes["p3"] == (160_000, 160_000)
        assert sizes["tictac"] == (256 * 2**20, 24_000)


@pytest.mark.parametrize("clip", ["norm", "scaler"])
def test_systems_that_clip_train_as_plain_averaging_does(clip):
    chosen = ["commsched", "fifo", "p3", "wfbp"]
    for found in run_ranks({**ASSIGNMENT, "systems": chosen, "clip": clip, "rounds": 1}):
        for name in chosen:
            assert found["systems"][name]["max_difference"] < 1e-5, name


def test_systems_that_do_not_clip_are_seen(monkeypatch):
    monkeypatch.setattr("bench.harness.system.Context.make_loop", lambda context: Loop())
    for found in run_ranks({**ASSIGNMENT, "clip": "norm", "rounds": 1}):
        assert found["systems"]["commsched"]["max_difference"] > 1e-2


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # it leaves the layers' clock uncompiled
def test_a_compiled_model_trains_as_plain_averaging_does():
    """One rank: ranks of one process would compile for each other."""
    (found,) = run_ranks({**ASSIGNMENT, "compile": True, "rounds": 1}, world_size=1)
    assert found["systems"]["commsched"]["max_difference"] < 1e-5


def test_a_timeline_is_that_of_the_systems_own_configuration():
    found = run_ranks({**ASSIGNMENT, "systems": ["commsched", "serial", "tictac"], "rounds": 1})[0]["systems"]
    gradients = {
        name: [entry for entry in system["timeline"] if entry["track"] == "network" and entry["name"] != "flags"]
        for name, system in found.items()
    }
    assert len(gradients["commsched"]) == 24 * 2  # 6 kB in partitions of 4 kB
    assert len(gradients["tictac"]) == 24
    last_gradient = max(entry["stop"] for entry in found["serial"]["timeline"] if entry["track"] == "backward")
    assert min(entry["ready"] for entry in gradients["serial"]) >= last_gradient
    assert [entry["name"] for entry in found["commsched"]["timeline"] if entry["track"] == "forward"] == [
        f"layer{index}" for index in range(24)
    ]


def test_the_network_and_the_layers_are_the_same_from_every_rank():
    first, second = run_ranks(ASSIGNMENT)
    assert first["network"] == second["network"]
    assert first["layers"] == second["layers"]
    assert len(first["layers"]) == 2
    assert first["layers"][0]["nbytes"] == [layer.nbytes for layer in PROFILE.layers]
    assert first["layers"][0]["tensors"] == [[layer.nbytes] for layer in PROFILE.layers]
    assert all(rate > 0 for rate in first["network"]["worker_rates"])


def test_a_cap_of_the_transport_is_the_rate_of_the_link():
    found = run_ranks({**ASSIGNMENT, "nominal_rates": [5e6, 5e6, 4e6], "servers": 1, "capped": True})[0]
    assert found["network"]["worker_rates"] == [5e6, 5e6]
    assert found["network"]["server_rates"] == [4e6]


def test_ranks_of_a_launcher_say_what_traffic_slows_down(capsys):
    first, second = run_ranks({**ASSIGNMENT, "launched": True, "progress": "", "rounds": 1})
    assert first["slowdowns"] == second["slowdowns"]
    assert len(first["slowdowns"]) == 2
    assert min(first["slowdowns"]) >= 1
    said = capsys.readouterr().out
    assert said.startswith("measuring the links\ntiming the layers without communication\n")
    assert said.count("turn 1 of 1: commsched, ") == 1


def test_wrong_averages_are_seen():
    for found in run_ranks(ASSIGNMENT, wrap_transport=Corrupting):
        assert found["systems"]["commsched"]["max_difference"] > 1e-4


def test_a_difference_of_any_turn_counts(monkeypatch):
    differences = iter([0.25, 0.0])
    monkeypatch.setattr(train_rank, "largest_difference", lambda model, wanted, initial: next(differences))
    [found] = run_ranks(ASSIGNMENT, world_size=1)
    assert found["systems"]["commsched"]["max_difference"] == 0.25


def test_another_configuration_than_was_wanted_is_never_measured(monkeypatch):
    monkeypatch.setattr("bench.harness.averaging.ConfigBarrier.switch", lambda barrier, config: None)
    with pytest.raises(TransportError, match=r"rank \d runs SchedulerConfig\(.*, but SchedulerConfig\(.* was to be measured"):
        run_ranks({**ASSIGNMENT, "systems": ["p3"]})
