"""How jobs start: every launcher, every wrong setting in one clear line."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from commsched.core.ports import free_port
from commsched.transports import users_of

from .job import WORKER, clean_environ, run_job, worker


@pytest.mark.parametrize(
    "arguments", [["-n", "1"], ["-n", "2"], ["-n", "4"], ["-n", "2", "--servers", "1"], ["-n", "3", "--servers", "2"]]
)
def test_jobs_run_to_their_end(arguments: list[str]) -> None:
    code, out, err = run_job(*arguments, *worker("20"), imports=())  # no forks: all of a start is here
    assert code == 0, err
    assert out.count("finished") == int(arguments[1])
    ranks, servers = int(arguments[1]), int(arguments[3]) if len(arguments) > 2 else 0
    served = {0: "", 1: " with 1 server", 2: " with 2 servers"}[servers]
    assert err == (_first_line(ranks, f"ps over tcp{served}") if ranks > 1 else "")


def _first_line(ranks: int, transport: str) -> str:
    return (
        f"commsched: {ranks} ranks on 1 host, {transport}, 2 tensors of 8 KB per step, partition 4.0 MB, credit 16.0 MB, "
        "priority\n"
    )


def test_an_encrypted_job_with_several_flows_runs_to_its_end() -> None:
    code, out, err = run_job("-n", "2", "--servers", "1", "--flows", "2", "--security", "tls", *worker("20"))
    assert code == 0, err
    assert out.count("finished") == 2
    assert err == _first_line(2, "ps over tcp on 2 flows with 1 server").replace("priority", "priority, encrypted")


def test_the_first_line_says_what_is_set_and_which_order_is_agreed_on() -> None:
    code, _, err = run_job("-n", "2", "--transport", "gloo", "--partition", "64KB", "--credit", "1MB", *worker("5"))
    assert code == 0, err
    settings = "partition 64 KB, credit 1.0 MB, priority, agreed order"
    assert err == f"commsched: 2 ranks on 1 host, gloo, 2 tensors of 8 KB per step, {settings}\n"


def test_one_may_ask_for_less_or_more_than_the_first_line() -> None:
    assert run_job("-n", "2", "--log", "warning", *worker("5"))[::2] == (0, "")
    code, _, err = run_job("-n", "2", *worker("5"), environ={"COMMSCHED_LOG": "info"})
    assert code == 0, err
    chosen = "commsched: transport=auto: ps (every rank hosts a shard; no servers are named)\n"
    assert err == chosen + _first_line(2, "ps over tcp")


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "2> /dev/full"])
def test_a_job_needs_nobody_to_hear_what_it_says(streams: str) -> None:
    launched = f"{sys.executable} -m commsched run -n 2 --servers 1 {' '.join(worker('5'))} {streams}"
    assert subprocess.run(["bash", "-c", launched], env=clean_environ(), timeout=300).returncode == 0


@pytest.mark.parametrize(("level", "seen"), [("INFO", True), ("WARNING", False)])
def test_a_script_that_sets_up_logging_decides_what_is_seen(level: str, seen: bool) -> None:
    logged = (
        f"import logging, runpy, sys; logging.basicConfig(level='{level}', format='LOGGED %(message)s'); sys.argv[1:] = ['5']; \
runpy.run_path({str(WORKER)!r}, run_name='__main__')"
    )
    code, _, err = run_job("-n", "2", "--transport", "ps", "--", sys.executable, "-c", logged)
    assert code == 0, err
    assert err == (_first_line(2, "ps over tcp").replace("commsched:", "LOGGED") if seen else "")


def test_one_rank_may_have_any_collective() -> None:
    code, out, err = run_job("-n", "1", "--collective", "rsag", *worker("5"))
    assert (code, err) == (0, "")
    assert "rank 0 finished" in out


def test_a_collective_that_the_transport_does_not_have_is_refused_before_any_rank_starts() -> None:
    code, out, err = run_job("-n", "2", "--transport", "ps", "--collective", "rsag", *worker("5"))
    assert (code, out) == (2, "")
    users = ", ".join(users_of("collective"))
    assert err == f"commsched: ConfigError: collective='rsag' has no effect with transport=ps: it is for {users}\n"


def test_disabled_ranks_are_worlds_of_their_own() -> None:
    code, out, err = run_job("-n", "2", "--disable", "1", *worker("5"))
    assert (code, err) == (0, "")
    assert out.count("rank 0 of 1") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--partition", "4XB"], "ConfigError: partition='4XB' is not a size; write it like 4MB, 512KiB or 65536"),
        (["--rate", "fast"], "ConfigError: rate='fast' is not a rate; write it like 200mbit or 1gbit"),
        (
            ["--transport", "carrier-pigeon"],
            "ConfigError: transport='carrier-pigeon' is unknown; there are: auto, gloo, mpi, nccl, ps",
        ),
        (["--transport", "glo"], "ConfigError: transport='glo' is unknown; did you mean gloo? there are: auto, "),
        (["--policy", "lifo"], "ConfigError: policy='lifo' is unknown; did you mean fifo? there are: fifo, "),
        (["--log", "loud"], "ConfigError: log='loud' is unknown; there are: warning, info, debug"),
        (["--fail-after", "-1"], "ConfigError: fail_after='-1' is not above 0; write it in seconds, like 10 or 2.5"),
    ],
)
def test_a_wrong_setting_is_one_line_before_anything_starts(arguments: list[str], message: str) -> None:
    code, out, err = run_job("-n", "2", f"{arguments[0]}={arguments[1]}", *worker("5"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"commsched: {message}")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"COMMSCHED_PARTITON": "4MB"}, "COMMSCHED_PARTITON is not a setting; did you mean COMMSCHED_PARTITION?"),
        ({"COMMSCHED_CONFIG": "/nowhere.toml"}, "COMMSCHED_CONFIG='/nowhere.toml' cannot be read"),
        ({"COMMSCHED_CREDIT": "much"}, "COMMSCHED_CREDIT='much' is not a size"),
    ],
)
def test_a_wrong_environment_is_one_line(environ: dict[str, str], message: str) -> None:
    code, out, err = run_job("-n", "2", *worker("5"), environ=environ)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_ranks_that_never_joined_are_told_that_nothing_was_averaged() -> None:
    """As by a script that lacks line 2."""
    code, _, err = run_job("-n", "2", "--", sys.executable, "-c", "import commsched.plugins.numpy")
    assert code == 0
    assert err.startswith("commsched run: no rank joined the job, so nothing was averaged: each of 2 processes ran alone.")
    assert err.count("\n") == 1
    assert run_job("-n", "2", "--disable", "1", "--", "true") == (0, "", "")
    assert run_job("-n", "1", "--", "true") == (0, "", "")


def test_a_rank_that_ended_without_having_joined_is_named() -> None:
    """Line 2 stands behind ``if rank == 0:``, say."""
    script = "import commsched, os; os.environ['RANK'] == '0' and commsched.init(join_within=3)"
    code, _, err = run_job("-n", "2", "--", sys.executable, "-c", script)
    assert code == 1
    assert "rank 1 of 2 did not join within 3 s" in err
    assert err.splitlines()[-1] == (
        "commsched run: 1 process ended with errors that name the cause; rank 1 ended without an error, and without having "
        "joined"
    )


def test_another_launchers_ranks_without_a_session_are_told_so_by_rank_0() -> None:
    """As by a script that has line 1, but not line 2, under torchrun."""

    def ends(script: str, **environ: str) -> str:
        world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **environ}
        command = [sys.executable, "-c", script]
        ended = subprocess.run(command, env=clean_environ(**world), capture_output=True, text=True, timeout=300)
        return ended.stderr

    imports = "import commsched.plugins.numpy"
    said = "commsched: no rank joined the job, so nothing was averaged: each of 2 processes ran alone."
    assert ends(imports).startswith(said)
    assert ends(imports, RANK="1", LOCAL_RANK="1") == ""
    assert ends(imports, COMMSCHED_DISABLE="1") == ""
    assert ends(f"{imports}, os; os.environ['WORLD_SIZE'] = os.environ['LOCAL_WORLD_SIZE'] = '1'; commsched.init()") == ""
    assert ends("import commsched") == ""
    assert said not in ends(f"{imports}; raise ValueError")


def test_a_command_that_is_not_there_is_one_line() -> None:
    code, _, err = run_job("-n", "2", "--", "no-such-program")
    assert (code, err) == (2, "commsched: ConfigError: command 'no-such-program' was not found\n")


def _rank(rank: int, size: int, *arguments: str, few_files: int | None = None, **environ: str) -> subprocess.Popen[str]:
    """A worker. ``few_files``: how many it may have open."""
    limit = ["prlimit", f"--nofile={few_files}"] if few_files else []
    place = {"COMMSCHED_RANK": str(rank), "COMMSCHED_WORLD_SIZE": str(size), "COMMSCHED_LOCAL_RANK": str(rank)}
    return subprocess.Popen(
        [*limit, sys.executable, str(WORKER), "5", *arguments],
        env=clean_environ(**place, COMMSCHED_LOCAL_WORLD_SIZE=str(size), **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    ends = []
    for process in processes:
        try:
            _, err = process.communicate(timeout=300)
        finally:
            process.kill()
        ends.append((process.returncode, err))
    return ends


def test_a_wrong_token_is_refused_in_one_clear_line(tmp_path: Path) -> None:
    control = {"COMMSCHED_CONTROL": f"127.0.0.1:{free_port()}"}
    ends = _ends(
        [
            _rank(rank, 2, "--meet", str(tmp_path), **control, COMMSCHED_TOKEN=f"token {rank}", COMMSCHED_JOIN_WITHIN=within)
            for rank, within in enumerate(("8", "100"))
        ]
    )
    assert ends[1][0] == 1
    assert "ConfigError" in ends[1][1].splitlines()[-1]
    assert "COMMSCHED_TOKEN" in ends[1][1].splitlines()[-1]
    assert "token 1" not in ends[1][1]
    assert "PeerTimeout" in ends[0][1].splitlines()[-1]
    assert "rank 1" in ends[0][1].splitlines()[-1]


def test_ranks_of_two_jobs_with_one_token_and_address_do_not_mix() -> None:
    """Rank 1 of job B comes first to where job A forms, and A's own comes later."""
    job = {"COMMSCHED_CONTROL": f"127.0.0.1:{free_port()}", "COMMSCHED_TOKEN": "secret"}
    first = _rank(0, 2, **job, COMMSCHED_JOB="A")
    [(code, err)] = _ends([_rank(1, 2, **job, COMMSCHED_JOB="B")])
    assert code == 1
    assert f"rank 0 at {job['COMMSCHED_CONTROL']} refuses this process: it serves job 'A', and this is job 'B'" in err
    ends = _ends([first, _rank(1, 2, **job, COMMSCHED_JOB="A")])
    assert [code for code, _ in ends] == [0, 0], ends
    assert "it belongs to job 'B', and this is job 'A'" in ends[0][1]


