"""What the command line makes of its options; jobs that it starts are in ``tests/jobs``."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commsched.cli import launch, server
from commsched.cli.main import _COMMANDS, _environ, main
from commsched.settings import Settings
from commsched.transports import users_of


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMSCHED_TOKEN", "secret")
    monkeypatch.setenv("COMMSCHED_LANE", "tcp")
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")  # which the command line sets, for good


def test_a_server_has_the_lane_given(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[str] = []
    monkeypatch.setattr(server, "serve", lambda address, token, settings: lanes.append(settings.lane) or 0)
    assert main(["server", "--lane", "grpc"]) == 0
    assert main(["server"]) == 0
    assert lanes == ["grpc", "tcp"]


def test_a_server_that_strangers_can_reach_has_a_token_that_they_cannot_guess(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "serve", lambda *_: 0)
    assert main(["server", "--bind", "0.0.0.0:0"]) == 2
    expected = "the token has 6 of at least 16 characters, and 0.0.0.0:0 may be reached by other machines"
    assert expected in capsys.readouterr().err
    monkeypatch.setenv("COMMSCHED_TOKEN", "a secret of more than that")
    assert main(["server", "--bind", "0.0.0.0:0"]) == 0


def test_ctrl_c_while_the_command_line_is_imported_is_one_line() -> None:
    interrupted = """
import runpy, sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "commsched.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
runpy.run_module("commsched", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (130, "commsched: interrupted\n")


def test_a_lane_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server", "--lane", "pigeon"]) == 2
    assert capsys.readouterr().err == "commsched: ConfigError: lane='pigeon' is unknown; there are: tcp, grpc\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--transport", "gloo", "--servers", "2"], "--servers 2 cannot be used with transport=gloo: only ps has servers"),
        (["--transport", "mpi", "--lane", "grpc"], "lane='grpc' has no effect with transport=mpi: it is for ps"),
        (
            ["--transport", "gloo", "--security", "tls"],
            "transport=gloo cannot encrypt, so security='tls' is refused: take transport=ps, or a network that encrypts, such "
            "as WireGuard (docs/security.md), with security='none'",
        ),
        (
            ["--transport", "ps", "--order", "static"],
            f"order='static' has no effect with transport=ps: it is for {', '.join(users_of('order'))}",
        ),
        (["--min", "1"], "--min is for --elastic only"),
        (["--max-restarts", "0"], "--max-restarts is for --elastic only"),
        (["--elastic", "--min", "3"], "--min 3 is more than the 2 ranks of -n"),
        (["--elastic", "--disable", "1"], "--elastic needs several ranks that train together"),
        (["--replace-within", "0"], "--replace-within is for --elastic only"),
        (["--local", "0"], "--local is for --elastic only"),
        (["--standby"], "--standby is for --elastic only"),
        (["--elastic", "--standby"], "--standby is for a script in Python: commsched run --elastic --standby ... train.py"),
        (["--elastic", "--local", "1"], "--local needs COMMSCHED_CONTROL=host:port, where the launchers of all machines meet"),
        (
            ["--elastic", "--transport", "mpi"],
            "transport='mpi' cannot be used with --elastic, which works over ps and gloo only",
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2", *options, "--", sys.executable]) == 2
    assert capsys.readouterr().err == f"commsched: ConfigError: {said}\n"


@pytest.mark.parametrize(
    ("options", "environ", "said"),
    [
        (
            [],
            {},
            "control='10.0.0.1:7' is for elastic jobs on several machines: say by --local how many of the ranks each has room "
            "for",
        ),
        (["--local", "1"], {}, "--local needs the same COMMSCHED_TOKEN or COMMSCHED_TOKEN_FILE on every machine"),
        (
            ["--local", "1"],
            {"COMMSCHED_TOKEN": "short"},
            "the token has 5 of at least 16 characters, and 10.0.0.1:7 may be reached by other machines: take one that nobody "
            "can guess, such as openssl rand -hex 32 prints",
        ),
        (
            ["--local", "1", "--servers", "2"],
            {"COMMSCHED_TOKEN": "0" * 32},
            "--servers 2 cannot be used with --local: start servers by commsched server --keep, and name them in "
            "COMMSCHED_SERVERS",
        ),
    ],
)
def test_what_an_elastic_job_on_several_machines_needs(
    options: list[str], environ: dict[str, str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"COMMSCHED_CONTROL": "10.0.0.1:7", **environ}.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "-n", "2", "--elastic", *options, "--", sys.executable]) == 2
    assert capsys.readouterr().err == f"commsched: ConfigError: {said}\n"


