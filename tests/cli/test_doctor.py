"""``commsched doctor``: what it finds here, and two of them that test the way to each other."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from commsched.cli import doctor
from commsched.cli.main import main
from commsched.core.ports import free_port, given_out
from commsched.net.rpc import listen
from commsched.transports import transport_names
from tests.jobs.job import Job, listening


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    for name in ("COMMSCHED_TOKEN", "COMMSCHED_LANE", "COMMSCHED_CONTROL", "COMMSCHED_WIRE"):
        monkeypatch.delenv(name, raising=False)


def examined(capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert main(["doctor"]) == code
    return capsys.readouterr().out


def test_every_transport_and_engine_is_there_or_has_its_pip_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda module: None)
    out = examined(capsys)
    shown = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    assert set(transport_names()) <= set(shown)
    extras = {"gloo": "torch", "mpi": "mpi", "nccl": "cuda", "JAX": "jax", "PyTorch": "torch", "Ray": "ray"}
    for name, extra in {**extras, "scikit-optimize": "tune", "cryptography": "tls"}.items():
        assert shown[name].endswith(f'no; pip install "commsched[{extra}]"')
    assert shown["ps"].endswith("yes")


def test_settings_and_addresses_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMSCHED_CONTROL", "127.0.0.1:29600")
    monkeypatch.setenv("COMMSCHED_TOKEN", "short")
    monkeypatch.setenv("COMMSCHED_WIRE", "bfloat16")
    monkeypatch.setenv("COMMSCHED_SECURITY", "tls")
    out = examined(capsys)
    assert "towards control=127.0.0.1:29600, this machine's address is 127.0.0.1 (loopback)" in out
    assert "control='127.0.0.1:29600', security='tls', wire='bfloat16'" in out
    assert "security=tls, with certificates made from the token" in out
    assert "the length of the token is 5" in out
    assert "short" not in out


def test_a_name_of_control_that_does_not_resolve_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMSCHED_HOST", "127.0.0.1")
    monkeypatch.setenv("COMMSCHED_CONTROL", "nosuch.invalid:29600")
    assert "the host of control=nosuch.invalid:29600 is not found: " in examined(capsys)


def test_the_port_of_control_is_looked_at_on_its_own_machine_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = f"localhost:{free_port()}"
    monkeypatch.setenv("COMMSCHED_CONTROL", free)
    assert f"the port of control={free} is free" in examined(capsys)
    with listen("127.0.0.1:0") as listening:
        taken = f"127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setenv("COMMSCHED_CONTROL", taken)
        assert f"cannot listen at {taken}: the port is taken by another process" in examined(capsys)
        elsewhere = taken.replace("127.0.0.1", "198.51.100.1")  # an address for documentation
        monkeypatch.setenv("COMMSCHED_CONTROL", elsewhere)
        out = examined(capsys)
    assert f"{elsewhere} is free" not in out
    assert "cannot listen" not in out


def test_the_ports_that_the_system_gives_out_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    [line] = [line for line in examined(capsys).splitlines() if "ports to open between machines" in line]
    first, last = given_out()
    assert f"{first} to {last}, where ranks listen at any free one" in line


def test_a_wrong_setting_is_named_and_the_rest_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMSCHED_WIRE", "float8")
    out = examined(capsys, 1)
    assert "ConfigError: COMMSCHED_WIRE='float8' is unknown" in out
    assert "shared memory: " in out


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TRANSPORT": "nccll"}, "transport='nccll' is unknown; did you mean nccl?"),
        ({"TRANSPORT": "gloo", "LANE": "grpc"}, "lane='grpc' has no effect with transport=gloo"),
        ({"TOKEN_FILE": "/nowhere/token"}, "token_file='/nowhere/token' cannot be read"),
        ({"TOKEN": "x", "CONTROL": "10.0.0.1:29600"}, "the token has 1 of at least 16 characters"),
        ({"TOKEN": "x", "HOST": "10.0.0.1"}, "the token has 1 of at least 16 characters, and host='10.0.0.1'"),
        ({"CONTROL": "train-0..ns:29600"}, "train-0..ns is no name of a host"),
        ({"HOST": "10.0.0.7:29600"}, "10.0.0.7:29600 is no address of a host; write one without a port"),
    ],
)
def test_each_wrong_setting_is_named_and_ends_it_with_1(
    variables: dict[str, str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"COMMSCHED_{name}", value)
    assert main(["doctor"]) == 1
    assert said in capsys.readouterr().out


def test_a_driver_that_does_not_work_is_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    main(["doctor"])
    out = capsys.readouterr().out
    assert "nvidia-smi failed: " in out
    assert not re.search(r"^  nccl +yes", out, re.MULTILINE)


def test_the_file_of_settings_counts_for_the_test_of_two(tmp_path: Path) -> None:
    """One has them in a file, and the other one as variables."""
    address = f"127.0.0.1:{free_port()}"
    token = "of this test, which nobody guesses"
    file = tmp_path / "commsched.toml"
    file.write_text(f'token = "{token}"\nsecurity = "tls"\nfail_after = "20"\n')
    with Job("--listen", address, subcommand="doctor", environ={"COMMSCHED_CONFIG": str(file)}) as one:
        await_listener(one, address)
        plain = {"COMMSCHED_TOKEN": token, "COMMSCHED_SECURITY": "tls", "COMMSCHED_FAIL_AFTER": "20"}
        with Job("--peer", address, subcommand="doctor", environ=plain) as other:
            ended = [job.process.communicate(timeout=300) for job in (one, other)]
            assert [job.process.returncode for job in (one, other)] == [0, 0], ended


def test_a_rate_is_shown_as_it_is_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMSCHED_RATE", "300mbit")
    assert "  rate=300mbit" in examined(capsys)


def await_listener(job: Job, address: str) -> None:
    port = int(address.partition(":")[2])
    while job.process.poll() is None and port not in {each for _, each in listening(job.process.pid)}:
        time.sleep(0.02)  # somebody else's process: nothing could tell us


def test_two_of_them_join_and_measure_with_encryption() -> None:
    address = f"127.0.0.1:{free_port()}"
    environ = {"COMMSCHED_TOKEN": "of this test, which nobody guesses", "COMMSCHED_SECURITY": "tls"}
    with Job("--listen", address, subcommand="doctor", environ=environ) as one:
        await_listener(one, address)
        with Job("--peer", address, subcommand="doctor", environ=environ) as other:
            ended = [job.process.communicate(timeout=300) for job in (one, other)]
            assert [job.process.returncode for job in (one, other)] == [0, 0], ended
    for out, err in ended:
        assert "control channel: joined, both ends have proved the token; 127.0.0.1 (loopback) is the other machine" in out
        assert "ms for a round trip" in out
        assert "Gbit/s in each direction" in out
        assert all("which ranks on other machines cannot reach" in line for line in err.splitlines())  # it is loopback
    said = f"listening on {address}; on the other machine: COMMSCHED_TOKEN=(the same token) COMMSCHED_SECURITY=tls"
    assert ended[0][0].startswith(said)


def test_where_nobody_listens_it_says_so_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert main(["doctor", "--peer", address]) == 2
    assert "set COMMSCHED_TOKEN to the token that commsched doctor --listen printed" in capsys.readouterr().err
    monkeypatch.setenv("COMMSCHED_TOKEN", "of this test, which nobody guesses")
    assert main(["doctor", "--peer", address]) == 2
    err = capsys.readouterr().err
    assert f"nothing can be reached at {address}: Connection refused; start commsched doctor --listen {address}" in err


@pytest.mark.parametrize(
    ("address", "token", "said"),
    [
        ("nohost.invalid:29600", "of this test, which nobody guesses", "cannot listen at nohost.invalid:29600: "),
        ("10.0.0.7:29600", "short", "the token has 5 of at least 16 characters"),
    ],
)
def test_what_keeps_it_from_listening_is_said_first(
    address: str, token: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMMSCHED_TOKEN", token)
    assert main(["doctor", "--listen", address]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    with Job("--listen", f"127.0.0.1:{free_port()}", subcommand="doctor") as waiting:
        waiting.lines(1)
        waiting.process.send_signal(signal.SIGINT)
        code, _, err = waiting.end()
    *warnings, last = err.splitlines()
    # Python kills itself by the signal if that came while exec() ran, as namedtuple() calls it, whoever catches the exception.
    assert (code in (130, -signal.SIGINT), last) == (True, "commsched: interrupted")
    assert all(line.startswith("commsched: rank 0 listens at 127.0.0.1") for line in warnings)  # if it came so far


def test_another_token_is_refused_by_name() -> None:
    address = f"127.0.0.1:{free_port()}"
    with Job("--listen", address, subcommand="doctor", environ={"COMMSCHED_TOKEN": "one token of this test"}) as one:
        await_listener(one, address)
        theirs = {"COMMSCHED_TOKEN": "another token of this test", "COMMSCHED_FAIL_AFTER": "2"}
        with Job("--peer", address, subcommand="doctor", environ=theirs) as other:
            _, err = other.process.communicate(timeout=300)
            assert other.process.returncode == 2
    assert "refuses this token; set the same COMMSCHED_TOKEN" in err
