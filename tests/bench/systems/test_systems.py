"""The files of systems, and what each system asks of the scheduler or of DDP."""

import argparse
import re
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import simulate, systems
from bench.harness import ddp
from bench.harness.loop import Loop
from bench.harness.system import Carrier
from bench.report import group
from bench.systems import SYSTEMS, ddp_tuned
from bench.workloads.compiled import CompiledWorkload
from commsched.core.errors import ConfigError
from commsched.core.scheduler import MAX_PARTITION_BYTES, SchedulerConfig

FILES = sorted(Path(systems.__file__).parent.glob("[!_]*.py"))


def test_names_are_those_of_the_files():
    assert {"commsched", "ddp", "ddp-tuned", "fifo", "p3", "serial", "tictac", "wfbp"} <= set(systems.names())
    assert set(SYSTEMS) == {path.stem.replace("_", "-") for path in FILES}
    assert {"ddp", "ddp-tuned"} <= {name for name in systems.names() if not SYSTEMS[name].is_on_commsched}


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_each_file_of_the_folder_is_a_whole_system(path):
    name, text = path.stem.replace("_", "-"), path.read_text()
    system = SYSTEMS[name]
    assert text.startswith(f'"""{name}: ')
    assert re.fullmatch("#[0-9A-F]{6}", system.colour)
    assert len(system.marker) == 1
    assert system.simulated is not None
    assert (system.make_system is None) == ("It is only simulated." in text)


def test_every_system_has_a_row_in_the_docs():
    page = Path(systems.__file__).parents[2] / "docs" / "benchmarks.md"
    assert [name for name in SYSTEMS if f"\n| `{name}` | " not in page.read_text()] == []


def test_no_two_systems_look_alike():
    for of_all in zip(*((system.order, system.colour, system.marker) for system in SYSTEMS.values())):
        assert len(set(of_all)) == len(FILES)


def test_one_more_file_is_one_more_system(tmp_path, monkeypatch):
    """It can be trained, simulated and drawn, and nothing else names it."""
    (tmp_path / "newest_one.py").write_text(
        "from bench.harness.simulated import PartitionRules\n"
        "from bench.harness.system import SystemInfo\n"
        "SYSTEM = SystemInfo(5, '#123456', '*', PartitionRules('priority'), lambda context: context)\n"
    )
    monkeypatch.setattr(systems, "__path__", [*systems.__path__, str(tmp_path)])
    try:
        for module in (systems, simulate, group):
            monkeypatch.setattr(module, "SYSTEMS", systems._found())
    finally:
        sys.modules.pop("bench.systems.newest_one")
    assert "newest-one" in systems.names()
    assert systems.parse("newest-one:gloo+rsag").carrier == Carrier("gloo", "auto", "rsag")
    assert systems.make("newest-one", "its context") == "its context"
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    assert parser.parse_args(["--systems", "newest-one,ddp"]).systems == ("newest-one", "ddp")
    assert group.look("newest-one") == group.Look("#123456", "*", "-")
    assert group.system_order("newest-one") < group.system_order("serial")


@pytest.mark.parametrize("name", ["horovod", "context", "ddp_tuned", ""])
def test_what_is_not_there_is_said(name):
    with pytest.raises(ConfigError, match=f"systems: '{name}' is unknown; there are: {', '.join(systems.names())}"):
        systems.require(name)


def test_buckets_are_torchs_own_for_a_model_of_full_size():
    assert ddp.default_buckets(1.0) == ({}, "buckets 25 MiB (default)")


def test_buckets_shrink_like_the_bytes():
    assert ddp.default_buckets(0.5) == ({"bucket_cap_mb_list": [0.5, 12.5]}, "buckets 12.5 MiB (default, scaled)")


def test_an_older_torch_scales_all_buckets_alike_and_says_so(monkeypatch):
    monkeypatch.setattr(ddp, "_OPTIONS", {})
    assert ddp.default_buckets(0.5) == ({"bucket_cap_mb": 12.5}, "buckets 12.5 MiB (default, scaled), the first too")


class Context:
    """Of a model of 256 MiB; ``bytes_scale`` is what DDP's default buckets are scaled by."""

    bytes_scale = 1.0

    class workload:
        @staticmethod
        def make_model():
            return Context

    @staticmethod
    def parameters():
        return [SimpleNamespace(nbytes=2**28)]


@pytest.fixture
def tuned(monkeypatch):
    """A function of what a step takes by MiB of buckets: the sizes in the order of their trials, and what was built."""

    def tune(seconds):
        tried = []

        def trial(context, arguments, words):
            size = arguments.get("bucket_cap_mb", 25)
            tried.append(size)
            return seconds(size, tried.count(size))

        monkeypatch.setattr(ddp_tuned, "_trial", trial)
        monkeypatch.setattr(ddp, "DdpSystem", lambda context, arguments, words: (arguments, words))
        return tried, ddp_tuned.make_system(Context)

    return tune


def test_tuned_ddp_takes_the_fastest_and_candidates_take_turns(tuned):
    """One slow step in each trial does not decide."""
    tried, built = tuned(lambda size, turn: [abs(size - 32), 999.0, abs(size - 32)])
    assert tried == [25, 256, 128, 64, 32, 16, 8] * 2
    assert built == ({"bucket_cap_mb": 32.0}, "buckets 32 MiB; best of 7")


def test_smaller_buckets_are_tried_while_the_smallest_is_the_best(tuned):
    tried, built = tuned(lambda size, turn: [abs(size - 4)])
    assert tried[14:] == [8, 4, 8, 4, 4, 2, 4, 2]
    assert built == ({"bucket_cap_mb": 4.0}, "buckets 4 MiB; best of 9")
    tried, built = tuned(lambda size, turn: [size])
    assert min(tried) == 2
    assert built == ({"bucket_cap_mb": 2.0}, "buckets 2 MiB; best of 9")