@pytest.mark.parametrize("elastic", [[], ["--elastic"]])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "servers='10.0.0.1:7' needs the token of these servers: set COMMSCHED_TOKEN or COMMSCHED_TOKEN_FILE"),
        (["--servers", "2"], "--servers 2 cannot be used with servers='10.0.0.1:7': choose one"),
    ],
)
def test_servers_that_were_started_by_hand(
    elastic: list[str], options: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMSCHED_SERVERS", "10.0.0.1:7")
    monkeypatch.delenv("COMMSCHED_TOKEN", raising=False)
    assert main(["run", "-n", "2", *elastic, *options, "--", sys.executable]) == 2
    assert capsys.readouterr().err == f"commsched: ConfigError: {said}\n"


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("--transport", "auto", "COMMSCHED_TRANSPORT"),
        ("--fusion", "1MB", "COMMSCHED_FUSION"),
        ("--lane", "grpc", "COMMSCHED_LANE"),
        ("--flows", "3", "COMMSCHED_FLOWS"),
        ("--security", "tls", "COMMSCHED_SECURITY"),
        ("--order", "static", "COMMSCHED_ORDER"),
        ("--wire", "bfloat16", "COMMSCHED_WIRE"),
        ("--hierarchy", "off", "COMMSCHED_HIERARCHY"),
        ("--policy", "fifo", "COMMSCHED_POLICY"),
        ("--collective", "rsag", "COMMSCHED_COLLECTIVE"),
    ],
)
def test_every_rank_has_the_settings_given(monkeypatch: pytest.MonkeyPatch, option: str, value: str, name: str) -> None:
    environs: list[dict[str, str]] = []

    def run(ranks: int, servers: int, command: Any, environ: dict[str, str], *_: object, own_token: bool) -> int:
        environs.append(environ)
        return 0

    monkeypatch.setattr(launch, "run", run)
    assert main(["run", "-n", "2", option, value, "--", sys.executable]) == 0
    assert environs[0][name] == value


