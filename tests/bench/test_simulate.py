import json

import pytest

from bench import __main__ as bench_main
from bench.harness.rows import compare_with_ddp
from bench.harness.simulated import NotSimulated, partition_sizes
from bench.simulate.check import errors, simulated_seconds, typical_error
from bench.simulate.row import Case, make_row
from bench.systems import SYSTEMS
from commsched.simulator.profile import LayerProfile, Profile

PROFILE = Profile("small", tuple(LayerProfile(f"l{i}", ((250_000,),), 0.01, 0.02) for i in range(8)), "made up")

#: What a row of ``bench train`` has.
KEYS = {
    *("system", "model", "workers", "servers", "bandwidth_bps", "link", "emulated", "transport", "lane", "config"),
    *("partition_bytes", "credit_bytes", "gradient_bytes", "link_bytes_per_second", "per_message_seconds"),
    *("compute_seconds", "comm_seconds", "rho", "step_seconds", "step_samples", "bound_seconds", "bound_overhead_seconds"),
    *("clip", "unclipped_bound_seconds"),
    *("fifo_bound_seconds", "efficiency", "speedup_vs_ddp", "speedup_vs_ddp_tuned", "possible_speedup_vs_ddp"),
    *("exposed_seconds", "cpu_seconds_per_step", "max_difference", "correct", "stands_for", "simulated_seconds"),
    *("commit", "layers", "timeline"),
}


@pytest.fixture
def profile_file(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(PROFILE.to_record()))
    return path


def rules_of(system, partition_bytes, credit_bytes):
    return SYSTEMS[system].simulated.rules(partition_bytes, credit_bytes)


def ddp(*bucket_bytes):
    return SYSTEMS["ddp"].simulated.buckets(*bucket_bytes)


def case(workers=4, servers=0, **more):
    return Case(PROFILE, workers, servers, 50e6, **{"partition_seconds": 1e-4, **more})


def rows_of(systems=("ddp", "ddp-tuned", "commsched"), **more):
    chosen = case(**more)
    return compare_with_ddp([make_row(chosen, system, rules_of(system, 250_000, 1_250_000)) for system in systems])


def test_copies_from_a_device_take_time():
    host, copied, slow = (rows_of(["commsched"], copy_rate=rate)[0]["step_seconds"]["median"] for rate in (None, 1e9, 20e6))
    assert host < copied < 1.05 * host
    assert slow > 1.5 * host


def test_every_system_gives_a_row_of_the_schema_above_the_bound():
    for row in rows_of(SYSTEMS):
        assert row.keys() == KEYS | {"simulated"}
        assert row["simulated"]
        assert not row["emulated"]
        assert 0 < row["efficiency"] <= 1
        assert row["step_seconds"]["median"] >= row["bound_seconds"]
        assert row["comm_seconds"] == pytest.approx(1.5 * 8e6 / 50e6)
        assert row["speedup_vs_ddp"] <= row["possible_speedup_vs_ddp"]
    json.dumps(rows_of(), allow_nan=False)


def test_ddp_is_compared_with():
    theirs, _, ours = rows_of()
    assert (theirs["speedup_vs_ddp"], theirs["partition_bytes"], theirs["transport"]) == (1, None, "collectives")
    assert ours["speedup_vs_ddp"] == theirs["step_seconds"]["median"] / ours["step_seconds"]["median"]
    assert rows_of(["fifo"])[0]["speedup_vs_ddp"] is None


@pytest.mark.parametrize("servers", [0, 2])
def test_clipped_rows_are_above_the_clipped_bound(servers):
    chosen = case(servers=servers)
    for name, system in SYSTEMS.items():
        row = make_row(chosen, name, system.simulated.clipped().rules(250_000, 1_250_000), "norm")
        assert row["clip"] == "norm"
        assert 0 < row["unclipped_bound_seconds"] <= row["bound_seconds"] <= row["fifo_bound_seconds"]
        assert row["bound_seconds"] <= row["bound_overhead_seconds"]
        assert row["step_seconds"]["median"] >= row["bound_seconds"]
        of_pushes = servers > 0 and row["transport"] == "ps"
        assert (row["bound_seconds"] == row["fifo_bound_seconds"]) == of_pushes  # only servers of their own gain nothing


def test_a_late_norm_gains():
    plain, clipped, waiting = (
        make_row(case(), name, simulated.rules(250_000, 1_250_000), clip)["step_seconds"]["median"]
        for name, simulated, clip in (
            ("commsched", SYSTEMS["commsched"].simulated, None),
            ("commsched", SYSTEMS["commsched"].simulated.clipped(), "norm"),
            ("p3", SYSTEMS["wfbp"].simulated.clipped(), "norm"),
        )
    )
    assert plain <= clipped <= 1.01 * plain < 0.9 * waiting


