from itertools import accumulate

import pytest

from bench.engines import compare
from bench.engines.compare import Comparison, measure_rows, rows_of, text
from bench.engines.registry import systems_of
from bench.engines.turn import Trained
from bench.job import Outcome
from bench.layers import LayerTimes
from bench.train.links import Links
from bench.train.rows import Header
from bench.train.scaling import scale
from bench.workloads.uniform import make_profile
from commsched.core.errors import ConfigError

HEADER = Header("made up", 2, 0, 800e6, "800mbit tbf", True, None, "tcp", "abc")
LAYERS = LayerTimes(["a", "b"], [0.1, 0.1], [0.2, 0.2], [20_000_000, 40_000_000], [[20_000_000], [40_000_000]])


def rank(seconds, weights=(0.5, -2.0), rate=100e6, sizes=None):
    return {
        "seconds": seconds,
        "cpu_seconds": 0.25,
        "weights": list(weights),
        "network": {"worker_rates": [rate] * 2, "server_rates": []},
        "sizes": sizes,
    }


def rows(weights=(0.5, -2.0)):
    ours = [1_000_000, 4_000_000, 1e-3]
    turns = {
        "commsched": [[rank([0.8, 0.9], weights, sizes=ours)] * 2, [rank([1.0], sizes=ours)] * 2],
        "own": [[rank([1.1, 1.3], rate=90e6)] * 2, [rank([1.2]), rank([2.0, 2.0])]],
        "other": [[rank([3.0])] * 2],
    }
    return rows_of(HEADER, "jax", LAYERS, turns)


def test_figures():
    ours, own, other = rows()
    assert [row["system"] for row in (ours, own, other)] == ["commsched", "own", "other"]
    assert {row["engine"] for row in (ours, own, other)} == {"jax"}
    assert ours["step_samples"] == [0.8, 0.9, 1.0]  # of both turns
    assert own["step_seconds"]["median"] == 1.65  # of the slower rank: 1.1, 1.3, 2, 2
    assert ours["bound_seconds"] == pytest.approx(0.2 + 0.6 + 0.1)  # with the best rate that any turn found
    assert (ours["speedup_vs_own"], other["speedup_vs_own"]) == (pytest.approx(1.65 / 0.9), pytest.approx(1.65 / 3))
    assert (ours["transport"], own["transport"]) == ("ps", "its own")
    assert (ours["partition_bytes"], own["partition_bytes"]) == (1_000_000, None)
    assert ours["config"] == "partition 1 MB, credit 4 MB, tcp lane"
    assert ours["cpu_seconds_per_step"] == pytest.approx(0.25)
    assert all(row["correct"] for row in (ours, own, other))


def test_weights_that_differ_from_the_engines_own_are_wrong():
    ours, own, _ = rows(weights=(0.5, -2.002))
    assert (ours["correct"], own["correct"]) == (False, True)
    assert ours["max_difference"] == pytest.approx(1e-3)


def test_weights_that_are_missing_are_wrong():
    assert not rows(weights=(0.5,))[0]["correct"]


def test_the_table_names_the_engine():
    shown = text(rows())
    assert shown.startswith("EMULATED made up, 60.0 MB of gradients, 2 workers, ")
    assert "vs jax's best" in shown
    assert "vs ddp" not in shown


def test_an_unknown_engine_is_named():
    with pytest.raises(ConfigError, match="engine=theano: must be one of tensorflow, mxnet, jax"):
        systems_of("theano")


def comparison(**given):
    links = Links.of(2, 0, "500mbit")
    scaling = scale(make_profile(), 12.0, 1.0, min(links.rates), 1.0)
    fixed = {"scaling": scaling, "links": links, "rounds": 3, "settle": 3, "steps": 2, "partition": "auto", "credit": "auto"}
    return Comparison(**{"engine": "jax", "systems": (), "timeout_seconds": 60.0, **fixed, **given})


@pytest.fixture
def asked(monkeypatch):
    """What jobs were asked for, each as its system."""
    found = []

    def run_job(job, module, arguments):
        assert (module, job.workers, job.bandwidth) == ("bench.engines.rank", 2, "500mbit")
        found.append(arguments["system"])
        return Outcome([rank([1.0, 1.0])] * 2, "500mbit tbf")

    monkeypatch.setattr(compare, "run_job", run_job)
    monkeypatch.setattr(compare, "why_not_shaped", lambda links, uncapped: None)
    monkeypatch.setattr(compare, "systems_of", lambda engine: dict.fromkeys(("commsched", "own"), Trained))
    return found


def test_systems_take_turns_each_first_in_one(asked):
    measured = measure_rows(comparison())
    assert asked == ["commsched", "own", "own", "commsched", "commsched", "own"]
    assert [row["step_seconds"]["count"] for row in measured] == [6, 6]


def test_an_unknown_system_is_named_before_anything_starts(asked):
    with pytest.raises(ConfigError, match="systems: 'ddp': with jax there are commsched, own"):
        measure_rows(comparison(systems=("ddp",)))
    assert asked == []


def test_seconds_are_those_after_the_steps_that_settle(monkeypatch):
    from bench.engines import rank as module
    from commsched.session import Session

    ended = list(accumulate([10, 5, 5, 1, 2]))
    monkeypatch.setattr(module, "systems_of", lambda engine: {"own": lambda turn: Trained(ended, [1.0])})
    monkeypatch.setattr(module, "own_address", lambda: "here")
    monkeypatch.setattr(module, "measure_network", lambda *given: module_network())

    class Alone(Session):
        def __init__(self):
            self.rank, self.world_size = 0, 1

        def gather(self, value):
            return [value]

    found = module.rank_main(Alone(), assignment())
    assert found["seconds"] == [1, 2]
    with pytest.raises(RuntimeError, match="own was to train 6 steps, and told of 5"):
        module.rank_main(Alone(), {**assignment(), "steps": 3})


def module_network():
    from bench.train.network import Network

    return Network([1e6], [])


def assignment():
    profile = make_profile().to_record()
    sizes = {"partition": "auto", "credit": "auto", "nominal_rates": None, "capped": False}
    return {"engine": "jax", "system": "own", "profile": profile, "settle": 3, "steps": 2, **sizes}