def test_files_are_named_from_where_the_job_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script may change its directory before it joins the job."""
    monkeypatch.chdir(tmp_path)
    for variable, path in (("CONFIG", "job.toml"), ("TOKEN_FILE", "../token"), ("CERTIFICATES", "/etc/certs")):
        monkeypatch.setenv(f"COMMSCHED_{variable}", path)
    (tmp_path / "job.toml").write_text('rendezvous = "../place.json"')
    options = {"trace": "traces", "wire": "none"}
    environ = _environ(options, Settings.load(options, os.environ))
    names = ("CONFIG", "RENDEZVOUS", "TOKEN_FILE", "CERTIFICATES", "TRACE", "WIRE")
    assert {name: environ[f"COMMSCHED_{name}"] for name in names} == {
        "CONFIG": f"{tmp_path}/job.toml",
        "RENDEZVOUS": f"{tmp_path.parent}/place.json",
        "TOKEN_FILE": f"{tmp_path.parent}/token",
        "CERTIFICATES": "/etc/certs",
        "TRACE": f"{tmp_path}/traces",
        "WIRE": "none",
    }


def test_the_help_of_each_option_names_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    defaults = Settings()
    for name in Settings.names("run_option"):
        option = name.replace("_", "-")
        found = re.search(rf"--{option} (VALUE|\{{[^}}]*\}}) .*?\(default: ([^)]*)\)", shown)
        assert found
        value = found[2]
        if value == "none" and getattr(defaults, name) is None:
            continue
        assert getattr(Settings.load({name: value}, {}), name) == getattr(defaults, name), name


def test_a_server_has_the_options_that_settings_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["server", "--help"])
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in Settings.names("server_option"))


def test_a_transport_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2", "--transport", "pigeon", "--", sys.executable]) == 2
    assert capsys.readouterr().err == (
        "commsched: ConfigError: transport='pigeon' is unknown; there are: auto, gloo, mpi, nccl, ps\n"
    )


def test_a_wrong_fusion_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2", "--fusion", "4XB", "--", sys.executable]) == 2
    assert capsys.readouterr().err == (
        "commsched: ConfigError: fusion='4XB' is not a size; write it like 4MB, 512KiB or 65536\n"
    )


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["run", "python", "train.py", "-n", "2"], "-n/-np/--ranks"),
        (["run", "--lane", "grpc", "--", "python", "train.py", "-n2"], "-n/-np/--ranks"),
        (["tune", "-n", "2", "python", "train.py", "--out", "tuned.toml"], "--out"),
    ],
)
def test_an_option_behind_the_command_is_said_to_belong_to_it(
    arguments: list[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(
        f"error: the following arguments are required: {missing}; write the options of commsched {arguments[0]} before the "
        "command, since what follows the command is its own\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "-n", "2", "--transprot", "gloo", "train.py"], "--transprot; did you mean --transport?"),
        (["run", "-n", "2", "--transprot=gloo", "train.py"], "--transprot=gloo; did you mean --transport?"),
        (["run", "-n", "2", "--elastc", "train.py", "--lr", "1"], "--elastc; did you mean --elastic?"),
        (["tune", "-n", "2", "--out", "tuned.toml", "--budgt", "9s", "train.py"], "--budgt; did you mean --budget?"),
        (["doctor", "--lisen"], "--lisen; did you mean --listen?"),
        (["doctor", "--zzz"], "--zzz"),
        (["trace", "trace.json", "another.json"], "another.json"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest_of_that_command(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: commsched {arguments[0]} ")
    assert err.endswith(f"\ncommsched {arguments[0]}: error: unrecognized arguments: {said}\n")


def test_a_time_has_an_example_that_suits_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "-n", "2", "--elastic", "--replace-within", "soon", "true"])
    assert capsys.readouterr().err.endswith("--replace-within: 'soon' is not a time; write it in seconds, like 30\n")


def test_without_the_library_that_encrypts_nothing_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "run", lambda *_, **__: pytest.fail("a job was started"))
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setenv("COMMSCHED_TOKEN", "a token that no other test derives anything from")
    assert main(["run", "-n", "2", "--security", "tls", "--", sys.executable]) == 2
    err = capsys.readouterr().err
    assert err.startswith("commsched: ConfigError: security=tls makes certificates with the package cryptography: pip install ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("before", [[], ["--"]])
def test_what_follows_the_command_is_its_own(before: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(launch, "run", lambda ranks, servers, command, *_, **__: commands.append([ranks, *command]) or 0)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    theirs = ["--lr", "1", "-n", "7", "--transport", "none", "--tra", "--", "x"]
    assert main(["run", "-np", "2", "--lane", "tcp", *before, "train.py", *theirs]) == 0
    assert main(["run", "-n2", *before, "sh", "-c", "true"]) == 0
    assert commands == [[2, sys.executable, "train.py", *theirs], [2, "sh", "-c", "true"]]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "there is no command: write it after the options, such as commsched run -n 2 train.py --lr 0.1"),
        (["--"], "there is no command"),
        (["missing.py"], "command 'missing.py' was not found"),
        (["."], "command '.' is a directory; name the script or the program to run"),
    ],
)
def test_a_command_that_cannot_be_started_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"commsched: ConfigError: {said}")


@pytest.mark.parametrize(
    ("first_line", "why"), [("import sys", "Exec format error"), ("#!/usr/bin/env-of-nobody\r", "No such file or directory")]
)
def test_so_is_one_that_the_system_does_not_start(
    first_line: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{first_line}\n")
    script.chmod(0o755)
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        assert main(["run", "-n", "2", str(script)]) == 2
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
    said = f"commsched: ConfigError: command '{script}' cannot be started: {why}: its first line must be #!"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_has_an_example_that_it_accepts(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    [example] = re.findall(r"example:\n  (.*)", capsys.readouterr().out)
    words = example.split("commsched ")[1].split()
    assert words[0] == command
    parser = argparse.ArgumentParser(allow_abbrev=False)
    _COMMANDS[command][0](parser)
    assert parser.parse_args(words[1:]).function


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: commsched ")
    assert "predict" in said
