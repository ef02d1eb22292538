import sys

import pytest

from bench.engines import compare
from bench.engines import rank as module
from bench.engines.compare import Comparison, measure_rows, rows_of, text
from bench.engines.emulated import plain_averaging
from bench.engines.turn import ENGINES, Turn, systems_of
from bench.harness.job import Outcome
from bench.harness.links import Links
from bench.harness.measure import LayerTimes
from bench.harness.network import Network
from bench.harness.rows import Header, disturbed, wrong
from bench.harness.scaling import scale
from bench.workloads import load_profile
from commsched.core.errors import ConfigError
from commsched.session.session import Session

HEADER = Header("made up", 2, 0, 800e6, "800mbit tbf", True, None, "tcp", "abc")
LAYERS = LayerTimes(["a", "b"], [0.1, 0.1], [0.2, 0.2], [20_000_000, 40_000_000], [[20_000_000], [40_000_000]])


def rank(seconds, difference=1e-6, rate=100e6, sizes=None):
    return {
        "seconds": seconds,
        "cpu_seconds": 0.25,
        "max_difference": difference,
        "network": {"worker_rates": [rate] * 2, "server_rates": []},
        "sizes": sizes,
    }


def rows(difference=1e-6):
    ours = [1_000_000, 4_000_000]
    turns = {
        "commsched": [[rank([0.8, 0.9], difference, sizes=ours)] * 2, [rank([1.0], sizes=ours)] * 2],
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


def test_turns_that_chose_other_sizes_are_all_named():
    turns = {"commsched": [[rank([1.0], sizes=[1_000_000, 4_000_000])] * 2, [rank([1.0], sizes=[2_000_000, 4_000_000])] * 2]}
    [row] = rows_of(HEADER, "jax", LAYERS, turns)
    assert row["config"].startswith("partition 1 MB, credit 4 MB and partition 2 MB, credit 4 MB")
    assert (row["transport"], row["partition_bytes"], row["credit_bytes"]) == ("ps", None, None)


def test_weights_that_differ_from_plain_averaging_are_wrong():
    ours, own, _ = found = rows(difference=2e-4)
    assert (ours["correct"], own["correct"]) == (False, True)
    assert ours["max_difference"] == 2e-4  # the largest of all turns
    assert wrong(found) == [
        "commsched is wrong: its weights differ from plain averaging by 0.0002 of the change that training made"
    ]


def test_asynchronous_training_is_shown_but_not_compared():
    turns = {name: [[rank([seconds], difference)] * 2] for name, seconds, difference in SYSTEMS_AND_ASYNCHRONOUS}
    ours, own, asynchronous = found = rows_of(HEADER, "jax", LAYERS, turns)
    assert ours["speedup_vs_own"] == pytest.approx(1.5 / 1.0)  # not of what is faster, and trains otherwise
    assert (asynchronous["speedup_vs_own"], asynchronous["correct"], asynchronous["max_difference"]) == (None, None, None)
    assert asynchronous["config"] == "its default, asynchronous: other weights"
    assert own["correct"]
    assert wrong(found) == disturbed(found) == []  # although it took less than T*, 0.9 s


SYSTEMS_AND_ASYNCHRONOUS = [("commsched", 1.0, 1e-6), ("own", 1.5, 1e-6), ("asynchronous", 0.5, None)]


def test_the_table_names_the_engine():
    shown = text(rows())
    assert shown.startswith("EMULATED made up, 60.0 MB of gradients, 2 workers, ")
    assert "vs jax's best" in shown
    assert "vs ddp" not in shown


def test_an_unknown_engine_is_named():
    with pytest.raises(ConfigError, match="engine=theano: must be one of tensorflow, mxnet, jax"):
        systems_of("theano")


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_is_not_installed_says_how_to_get_it(name, monkeypatch):
    monkeypatch.delitem(sys.modules, f"bench.engines.{name}", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    hint = f'engine={name}: .*: pip install "commsched\\[{name}\\]", or .*\\.venv-{name}/bin/python after make test'
    with pytest.raises(ConfigError, match=hint):
        systems_of(name)


def test_another_missing_module_is_no_missing_engine(monkeypatch):
    monkeypatch.setitem(sys.modules, "bench.engines.jax", None)
    with pytest.raises(ModuleNotFoundError, match=r"bench\.engines\.jax"):
        systems_of("jax")


def comparison(**given):
    links = Links.of(2, 0, "500mbit")
    scaling = scale(load_profile("uniform"), 12.0, 1.0, min(links.rates), 1.0)
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
    monkeypatch.setattr(compare, "why_not_shaped", lambda links: None)
    monkeypatch.setattr(compare, "systems_of", lambda engine: dict.fromkeys(("commsched", "own")))
    return found


def test_systems_take_turns_each_first_in_one(asked):
    measured = measure_rows(comparison())
    assert asked == ["commsched", "own", "own", "commsched", "commsched", "own"]
    assert [row["step_seconds"]["count"] for row in measured] == [6, 6]


def test_an_unknown_system_is_named_before_anything_starts(asked):
    with pytest.raises(ConfigError, match="systems: 'ddp': with jax there are commsched, own"):
        measure_rows(comparison(systems=("ddp",)))
    assert asked == []


def test_an_engines_own_averaging_is_not_compared_with_ranks_that_limit_their_rate(asked, monkeypatch):
    monkeypatch.setattr(compare, "why_not_shaped", lambda links: "shaped links need root")
    with pytest.raises(ConfigError, match=r"systems: own would use the whole network .* but shaped links need root"):
        measure_rows(comparison())
    assert asked == []


def test_seconds_are_those_after_the_steps_that_settle(monkeypatch):
    ends = [10, 15, 20, 21, 23]
    trained = run_alone(monkeypatch, lambda turn: told(turn, ends, 2.0))
    assert trained["seconds"] == [1, 2]
    assert trained["cpu_seconds"] == 2.0  # of a step, without those before
    assert trained["max_difference"] == pytest.approx(0.0)
    assert run_alone(monkeypatch, lambda turn: told(turn, ends, 2.0) and None)["max_difference"] is None
    with pytest.raises(RuntimeError, match="own was to train 5 steps, and reported 4"):
        run_alone(monkeypatch, lambda turn: told(turn, ends[:-1], 2.0))


def told(turn: Turn, ends, cpu_seconds):
    """As if the steps had ended then, each after that much processor time; the first ones took more."""
    turn.steps.ended += ends
    turn.steps.cpu_seconds += [100 * step if step < 2 else 100 + cpu_seconds * step for step in range(len(ends))]
    return plain_averaging(turn.profile, turn.count, 1)


def run_alone(monkeypatch, train):
    monkeypatch.setattr(module, "systems_of", lambda engine: {"own": train})
    monkeypatch.setattr(module, "own_address", lambda: "here")
    monkeypatch.setattr(module, "measure_network", lambda *given: Network([1e6], []))
    return module.rank_main(Alone(), assignment())


class Alone(Session):
    def __init__(self):
        self.rank, self.world_size = 0, 1

    def gather(self, value):
        return [value]


def assignment():
    profile = load_profile("uniform").to_record()
    sizes = {"chooses_sizes": False, "nominal_rates": None, "capped": False}
    return {"engine": "jax", "system": "own", "profile": profile, "settle": 3, "steps": 2, **sizes}
