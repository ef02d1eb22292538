"""Whole benchmarks, small: real processes, real gRPC."""

import json

import pytest

from bench.__main__ import main
from bench.harness import job as job_module
from bench.harness.cluster import Cluster, ClusterUnavailable
from bench.harness.job import Job, run_job
from bench.harness.processes import JobFailed

SMALL = ["--sizes", "4,100KB", "--partition", "16KB", "--repetitions", "2", "--warmup", "1", "--timeout", "300"]


def collectives(tmp_path, *argv):
    path = tmp_path / "results.json"
    assert main(["collectives", *SMALL, *argv, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    return document["rows"]


def test_collectives_on_loopback(tmp_path, capsys):
    rows = collectives(tmp_path)
    assert [row["size_bytes"] for row in rows] == [4, 100_000]
    assert all(row["wrong_elements"] == 0 and row["link"] == "loopback" for row in rows)
    assert all(row["milliseconds"] > 0 and row["cpu_seconds_per_gigabyte"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert printed.startswith("ps over tcp: 2 workers, a shard on every rank, link loopback, partition 16KB, credit 16MB\n")
    assert printed.splitlines()[3].split()[-1] == "#wrong"


def test_collectives_with_three_workers_and_two_servers(tmp_path):
    rows = collectives(tmp_path, "--workers", "3", "--servers", "2")
    assert [row["wrong_elements"] for row in rows] == [0, 0]
    assert rows[1]["bytes_factor"] == 1.5
    assert rows[1]["network_bytes"] == 600_000


def test_collectives_in_namespaces(tmp_path):
    try:
        with Cluster(["probe"], "1gbit"):
            pass
    except ClusterUnavailable as error:
        pytest.skip(str(error))
    rows = collectives(tmp_path, "--servers", "1", "--bandwidth", "1gbit")
    assert [(row["link"], row["wrong_elements"]) for row in rows] == [("1gbit tbf", 0)] * 2


def test_without_namespaces_the_transport_caps_itself_and_says_so(tmp_path, capsys, monkeypatch):
    def refuse(*arguments):
        raise ClusterUnavailable("ip netns add: Operation not permitted; shaped links need root")

    monkeypatch.setattr(job_module, "Cluster", refuse)
    rows = collectives(tmp_path, "--bandwidth", "4mbit")
    assert {row["link"] for row in rows} == {"4mbit cap in the transport"}
    assert rows[1]["milliseconds_min"] > 190  # each rank sends 100 kB at 500 kB/s; without the cap it takes a few ms
    assert "no shaped links here, so each rank limits its sending rate to 4mbit: ip netns add" in capsys.readouterr().err


def test_rounds(tmp_path, capsys):
    path = tmp_path / "results.json"
    assert main(["rounds", "--rounds", "100", "--json", str(path), "--timeout", "300"]) == 0
    row = json.loads(path.read_text())["rows"][0]
    assert (row["rounds"], row["wrong_rounds"], row["slow_rank"]) == (100, 0, 1)
    assert capsys.readouterr().out.splitlines()[1].split()[2] == "100"


def test_a_rank_that_fails_is_named_with_its_error():
    with pytest.raises(JobFailed, match=r"(?s)^rank [01] ended with code 1:.*KeyError: 'size'"):
        run_job(Job(2, timeout_seconds=300), "bench.rounds", {})


def test_settings_of_the_caller_do_not_leak_in(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMSCHED_TRANSPORT", "pigeon")
    monkeypatch.setenv("COMMSCHED_RANK", "7")
    assert collectives(tmp_path)[0]["wrong_elements"] == 0


def test_idle(tmp_path, capsys):
    path = tmp_path / "results.json"
    argv = ["idle", "--seconds", "0.1", "--size", "4KB", "--timeout", "300", "--json", str(path)]
    assert main([*argv, "--most", "100"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["rank"], row["transport"], row["lane"], row["seconds"]) for row in rows] == [
        (r, "ps", "tcp", 0.1) for r in (0, 1)
    ]
    assert capsys.readouterr().out.startswith("ps over tcp: 2 workers; all others wait for the last rank\n")
    assert main([*argv, "--most", "0"]) == 1
    assert "of a core is more than 0 %" in capsys.readouterr().err


def test_agreement(tmp_path, capsys):
    path = tmp_path / "results.json"
    argv = ["--partition", "4KB", "--partitions", "8", "--credits", "1", "8", "--repetitions", "2", "--timeout", "300"]
    assert main(["agreement", *argv, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["order"], row["credit_partitions"]) for row in rows] == [
        ("agreed", 1),
        ("agreed", 8),
        ("static", 1),
        ("static", 8),
    ]
    agreed, _, static, _ = (row["messages_per_launch"] for row in rows)
    assert 0.2 < agreed < 0.9  # at least one message that says what is ready, and an announcement for many
    assert static < 0.2  # one at the end of each step
    assert all(row["cpu_microseconds_per_launch"] > 0 and row["link_share"] is None for row in rows)
    assert capsys.readouterr().out.startswith("gloo: 2 workers, link loopback, 8 partitions of 4000 bytes, all ready at once")


def test_agreement_at_rank_0(tmp_path):
    path = tmp_path / "results.json"
    assert main(["agreement", "--ranks", "2", "5", "--json", str(path)]) == 0
    rows = {(row["ranks"], row["order"]): row for row in json.loads(path.read_text())["rows"]}
    for ranks in (2, 5):
        agreed, static = rows[ranks, "agreed"], rows[ranks, "static"]
        assert agreed["received"] == pytest.approx((ranks - 1) * 24 / 240)  # one of each rank for each layer
        assert (ranks - 1) / 240 < agreed["sent"] < (ranks - 1) / 4  # one announcement for many launches
        assert (static["received"], static["sent"]) == (pytest.approx((ranks - 1) / 240), 0)  # digests
        assert agreed["cpu_microseconds"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["agreement", "--transport", "ps"], "transport='ps' has nothing to agree on: its messages carry their identity"),
        (["idle", "--transport", "auto"], "transport='auto' does not name the measured transport; name one"),
        (
            ["collectives", "--workers", "32", "--ranks-per-host", "16", "--bandwidth", "1gbit", "--wire", "bfloat16"],
            "wire='bfloat16' rounds sums of 16 ranks per host of 32, so that results could not be checked; take fewer of them",
        ),
        (["idle", "--order", "any"], "order='any' is unknown; there are: auto, agreed, static"),
        (
            ["collectives", "--workers", "4", "--ranks-per-host", "2"],
            "ranks-per-host=2: it must divide workers=4 and leave",
        ),
        (
            ["collectives", "--workers", "3", "--ranks-per-host", "2", "--bandwidth", "1gbit"],
            "ranks-per-host=2: it must divide workers=3",
        ),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_starts(argv, message, capsys):
    assert main(argv) == 1
    assert message in capsys.readouterr().err


def test_collectives_do_not_cap_themselves(monkeypatch):
    def refuse(*arguments):
        raise ClusterUnavailable("shaped links need root")

    monkeypatch.setattr(job_module, "Cluster", refuse)
    for settings in ({"transport": "gloo"}, {"hierarchy": "on"}):
        with pytest.raises(ClusterUnavailable, match="shaped links need root"):
            run_job(Job(2, bandwidth="4mbit", settings=settings), "bench.collectives", {})


def test_ranks_that_share_hosts(tmp_path):
    try:
        with Cluster(["probe"], "1gbit"):
            pass
    except ClusterUnavailable as error:
        pytest.skip(str(error))
    rows = collectives(tmp_path, "--workers", "4", "--ranks-per-host", "2", "--bandwidth", "1gbit", "--wire", "bfloat16")
    assert [(row["wrong_elements"], row["bytes_factor"], row["ranks_per_host"]) for row in rows] == [(0, 0.5, 2)] * 2


def test_ranks_that_mpiexec_starts(tmp_path):
    pytest.importorskip("mpi4py")
    rows = collectives(tmp_path, "--transport", "mpi")
    assert [(row["transport"], row["wrong_elements"]) for row in rows] == [("mpi", 0)] * 2