def test_servers_are_for_parameter_servers_only():
    theirs, ours = rows_of(["ddp", "commsched"], servers=4)
    assert theirs["comm_seconds"] == pytest.approx(1.5 * 8e6 / 50e6)
    assert ours["comm_seconds"] == pytest.approx(8e6 / 50e6)


def test_a_straggler_sets_the_bound():
    row = rows_of(["commsched"], straggler=2.0)[0]
    assert row["compute_seconds"] == pytest.approx(0.48)
    assert row["step_seconds"]["median"] >= row["bound_seconds"] >= 0.48


def test_the_best_rules_are_the_best():
    chosen = case()
    best = SYSTEMS["commsched"].simulated.best(PROFILE.nbytes, 4, None, None, chosen.seconds)
    tried = [rules_of("commsched", size, 5 * size) for size in partition_sizes(PROFILE.nbytes)]
    assert chosen.seconds(best) <= min(map(chosen.seconds, tried))
    tuned = SYSTEMS["ddp-tuned"].simulated.best(PROFILE.nbytes, 4, None, None, chosen.seconds)
    assert chosen.seconds(tuned) <= chosen.seconds(rules_of("ddp", 1, 1))


def test_what_is_given_is_not_chosen():
    config = SYSTEMS["commsched"].simulated.best(PROFILE.nbytes, 4, 100_000, 300_000, case().seconds).config
    assert (config.partition_bytes, config.credit_bytes) == (100_000, 300_000)
    config = SYSTEMS["tictac"].simulated.best(PROFILE.nbytes, 4, 100_000, 300_000, case().seconds).config
    assert config.credit_bytes == 300_000


def test_sizes_to_try():
    assert partition_sizes(8_000_000)[:2] == [16_000_000, 8_000_000]
    assert partition_sizes(16_000_000_000) == [16_000_000, 8_000_000]  # not tens of thousands of partitions


# --- against measurements ---


def measured(**more):
    row = rows_of(["commsched"], detailed=True)[0]
    return {**row, "link": "400mbit tbf", "transport": "ps", "simulated": False, "simulated_seconds": None, **more}


def test_a_row_simulated_from_itself_is_what_it_was():
    row = measured()
    assert simulated_seconds(row) == pytest.approx(row["step_seconds"]["median"])


@pytest.mark.parametrize(
    ("config", "bucket_bytes"),
    [
        ("buckets 2 MiB", 2 * 2**20),
        ("buckets 1e+03 MiB; best of 7", 1000 * 2**20),
        ("buckets 2 MiB (default, scaled), the first too", 2 * 2**20),
    ],
)
def test_ddps_buckets_are_in_its_configuration(config, bucket_bytes):
    row = rows_of(["ddp"], detailed=True)[0]
    row = {**row, "link": "400mbit tbf", "simulated": False, "config": config}
    assert simulated_seconds(row) == pytest.approx(case(detailed=True).seconds(ddp(bucket_bytes)))


def test_default_buckets_begin_with_a_small_one():
    row = {**rows_of(["ddp"])[0], "link": "x", "simulated": False, "config": "buckets 5 MiB (default, scaled)"}
    assert simulated_seconds(row) == pytest.approx(case().seconds(ddp(5 * 2**20, 2**20 // 5)))


def test_what_is_never_merged_has_a_message_for_each_tensor():
    one, many = measured(system="tictac"), measured(system="tictac")
    many["layers"] = {**many["layers"], "tensors": [[10_000] * 100] * 8}
    assert simulated_seconds(many) > simulated_seconds(one)
    del one["layers"]["tensors"]
    with pytest.raises(NotSimulated, match="sends each tensor by itself, and the row has no sizes of tensors"):
        simulated_seconds(one)
    assert simulated_seconds({**one, "system": "commsched"}) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"simulated": True}, "it was simulated itself"),
        ({"link": "400mbit,1gbit tbf"}, "its links differ, and the row has only the rate of the slowest"),
        ({"link": "400mbit cap in the transport"}, "a cap in the transport lets one message pass at a time"),
        ({"system": "horovod"}, "no model of the system 'horovod'"),
        ({"partition_bytes": None}, "the row has no partition and credit"),
        ({"system": "ddp", "config": "as it is"}, "its configuration does not name the bucket size: 'as it is'"),
    ],
)
def test_what_cannot_be_simulated_is_said(change, message):
    with pytest.raises(NotSimulated, match=message):
        simulated_seconds(measured(**change))


def test_clipped_rows_are_simulated_as_such():
    clipped = measured(clip="norm")
    assert simulated_seconds(clipped) == pytest.approx(
        case(detailed=True).seconds(SYSTEMS["commsched"].simulated.clipped().rules(250_000, 1_250_000))
    )
    assert simulated_seconds({**clipped, "system": "p3"}) > simulated_seconds(measured(system="p3"))
    theirs = {**rows_of(["ddp"], detailed=True)[0], "link": "x", "simulated": False, "config": "buckets 2 MiB"}
    assert simulated_seconds({**theirs, "clip": "scaler"}) == simulated_seconds(theirs)


