import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from bench import __main__ as bench_main
from bench import collectives
from bench.harness.arguments import at_least, float32_bytes, float32_sizes
from bench.harness.job import Outcome
from bench.harness.network_load import Route

ROOT = Path(__file__).parents[2]


def parse(module, *argv):
    parser = argparse.ArgumentParser(exit_on_error=False)
    import_module(f"bench.{module}").add_arguments(parser)
    return parser.parse_args(list(argv))


@pytest.mark.parametrize("command", ["collectives", "rounds", "overhead"])
def test_every_command_has_the_same_shape(command):
    assert command in bench_main.COMMANDS
    assert parse(command, "--json", "out.json").json == Path("out.json")
    assert callable(import_module(f"bench.{command}").run)


def test_collectives_defaults():
    args = parse("collectives")
    assert (args.transport, args.workers, args.servers, args.bandwidth) == ("ps", 2, 0, None)
    assert args.sizes == [64_000, 256_000, 1_024_000, 4_096_000, 16_384_000, 64_000_000]


def test_collectives_arguments():
    args = parse("collectives", "--workers", "4", "--servers", "2", "--bandwidth", "1gbit", "--sizes", "4KB:16KB:2")
    assert (args.workers, args.servers, args.bandwidth, args.sizes) == (4, 2, "1gbit", [4000, 8000, 16000])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["collectives", "--bandwidth", "fast"], "'fast' is not a rate; write it like 200mbit or 1gbit"),
        (["collectives", "--partition", "4XB"], "'4XB' is not a size; write it like 4MB, 512KiB or 65536"),
        (["collectives", "--workers", "1"], "'1' is not a number of at least 2"),
        (["collectives", "--sizes", "1MB:64KB"], "'1MB:64KB' is not FROM:TO or FROM:TO:FACTOR with FROM at most TO"),
        (["rounds", "--rounds", "-1"], "'-1' is not a number of at least 1"),
        (["sleep"], "invalid choice: 'sleep'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_arguments_are_said(argv, message, capsys):
    with pytest.raises(SystemExit) as end:
        bench_main.main(argv)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", bench_main.COMMANDS)
def test_every_command_has_an_example_that_it_accepts(command):
    assert parse(command, *bench_main.EXAMPLES[command].split()) is not None


def test_a_wrong_setting_is_one_line(capsys):
    assert bench_main.main(["collectives", "--transport", "pigeon"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("python -m bench collectives: transport")
    assert "'pigeon'" in error
    assert error.count("\n") == 1


def test_a_cap_for_each_connection_needs_shaped_links(capsys):
    assert bench_main.main(["collectives", "--flow-bandwidth", "100mbit"]) == 1
    said = "python -m bench collectives: flow-bandwidth=100mbit: it needs links with a bandwidth\n"
    assert capsys.readouterr().err == said


def test_a_slow_rank_that_is_not_there_is_refused(capsys):
    assert bench_main.main(["rounds", "--workers", "2", "--slow-rank", "2"]) == 1
    assert capsys.readouterr().err == "python -m bench rounds: slow-rank=2, but the ranks are 0 to 1\n"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64KB:64KB", [64_000]),
        ("1KB:5KB", [1000, 4000, 5000]),
        ("1KB:4KB", [1000, 4000]),
        ("10,1KiB", [8, 1024]),
        ("4", [4]),
    ],
)
def test_float32_sizes(text, sizes):
    assert float32_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", ":", "1KB:", "1KB:4KB:1", "1KB:4KB:2:2", "3", "x,1KB"])
def test_float32_sizes_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError):
        float32_sizes(text)


def test_number_arguments():
    assert at_least(0)("0") == 0
    assert float32_bytes("7") == 4
    with pytest.raises(argparse.ArgumentTypeError, match="'3' is less than one float32 element"):
        float32_bytes("3")


def test_help_lists_every_command_and_imports_no_engine():
    script = "import sys\nfrom bench.__main__ import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in bench_main.COMMANDS)


def row(*argv, servers=0, bandwidth=None, wrong=(0, 0), size=10_000_000):
    args = parse("collectives", *argv, "--servers", str(servers), *(["--bandwidth", bandwidth] if bandwidth else []))
    by_rank = [
        {"size_bytes": size, "seconds": [0.010, 0.020, 0.5], "cpu_seconds": 0.003, "wrong_elements": wrong[0]},
        {"size_bytes": size, "seconds": [0.016, 0.012, 0.5], "cpu_seconds": 0.003, "wrong_elements": wrong[1]},
    ]
    return collectives._row(args, Route.of(args, args.ranks_per_host), "here", by_rank)


def test_a_row_takes_the_slowest_rank_of_each_repetition_and_their_median():
    found = row()
    assert (found["milliseconds_min"], found["milliseconds"], found["milliseconds_max"]) == (16.0, 20.0, 500.0)
    assert found["algbw_megabytes_per_second"] == pytest.approx(500)
    assert found["link_share"] is None


def test_a_row_counts_the_bytes_of_each_topology():
    colocated, separate = row(), row(servers=1, bandwidth="10gbit")
    assert (colocated["bytes_factor"], colocated["network_bytes"]) == (1, 20_000_000)
    assert (separate["bytes_factor"], separate["network_bytes"]) == (2, 40_000_000)
    assert colocated["cpu_seconds_per_gigabyte"] == pytest.approx(0.1)  # 2 ms a repetition for 20 MB
    assert separate["busbw_megabytes_per_second"] == pytest.approx(1000)
    assert separate["link_share"] == pytest.approx(0.8)


def test_a_row_counts_the_bytes_that_travel_and_the_cost_of_the_gradient():
    whole, half = row(bandwidth="10gbit"), row("--wire", "bfloat16", bandwidth="10gbit")
    assert (half["bytes_factor"], half["network_bytes"]) == (0.5, 10_000_000)
    assert half["algbw_megabytes_per_second"] == whole["algbw_megabytes_per_second"]
    assert half["link_share"] == whole["link_share"] / 2 == pytest.approx(0.2)
    assert half["cpu_seconds_per_gigabyte"] == whole["cpu_seconds_per_gigabyte"]


def test_a_row_of_ranks_that_add_up_in_memory_crosses_no_network():
    found = row("--hierarchy", "on")
    assert (found["busbw_megabytes_per_second"], found["network_bytes"], found["cpu_seconds_per_gigabyte"]) == (0, 0, None)


def test_a_tensor_of_few_bursts_says_nothing_of_the_link():
    assert row(bandwidth="1gbit", size=1_000_000)["link_share"] is None


def test_a_row_adds_up_what_is_wrong():
    assert row(wrong=(2, 3))["wrong_elements"] == 5


@pytest.mark.parametrize("wrong", [0, 1])
def test_wrong_elements_fail_the_command(wrong, monkeypatch, capsys):
    by_rank = [
        [{"size_bytes": 4096, "seconds": [0.1], "cpu_seconds": 0.1, "wrong_elements": rank * wrong}] for rank in range(2)
    ]
    monkeypatch.setattr(collectives, "run_job", lambda job, module, arguments: Outcome(by_rank, "loopback"))
    assert bench_main.main(["collectives", "--sizes", "4KB:4KB"]) == wrong
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == str(wrong)