def test_idle_strangers_at_the_control_port_neither_end_a_job_nor_keep_it_from_starting() -> None:
    """As many as rank 0 may have files: it needs some of its own to train."""
    port = free_port()
    job = {"COMMSCHED_CONTROL": f"127.0.0.1:{port}", "COMMSCHED_TOKEN": "secret", "COMMSCHED_JOIN_WITHIN": "100"}
    job["COMMSCHED_FAIL_AFTER"] = "60"  # keepalive would end them after 1.5 times that
    first = _rank(0, 2, **job, few_files=100)
    with ExitStack() as strangers:
        deadline = time.monotonic() + 120
        while len(strangers._exit_callbacks) < 150:
            try:
                strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=120))
            except ConnectionRefusedError:  # rank 0 does not listen yet
                assert time.monotonic() < deadline
                time.sleep(0.05)
        ends = _ends([first, _rank(1, 2, **job)])
    assert [code for code, _ in ends] == [0, 0], ends


def test_a_control_address_needs_a_token() -> None:
    ends = _ends([_rank(0, 2, COMMSCHED_CONTROL="127.0.0.1:0")])
    assert "ConfigError: control is set, but no token: set the same COMMSCHED_TOKEN" in ends[0][1]


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (end,) = _ends([_rank(0, 2, COMMSCHED_CONTROL=address, COMMSCHED_TOKEN="secret")])
        assert end[0] == 1
        last = end[1].splitlines()[-1]
        assert "ConfigError" in last
        assert address in last
        server = subprocess.run(
            [sys.executable, "-m", "commsched", "server", "--bind", address],
            env=clean_environ(COMMSCHED_TOKEN="secret"),
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert server.returncode == 2
    assert server.stderr.startswith("commsched: ConfigError: ")
    assert address in server.stderr
    assert server.stderr.count("\n") == 1


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    ((code, err),) = _ends([_rank(0, 3, COMMSCHED_JOIN_WITHIN="1", COMMSCHED_RENDEZVOUS=str(tmp_path / "control.json"))])
    assert code == 1
    last = err.splitlines()[-1]
    assert "PeerTimeout" in last
    assert "1" in last
    assert "2" in last


def test_settings_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    meet = str(tmp_path / "control.json")
    ends = _ends([_rank(r, 2, COMMSCHED_RENDEZVOUS=meet, COMMSCHED_PARTITION=f"{r + 1}MB") for r in (0, 1)])
    for code, err in ends:
        assert code == 1
        assert "partition is 1000000 on rank 0 but 2000000 on rank 1" in err


def test_servers_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    meet = str(tmp_path / "control.json")
    servers = ["127.0.0.1:1", "127.0.0.1:1,127.0.0.1:2"]
    ends = _ends([_rank(r, 2, COMMSCHED_RENDEZVOUS=meet, COMMSCHED_SERVERS=servers[r]) for r in (0, 1)])
    for code, err in ends:
        assert code == 1
        assert "servers is ['127.0.0.1:1'] on rank 0 but ['127.0.0.1:1', '127.0.0.1:2'] on rank 1" in err


def test_ipv6() -> None:
    control = f"[::1]:{free_port()}"
    ends = _ends([_rank(r, 2, COMMSCHED_CONTROL=control, COMMSCHED_TOKEN="secret") for r in (0, 1)])
    assert [code for code, _ in ends] == [0, 0], ends


def test_several_machines_need_an_address_and_a_token() -> None:
    done = subprocess.run(
        [sys.executable, str(WORKER), "5"],
        env=clean_environ(RANK="0", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "ConfigError: 4 ranks on several machines (torchrun): set COMMSCHED_CONTROL=host:port" in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--lane", "tcp"),
        ("--lane", "grpc"),
        ("--lane", "grpc", "--servers", "1"),
        ("--hierarchy", "on"),
        ("--transport", "gloo"),
    ],
    ids=" ".join,
)
def test_a_session_closes_where_the_interpreters_end_starts_no_thread(options: tuple[str, ...]) -> None:
    if "gloo" in options:
        pytest.importorskip("torch.distributed")
    code, out, err = run_job("-n", "2", *options, "--", sys.executable, str(WORKER.with_name("no_late_threads.py")), "3")
    assert code == 0, err
    assert "RuntimeError" not in err
    assert out.count("finished") == 2