def test_errors_are_relative_and_the_median_absolute():
    rows = [{"simulated_seconds": seconds, "step_seconds": {"median": 1.0}} for seconds in (0.9, 1.02, None, 1.3)]
    assert errors(rows) == pytest.approx([-0.1, 0.02, 0.3])
    assert typical_error(rows) == pytest.approx(0.1)
    assert typical_error(rows[2:3]) is None


# --- the command ---


def test_the_command_predicts(profile_file, tmp_path, capsys):
    out = tmp_path / "out.json"
    given = ["--model", str(profile_file), "--workers", "2,64", "--bandwidth", "1gbit,10gbit", "--servers", "0,n"]
    systems = ["--systems", "ddp,commsched", "--partition", "500KB", "--json", str(out)]
    assert bench_main.main(["simulate", *given, *systems]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("SIMULATED, not measured.")
    assert "partition 0.5 MB, credit" in printed
    document = json.loads(out.read_text())
    cells = {(row["workers"], row["servers"], row["bandwidth_bps"], row["system"]) for row in document["rows"]}
    assert document["schema"] == 1
    assert len(cells) == len(document["rows"]) == 16
    assert (64, 64, 1e10, "commsched") in cells
    assert {row["workers"] for row in document["rows"] if row["timeline"]} == {2}  # they would be most of the file


def test_rates_by_rho(profile_file, tmp_path, capsys):
    out = tmp_path / "out.json"
    given = ["--model", str(profile_file), "--workers", "2,4", "--rho", "0.5,2", "--systems", "wfbp", "--json", str(out)]
    assert bench_main.main(["simulate", *given, "--partition", "500KB", "--servers", "0,1"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["rho"] for row in rows] == pytest.approx([0.5, 2.0] * 4)
    assert bench_main.main(["simulate", *given, "--workers", "1"]) == 1
    assert "rho: small has no computation, or nothing to send" in capsys.readouterr().err


def test_the_command_predicts_clipped_loops(profile_file, tmp_path, capsys):
    out = tmp_path / "out.json"
    given = ["--model", str(profile_file), "--workers", "4", "--bandwidth", "400mbit", "--systems", "ddp,commsched"]
    assert bench_main.main(["simulate", *given, "--clip", "--partition", "500KB", "--json", str(out)]) == 0
    assert "Every loop clips by a norm: " in capsys.readouterr().out
    theirs, ours = json.loads(out.read_text())["rows"]
    assert theirs["clip"] == ours["clip"] == "norm"
    assert ours["speedup_vs_ddp"] > 1.1


def test_the_command_checks(tmp_path, capsys):
    path, out = tmp_path / "measured.json", tmp_path / "checked.json"
    rows = [measured(), measured(system="horovod")]
    path.write_text(json.dumps({"schema": 1, "environment": {"cores": 3}, "rows": rows}))
    assert bench_main.main(["simulate", "--check", str(path), "--json", str(out)]) == 0
    printed = capsys.readouterr()
    assert "median absolute error of 1 rows: 0.0%" in printed.out
    assert printed.err == "not simulated: horovod, 4 workers: there is no model of the system 'horovod'\n"
    document = json.loads(out.read_text())
    assert document["environment"] == {"cores": 3}
    assert [row["simulated_seconds"] is None for row in document["rows"]] == [False, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError"),
        ('{"schema": 2, "rows": []}', "its schema is 2, not 1"),
        ('{"schema": 1, "rows": [{}]}', "its rows are not those of bench train"),
        ("[]", "TypeError"),
    ],
)
def test_what_cannot_be_checked_is_said(tmp_path, capsys, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert bench_main.main(["simulate", "--check", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"python -m bench simulate: check={path}: ")
    assert message in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--systems", "horovod"], "'horovod' is no system; there are: serial, fifo"),
        (["--overhead", "-1"], "'-1' is not a number of at least 0"),
        (["--straggler", "fast"], "'fast' is not a number of at least 1"),
        (["--servers", "m"], "'m' is not a number of at least 0"),
        (["--bandwidth", "10"], "'10' is not a rate"),
        (["--partition", "big"], "'big' is not a size"),
    ],
)
def test_wrong_arguments_are_said(argv, message, capsys):
    with pytest.raises(SystemExit) as end:
        bench_main.main(["simulate", *argv])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_collectives_are_simulated_as_such():
    row = measured(system="commsched:gloo", transport="gloo")
    by_server = simulated_seconds(measured(system="commsched:ps", transport="ps"))
    assert simulated_seconds(row) == simulated_seconds({**row, "system": "commsched:mpi+static", "transport": "mpi"})
    assert simulated_seconds(row) != by_server
    split = simulated_seconds({**row, "system": "commsched:gloo+rsag"})
    assert split != simulated_seconds(row)
    assert simulated_seconds({**row, "clip": "norm"}) >= split  # with a norm an average is always made in two halves
