"""``python -m bench train``: its options, what it refuses, and small runs of the whole."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from bench import turns as train
from bench.__main__ import main
from bench.harness import links as train_links
from bench.harness.cluster import Cluster, ClusterUnavailable
from bench.harness.job import Job, Outcome, run_job
from bench.harness.links import Links
from bench.harness.processes import JobFailed
from bench.turns import TrainOptions, measure_rows, options_of
from commsched.core.errors import ConfigError
from commsched.core.world import World

SIZES = {"partition": "auto", "credit": "auto"}


def parse(*argv):
    parser = argparse.ArgumentParser(exit_on_error=False)
    train.add_arguments(parser)
    return options_of(parser.parse_args(list(argv)))


def refuse(hosts, rate):
    raise ClusterUnavailable("ip netns add: Operation not permitted; shaped links need root")


class Ran:
    """Stands for ``run_job``: keeps what it was given, and returns what the ranks would have measured."""

    def __init__(self, differences=(0.0, 0.0), seconds=2.0, then=lambda: None):
        self.then = then  # called when the ranks have measured
        system = {"transport": "ps", "words": "partition 1 MB", "message_seconds": 1e-4, "cpu_seconds": 0.5, "timeline": []}
        sizes = {"partition_bytes": 1_000_000, "credit_bytes": 2_000_000, "fusion_bytes": None}
        layer = {"names": ["a"], "forward_seconds": [0.3], "backward_seconds": [0.7], "nbytes": [36_000_000]}
        layer["tensors"] = [[36_000_000]]
        network = {"worker_rates": [60e6] * 2, "server_rates": []}
        self.by_rank = [
            {
                "network": network,
                "slowdowns": None,
                "layers": [layer] * 2,
                "systems": {"fifo": {**system, **sizes, "seconds": [seconds] * 3, "max_difference": difference}},
            }
            for difference in differences
        ]

    def __call__(self, job, module, arguments):
        self.job, self.module, self.arguments = job, module, arguments
        self.then()
        rates = job.bandwidth if job.bandwidth is None or isinstance(job.bandwidth, str) else ",".join(job.bandwidth.values())
        return Outcome(self.by_rank, f"{rates} tbf" if rates else "loopback")


@pytest.fixture
def ran(monkeypatch):
    def install(**measured):
        ran = Ran(**measured)
        monkeypatch.setattr(train, "run_job", ran)
        monkeypatch.setattr(train, "why_not_shaped", lambda links: None)
        return ran

    return install


def test_defaults_are_those_of_the_options():
    assert parse() == TrainOptions()


def test_options_of_a_command_line():
    where = ["--model", "vgg16", "--workers", "4", "--servers", "n", "--bandwidth", "500mbit,1gbit", "--rho", "2"]
    how_long = ["--megabytes", "12", "--rounds", "1", "--steps", "9", "--settle", "3", "--timeout", "60"]
    what = ["--systems", "ddp-tuned,p3", "--transport", "gloo", "--lane", "tcp", "--partition", "1MB", "--credit", "auto"]
    assert parse(*where, *how_long, *what, "--clip", "scaler", "--compile") == TrainOptions(
        model="vgg16",
        workers=4,
        servers="n",
        bandwidth="500mbit,1gbit",
        rho=2.0,
        megabytes=12.0,
        systems=("ddp-tuned", "p3"),
        rounds=1,
        steps=9,
        settle=3,
        transport="gloo",
        lane="tcp",
        partition="1MB",
        clip="scaler",
        compile=True,
        timeout_seconds=60.0,
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--servers", "m"], "'m' is not a number of at least 0"),
        (["--bandwidth", "1gbit,fast"], "'fast' is not a rate; write it like 200mbit or 1gbit"),
        (["--rho", "0"], "'0' is not a positive number"),
        (["--systems", "fifo,pigeon"], "systems: 'pigeon' is unknown; there are: commsched, ddp, ddp-tuned, fifo"),
        (["--systems", "fifo,p3,fifo"], "'fifo,p3,fifo' names a system twice"),
        (["--systems", "fifo:ps+rsag"], "systems: 'fifo:ps+rsag': ps has no rsag, which is for collectives"),
        (["--settle", "1"], "'1' is not a number of at least 3"),
        (["--clip", "value"], "invalid choice: 'value' (choose from"),
        (["--partition", "4XB"], "'4XB' is not a size; write it like 4MB, 512KiB or 65536"),
    ],
)
def test_wrong_arguments_are_said(argv, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", *argv])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "bandwidth: an EMULATED model is scaled to the link, so set its rate, such as 500mbit; or use --real"),
        ({"bandwidth": "1gbit", "model": "alexnet"}, "model=alexnet: must be one of uniform, "),
        ({"real": True, "model": "alexnet"}, "model=alexnet: real models are uniform, "),
        ({"bandwidth": "1gbit", "device": "cuda"}, "device=cuda: EMULATED layers need none; use --real"),
        ({"real": True, "megabytes": 3.0}, "megabytes: the size of a REAL model is fixed"),
        (
            {"real": True, "flow_bandwidth": "1gbit", "systems": ("fifo",)},
            "flow-bandwidth=1gbit: it needs links with a bandwidth",
        ),
        ({"bandwidth": "1gbit,2gbit"}, r"bandwidth=1gbit,2gbit: 2 rates, but there are 3 hosts, 2 workers and 1 servers"),
        ({"bandwidth": "1gbit", "settle": 2}, "settle=2: the first 3 steps of a turn may still use the settings before it"),
        ({"bandwidth": "1gbit", "transport": "pigeon"}, "transport='pigeon' is unknown"),
        ({"bandwidth": "1gbit", "systems": ("pigeon",)}, "systems: 'pigeon' is unknown"),
        (
            {"bandwidth": "1gbit", "systems": ("ddp", "serial:gloo"), "clip": "norm"},
            r"systems: serial:gloo averages within step\(\), so no loop can clip there",
        ),
    ],
)
def test_wrong_options_are_said_before_anything_starts(options, message, monkeypatch):
    monkeypatch.setattr(train, "run_job", None)
    with pytest.raises(ConfigError, match=message):
        measure_rows(TrainOptions(**{"servers": "1" if "," in options.get("bandwidth", "") else "0", **options}))


@pytest.mark.parametrize("system", ["ddp", "ddp-tuned"])
def test_ddp_is_not_compared_with_a_transport_that_caps_itself(system, monkeypatch, capsys):
    monkeypatch.setattr(train_links, "Cluster", refuse)
    assert main(["train", "--bandwidth", "500mbit", "--systems", f"fifo,{system}"]) == 1
    assert capsys.readouterr().err == (
        f"python -m bench train: systems: {system} would use the whole network while commsched's transport limits its rate to "
        "500mbit, so their times could not be compared; links have to be shaped, but ip netns add: Operation not permitted; "
        "shaped links need root\n"
    )


def test_unequal_links_are_not_had_without_shaping(monkeypatch):
    monkeypatch.setattr(train_links, "Cluster", refuse)
    with pytest.raises(ConfigError, match="bandwidth=500mbit,1gbit: links can differ only where they are shaped, but ip netns"):
        measure_rows(TrainOptions(bandwidth="500mbit,1gbit", systems=("fifo",)))


def test_what_the_ranks_are_told(ran):
    job = ran()
    measure_rows(TrainOptions(bandwidth="400mbit", servers="n", megabytes=36.0, systems=("fifo", "ddp")))
    assert job.job == Job(2, 2, "400mbit", {"transport": "ps", **SIZES}, 1200.0, auto_sizes=True)
    assert job.module == "bench.turns.rank"
    assert job.arguments["systems"] == ["fifo", "ddp"]
    assert job.arguments["bytes_scale"] == 0.5
    assert job.arguments["nominal_rates"] == [50e6] * 4
    assert job.arguments["capped"] is False
    assert job.arguments["workload"]["kind"] == "emulated"
    assert sum(layer["backward_seconds"] for layer in job.arguments["workload"]["profile"]["layers"]) == pytest.approx(0.48)


def test_a_cap_of_each_connection_is_told_to_the_links_and_to_who_measures_them(ran):
    job = ran()
    measure_rows(TrainOptions(bandwidth="400mbit", flow_bandwidth="80mbit", systems=("fifo",)))
    assert (job.job.bandwidth, job.job.flow_bandwidth, job.arguments["flow_rate"]) == ("400mbit", "80mbit", 1e7)


def test_a_lane_is_passed_on_when_it_is_given(ran, monkeypatch):
    job = ran()
    monkeypatch.setattr(train, "check_settings", lambda settings: None)
    (row,) = measure_rows(TrainOptions(bandwidth="400mbit", lane="grpc", systems=("fifo",)))
    assert job.job.settings == {"transport": "ps", **SIZES, "lane": "grpc"}
    assert (row["lane"], row["config"]) == ("grpc", "partition 1 MB, grpc lane")
    (row,) = measure_rows(TrainOptions(bandwidth="400mbit", flows=3, systems=("fifo",)))
    assert job.job.settings == {"transport": "ps", **SIZES, "flows": "3"}
    assert (row["lane"], row["config"]) == ("tcp", "partition 1 MB, tcp lane, 3 flows")


def test_a_way_of_their_own(ran):
    job = ran()
    measure_rows(TrainOptions(bandwidth="400mbit", systems=("commsched:gloo+static", "commsched:mpi")))
    assert job.job.settings == {"transport": "gloo", "order": "static", **SIZES}
    assert job.job.by_mpiexec
    assert job.arguments["systems"] == ["commsched:gloo+static", "commsched:mpi"]
    assert job.arguments["carrier"] == {"transport": "gloo", "order": "static", "collective": "all_reduce"}
    assert job.arguments["settle"] == 3 + 7  # until the order is static
    measure_rows(TrainOptions(bandwidth="400mbit", systems=("ddp", "commsched:gloo")))
    assert (job.job.settings, job.job.by_mpiexec) == ({"transport": "ps", **SIZES}, False)
    assert job.arguments["settle"] == 3 + 7  # the order may become static
    measure_rows(TrainOptions(bandwidth="400mbit", systems=("ddp", "fifo", "commsched:gloo+agreed")))
    assert job.arguments["settle"] == 3


@pytest.mark.parametrize(
    ("options", "transport"),
    [
        ({}, "ps"),
        ({"workers": 8}, "gloo"),
        ({"workers": 8, "transport": "ps"}, "ps"),
        ({"workers": 8, "servers": "2"}, "ps"),
        ({"workers": 8, "lane": "grpc"}, "ps"),
        ({"workers": 8, "lane": "tcp"}, "ps"),
        ({"workers": 8, "flows": 2}, "ps"),
        ({"workers": 8, "bandwidth": None, "real": True}, "ps"),  # on one machine
        ({"workers": 8, "systems": ("fifo", "commsched:mpi")}, "gloo"),  # mpiexec starts the ranks, for another system
    ],
)
def test_what_names_no_transport_takes_that_of_a_job_that_sets_none(options, transport, ran, monkeypatch):
    monkeypatch.setattr(train, "check_settings", lambda settings: None)  # that gRPC is installed
    monkeypatch.setenv("COMMSCHED_TRANSPORT", "mpi")  # it counts only for ranks of a launcher
    job = ran()
    measure_rows(TrainOptions(**{"bandwidth": "400mbit", "systems": ("fifo",), **options}))
    assert job.arguments["carrier"]["transport"] == job.job.settings["transport"] == transport


def test_where_links_cannot_be_shaped_the_transport_is_one_that_limits_its_rate(ran, monkeypatch):
    job = ran()
    monkeypatch.setattr(train, "why_not_shaped", lambda links: "ip netns add: Operation not permitted")
    measure_rows(TrainOptions(workers=8, bandwidth="400mbit", systems=("fifo",)))
    assert job.job.settings["transport"] == "ps"
    with pytest.raises(ConfigError, match="systems: commsched:gloo would use the whole network while commsched's transport"):
        measure_rows(TrainOptions(workers=8, bandwidth="400mbit", systems=("fifo", "commsched:gloo")))


def test_compiling_is_told_to_the_ranks_and_to_the_reader(ran, capsys):
    job = ran()
    assert main(["train", "--bandwidth", "500mbit", "--compile", "--systems", "fifo"]) == 0
    assert job.arguments["compile"] is True
    assert "EMULATED uniform (compiled), " in capsys.readouterr().out


def test_clipping_is_told_to_the_ranks_and_to_the_reader(ran, capsys):
    job = ran()
    assert main(["train", "--bandwidth", "500mbit", "--clip", "--systems", "fifo"]) == 0
    assert job.arguments["clip"] == "norm"
    assert "clipping by norm: every update needs all averages, and T* is the bound of such loops; it would be " in (
        capsys.readouterr().out
    )


def test_hosts_with_links_of_their_own(ran):
    job = ran()
    (row,) = measure_rows(TrainOptions(bandwidth="400mbit,800mbit,1gbit", servers="1", systems=("fifo",)))
    assert job.job.bandwidth == {"worker0": "400mbit", "worker1": "800mbit", "server0": "1gbit"}
    assert (row["bandwidth_bps"], row["link"]) == (400e6, "400mbit,800mbit,1gbit tbf")


def test_a_real_model_is_not_scaled(ran):
    job = ran()
    (row,) = measure_rows(TrainOptions(real=True, systems=("fifo",)))
    assert row["model"] == "uniform (reduced)"
    assert job.arguments["workload"] == {"kind": "real", "model": "uniform", "device": "cpu"}
    assert (job.arguments["nominal_rates"], job.arguments["bytes_scale"]) == (None, 1.0)
    assert (row["emulated"], row["stands_for"], row["bandwidth_bps"], row["link"]) == (False, None, None, "loopback")


def test_links_that_turn_out_not_to_be_shaped_are_not_measured(ran, monkeypatch):
    job = ran()
    monkeypatch.setattr(train, "run_job", lambda *arguments: Outcome(job.by_rank, "500mbit cap in the transport"))
    with pytest.raises(JobFailed, match=r"links were to be shaped, .* but the link was 500mbit cap in the transport"):
        measure_rows(TrainOptions(bandwidth="500mbit", systems=("fifo",)))


def test_what_is_printed(ran, capsys):
    ran()
    assert main(["train", "--bandwidth", "500mbit", "--systems", "fifo", "--megabytes", "36"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "fifo take turns, 24 steps each",
        "EMULATED uniform, 36.0 MB of gradients, 2 workers, a shard on every worker, link 500mbit tbf: 60.0 MB/s of payload by "
        "plain TCP",
        "compute 1000 ms, communication 600 ms, rho 0.60; T*: no schedule can be faster; ms/step with the range of 3 steps",
        "stands for 72.0 MB, 1000 ms of computation and links of 0.576 Gbit/s; the CPU cost of messages and bytes is this "
        "machine's and is not scaled: 'cores there' is how many cores of each worker it would take",
    ]
    assert lines[4].split("  ")[-1] == "max diff"
    assert lines[5].split()[:6] == ["fifo", "partition", "1", "MB,", "tcp", "lane"]


def test_what_is_missing_is_said_before_anything_else(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["train"]) == 1
    assert capsys.readouterr() == ("", 'python -m bench train: this needs torch: pip install "commsched[bench]"\n')


def test_no_shards_are_spoken_of_where_there_are_none(ran, capsys):
    job = ran()
    for rank in job.by_rank:
        rank["systems"]["fifo"]["transport"] = "gloo"
        rank["systems"]["fifo:gloo"] = rank["systems"]["fifo"]
    assert main(["train", "--bandwidth", "500mbit", "--systems", "fifo,fifo:gloo", "--megabytes", "36"]) == 0
    assert ", 2 workers, collectives, link 500mbit tbf: " in capsys.readouterr().out
    without, named = measure_rows(TrainOptions(bandwidth="500mbit", systems=("fifo", "fifo:gloo")))
    assert (without["config"], named["config"]) == ("partition 1 MB, over gloo", "partition 1 MB")


def test_wrong_weights_fail_the_command_and_the_rows_are_written(ran, capsys, tmp_path):
    ran(differences=(0.0, 0.5))
    path = tmp_path / "out.json"
    assert main(["train", "--bandwidth", "500mbit", "--systems", "fifo", "--json", str(path)]) == 1
    assert (
        capsys.readouterr().err
        == "fifo is wrong: its weights differ from plain averaging by 0.5 of the change that training made\n"
    )
    assert json.loads(path.read_text())["rows"][0]["max_difference"] == 0.5


def test_weights_that_are_not_finite_do_not_lose_the_rows(ran, capsys, tmp_path):
    ran(differences=(0.0, float("inf")))
    path = tmp_path / "out.json"
    assert main(["train", "--bandwidth", "500mbit", "--systems", "fifo", "--json", str(path)]) == 1
    assert "fifo is wrong: its weights are not finite, or training should have changed nothing" in capsys.readouterr().err
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["max_difference"], row["correct"]) == (None, False)


def test_mistakes_are_said_even_if_the_rows_cannot_be_written(ran, capsys, tmp_path):
    directory = tmp_path / "there"
    directory.mkdir()
    ran(differences=(0.0, 0.5), then=directory.rmdir)
    with pytest.raises(FileNotFoundError):
        main(["train", "--bandwidth", "500mbit", "--systems", "fifo", "--json", str(directory / "out.json")])
    assert "fifo is wrong" in capsys.readouterr().err


def test_a_disturbed_measurement_is_said(ran, capsys):
    ran(seconds=0.5)
    assert main(["train", "--bandwidth", "500mbit", "--systems", "fifo"]) == 0
    assert capsys.readouterr().err.startswith("fifo was faster than T*, so layers or links were disturbed")


def test_links_of_a_job():
    assert Links.of(2, 0, None).for_job() is None
    equal = Links.of(3, 3, "8mbit")
    assert (equal.rates, equal.for_job()) == ([1e6] * 6, "8mbit")


# --- the whole ---

KEYS = {"system", "model", "workers", "servers", "step_seconds", "bound_seconds", "efficiency", "speedup_vs_ddp", "timeline"}


def measured(tmp_path, *argv):
    path = tmp_path / "out.json"
    assert main(["train", *argv, "--rounds", "1", "--steps", "1", "--timeout", "300", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    for row in document["rows"]:
        assert row.keys() >= KEYS
        assert row["step_seconds"]["count"] == 1
        # torch adds up squares in 32 bits, so its norm of a million elements is off by some 1e-5; that of averages is not.
        assert row["max_difference"] < (1e-4 if "--clip" in argv else 1e-5)
        assert {entry["track"] for entry in row["timeline"]} >= {"forward", "backward", "network"}
    return document["rows"]


def test_a_real_model_on_loopback_over_several_transports(tmp_path):
    """Every loop clips, so that weights differ from those of the reference if one did not."""
    systems = "ddp,commsched:ps,commsched:gloo+rsag"
    sizes = ["--partition", "1MB", "--credit", "4MB"]  # the emulated model chooses them itself
    rows = measured(tmp_path, "--real", "--model", "gpt2-small", "--clip", "--systems", systems, *sizes)
    assert [(row["system"], row["transport"], row["lane"], row["emulated"]) for row in rows] == [
        ("ddp", "gloo", None, False),
        ("commsched:ps", "ps", "tcp", False),
        ("commsched:gloo+rsag", "gloo", None, False),
    ]
    assert rows[2]["config"].removesuffix(", static order").endswith(", reduce-scatter and all-gather")


def test_an_emulated_model_in_namespaces(tmp_path):
    try:
        with Cluster(["probe"], "1gbit"):
            pass
    except ClusterUnavailable as error:
        pytest.skip(str(error))
    links = ["--workers", "2", "--servers", "1", "--bandwidth", "200mbit,200mbit,400mbit"]
    ddp, fifo = measured(tmp_path, "--megabytes", "1", "--systems", "ddp,fifo", *links)
    assert fifo["gradient_bytes"] == pytest.approx(1e6, rel=0.01)
    assert fifo["servers"] == 1
    assert fifo["step_seconds"]["median"] >= 0.9 * 1e6 / 25e6  # its bytes on the link
    assert ddp["speedup_vs_ddp"] == 1
    assert ddp["stands_for"]["gradient_bytes"] == 72_000_000


def test_a_rank_ends_whatever_its_engine_left_behind(tmp_path, monkeypatch):
    (tmp_path / "rank_that_lingers.py").write_text(
        "import threading\n"
        "def rank_main(session, arguments):\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"
        "    if arguments['fail'] and session.rank == 1:\n"
        "        raise RuntimeError('out of paper')\n"
        "    return session.gather(session.rank)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_job(Job(2, timeout_seconds=300), "rank_that_lingers", {"fail": False}).by_rank == [[0, 1]] * 2
    with pytest.raises(JobFailed, match=r"(?s)^rank [01] ended with code 1:.*out of paper"):
        run_job(Job(2, timeout_seconds=300), "rank_that_lingers", {"fail": True})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "torchrun has started 4 ranks, whose links are real, so use --real"),
        ({"real": True, "workers": 3}, "workers=3: torchrun has started 4 ranks; leave the option out"),
        ({"real": True, "bandwidth": "1gbit"}, "bandwidth=1gbit: torchrun has started 4 ranks, whose links are measured"),
        ({"real": True, "flow_bandwidth": "1gbit"}, "flow-bandwidth=1gbit: torchrun has started 4 ranks, whose links are real"),
        ({"real": True, "servers": "1"}, "servers=1: torchrun has started 4 ranks; start servers by commsched server"),
        ({"real": True, "transport": "nccl"}, "nccl: the benchmark's barriers are tensors in host memory"),
        ({"real": True}, r"nccl: .* and --transport names another one"),
    ],
)
def test_options_that_ranks_of_a_launcher_cannot_have(options, message, monkeypatch):
    monkeypatch.setenv("COMMSCHED_TRANSPORT", "nccl")
    with pytest.raises(ConfigError, match=message):
        measure_rows(TrainOptions(**options), World(1, 4, 1, 2, "torchrun"))


@pytest.mark.parametrize(
    ("world", "environ", "transport"),
    [
        (World(0, 16, 0, 2, "torchrun"), {}, "gloo"),
        (World(0, 16, 0, 2, "torchrun"), {"TRANSPORT": "ps"}, "ps"),
        (World(0, 16, 0, 2, "torchrun"), {"SERVERS": "10.0.0.9:29700"}, "ps"),
        (World(0, 8, 0, 8, "torchrun"), {}, "ps"),
        (World(0, 2, 0, 1, "mpiexec (MPICH)"), {}, "mpi"),
    ],
)
def test_ranks_of_a_launcher_take_the_transport_that_their_jobs_take(world, environ, transport, monkeypatch):
    given = {}

    def run_here(world, settings, same, module, arguments, timeout_seconds):
        given.update(settings=settings, transport=arguments["carrier"]["transport"])

    monkeypatch.setattr("bench.harness.launched.run_here", run_here)
    monkeypatch.setattr(train, "find_spec", lambda name: name == "mpi4py" or None)
    monkeypatch.delenv("COMMSCHED_TRANSPORT", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(f"COMMSCHED_{name}", value)
    assert measure_rows(TrainOptions(real=True, systems=("fifo",)), world) == []
    assert given == {"settings": {"transport": transport, **SIZES}, "transport": transport}


def test_ranks_of_a_launcher_measure_where_they_are(monkeypatch):
    ran, given = Ran(), {}

    def run_here(world, settings, same, module, arguments, timeout_seconds):
        given.update(arguments, same=same, settings=settings)
        return Outcome(ran.by_rank, "of 2 machines, eth0") if world.rank == 0 else None

    monkeypatch.setattr("bench.harness.launched.run_here", run_here)
    monkeypatch.setenv("COMMSCHED_SERVERS", "10.0.0.9:29700")
    options = TrainOptions(real=True, systems=("fifo",))
    [row] = measure_rows(options, World(0, 4, 0, 2, "torchrun"))
    assert (row["link"], row["workers"], row["servers"], row["emulated"]) == ("of 2 machines, eth0", 4, 1, False)
    assert (given["launched"], given["nominal_rates"], given["same"]["workers"]) == (True, None, 4)
    assert measure_rows(options, World(1, 4, 1, 2, "torchrun")) == []