def test_a_compiled_forward_is_tuned_with_the_buckets_that_torch_can_split_it_at(tuned, monkeypatch):
    monkeypatch.setattr(ddp, "least_bucket_bytes", lambda context: 5 * 2**20)
    tried, _ = tuned(lambda size, turn: [size])
    assert min(tried) == 8
    monkeypatch.setattr(ddp, "least_bucket_bytes", lambda context: 2**29)
    tried, _ = tuned(lambda size, turn: [size])
    assert tried == [25] * 2


def test_buckets_too_small_for_a_compiled_forward_are_refused(monkeypatch):
    """torch would refuse them by an assertion that names neither."""
    model = torch.nn.Linear(1000, 250, bias=False)  # 1 MB
    plain = SimpleNamespace(make_model=lambda: model, emulated=True, device="cpu")
    group = SimpleNamespace(backend="gloo", message_seconds=0.0)
    context = SimpleNamespace(
        workload=CompiledWorkload(plain), session=SimpleNamespace(rank=0), shared=lambda make: group, make_loop=Loop
    )
    buckets, words = ddp.default_buckets(1 / 72)
    monkeypatch.setattr(
        ddp, "DistributedDataParallel", lambda model, bucket_cap_mb_list, **_: SimpleNamespace(bucket_bytes_cap=364_088)
    )
    expected = "compile: torch compiles the forward of DDP only with buckets of at least 1 MiB, but they shrink like the model"
    with pytest.raises(ConfigError, match=rf"{expected} \(buckets 0.347 MiB \(default, scaled\)\); set megabytes to 3$"):
        ddp.DdpSystem(context, buckets, words)
    context.workload = plain
    ddp.DdpSystem(context, buckets, words)


class Calls:
    """Stands for the optimizer, the loss and the barrier: what was called, in order."""

    def __init__(self):
        self.made = []

    def __getattr__(self, name):
        return lambda *arguments: self.made.append((name, *arguments))

    @contextmanager
    def no_sync(self):
        self.made.append(("no_sync",))
        yield
        self.made.append(("sync",))


def asked(name, collective="all_reduce", bytes_scale=1.0, loop=Loop):
    """The configuration that a system switches to, and what it does in ``update``."""
    calls = Calls()
    context = SimpleNamespace(
        session=SimpleNamespace(core=SimpleNamespace(config=SchedulerConfig(1, 2, "fifo", 3))),
        barrier=calls,
        carrier=Carrier("ps", collective=collective),
        bytes_scale=bytes_scale,
        partition_bytes=4_000,
        credit_bytes=24_000,
        order="static",
        message_seconds=1e-4,
        make_loop=loop,
        shared=lambda make: SimpleNamespace(
            model=SimpleNamespace(parameters=lambda: [SimpleNamespace(grad=calls), SimpleNamespace(grad=None)]),
            initial=[],
            optimizer=calls,
            reset=lambda: None,
        ),
    )
    system = systems.make(name, context)
    system.begin()
    [(_, config)] = calls.made
    calls.made.clear()
    system.update(calls)
    return config, [name for name, *_ in calls.made]


OVERLAPS = ["backward", "step"]
BARRIER = ["backward", "step", "synchronize"]


@pytest.mark.parametrize(
    ("name", "config", "calls"),
    [
        ("commsched", SchedulerConfig(4_000, 24_000, "priority"), OVERLAPS),
        ("fifo", SchedulerConfig(4_000, 24_000, "fifo"), OVERLAPS),
        ("wfbp", SchedulerConfig(4_000, 24_000, "fifo"), BARRIER),
        ("serial", SchedulerConfig(4_000, 24_000, "fifo"), ["no_sync", "backward", "sync", "step", "synchronize"]),
        ("p3", SchedulerConfig(160_000, 160_000, "priority", 1), OVERLAPS),
        ("tictac", SchedulerConfig(MAX_PARTITION_BYTES, 24_000, "priority", 1), OVERLAPS),
    ],
)
def test_what_each_system_asks_of_the_scheduler(name, config, calls):
    config = replace(config, order="static")
    assert asked(name) == (config, calls)
    assert asked(name, "rsag") == (replace(config, collective="rsag"), calls)


class Clipping(Loop):
    def __init__(self):
        super().__init__("norm", 1.0)

    def step(self, model, optimizer):
        optimizer.clip()
        optimizer.step()


def test_only_commsched_clips_before_it_has_all_averages():
    trained = [name for name in systems.names() if SYSTEMS[name].is_on_commsched]
    late = {name for name in trained if "detach" not in asked(name, loop=Clipping)[1]}
    assert late == {name for name in trained if SYSTEMS[name].simulated.clipped().rules(1, 1).norm} == {"commsched", "fifo"}
    assert asked("commsched", loop=Clipping)[1] == ["backward", "clip", "step"]
    assert asked("p3", loop=Clipping)[1] == ["backward", "detach", "clip", "step"]
    assert asked("wfbp", loop=Clipping)[1] == ["backward", "detach", "clip", "step", "synchronize"]


def test_without_a_late_norm_a_clipped_system_has_a_barrier():
    for name, system in SYSTEMS.items():
        rules = system.simulated.clipped().rules(1000, 2000)
        assert rules.barrier != rules.norm, name


def test_slices_shrink_like_the_bytes_but_not_below_a_size():
    assert asked("p3", bytes_scale=0.5)[0].partition_bytes == 80_000
    assert asked("p3", bytes_scale=0.01)[0].partition_bytes == 64_000
