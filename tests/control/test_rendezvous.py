"""How ranks find rank 0, and who may not."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from commsched import ConfigError, PeerTimeout
from commsched.control.rendezvous import (
    Endpoint,
    Reached,
    find,
    job_name,
    own_host,
    publish,
    reached_at,
    read_token,
    rendezvous_path,
    require_reachable,
    require_strong,
    where_to_listen,
)
from commsched.core.world import World
from commsched.settings import Settings

HERE = World(1, 4, 1, 4, "commsched run")
APART = World(1, 4, 1, 2, "torchrun")


def test_one_machine_needs_nothing() -> None:
    address, token = where_to_listen(HERE, Settings())
    assert address == "127.0.0.1:0"
    assert len(token) == 64
    assert where_to_listen(HERE, Settings()).token != token


@pytest.fixture
def listening() -> Iterator[str]:
    """An address where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_published_is_found_and_private(tmp_path: Path, listening: str) -> None:
    path = tmp_path / "job" / "control.json"
    meeting = Endpoint(listening, "secret")
    publish(path, meeting)
    assert find(HERE, Settings(), path) == meeting
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"pid": 2**70}, {"pid": -1}, {"pid": 1}, {"started": 1}])
def test_a_file_left_by_another_process_is_not_believed(tmp_path: Path, listening: str, change: dict[str, int]) -> None:
    """Of the same number too, as it starts at another time."""
    path = tmp_path / "control.json"
    publish(path, Endpoint(listening, "secret"))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PeerTimeout, match=r"rank 1 waited 0.1 s for rank 0 to say where it listens"):
        find(HERE, Settings(join_within=0.1), path)


def test_a_file_of_an_earlier_session_of_the_same_process_is_not_believed(tmp_path: Path) -> None:
    """Nobody listens there any more."""
    publish(tmp_path / "control.json", Endpoint("127.0.0.1:1", "secret"))
    with pytest.raises(PeerTimeout, match=r"rank 1 waited 0.1 s for rank 0 to say where it listens"):
        find(HERE, Settings(join_within=0.1), tmp_path / "control.json")


def test_what_is_wrong_in_a_file_does_not_matter_once_it_is_replaced(tmp_path: Path, listening: str) -> None:
    path = tmp_path / "control.json"
    path.write_text("{")
    timer = threading.Timer(0.1, publish, [path, Endpoint(listening, "secret")])
    timer.start()
    assert find(HERE, Settings(join_within=60), path) == Endpoint(listening, "secret")
    timer.join()


def test_where_the_disk_is_full_no_half_of_a_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dump", full_disk)
    with pytest.raises(ConfigError, match=r"control\.json cannot be written: No space left on device"):
        publish(tmp_path / "control.json", Endpoint("127.0.0.1:1", "secret"))
    assert list(tmp_path.iterdir()) == []


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_directory_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="may be written by other users"):
        publish(tmp_path / "control.json", Endpoint("127.0.0.1:1", "secret"))


def test_a_file_that_others_may_replace_is_not_believed(tmp_path: Path, listening: str) -> None:
    path = tmp_path / "job" / "control.json"
    publish(path, Endpoint(listening, "secret"))
    path.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="may be written by other users"):
        find(HERE, Settings(join_within=60), path)


@pytest.mark.parametrize("how", ["link", "others may write", "fifo", "directory"])
def test_a_file_that_somebody_else_may_have_put_there_is_not_believed(tmp_path: Path, listening: str, how: str) -> None:
    path, other = tmp_path / "job" / "control.json", tmp_path / "other" / "control.json"
    publish(other, Endpoint(listening, "secret"))
    path.parent.mkdir(mode=0o700)
    if how == "link":
        path.symlink_to(other)
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    else:
        other.rename(path)
        path.chmod(0o666)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"the rendezvous file .*/job/control.json cannot be read"):
        find(HERE, Settings(join_within=0.1), path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_token_that_is_set_counts_and_not_that_of_the_file(tmp_path: Path, listening: str) -> None:
    publish(tmp_path / "control.json", Endpoint(listening, "secret"))
    assert find(HERE, Settings(token="set"), tmp_path / "control.json") == Endpoint(listening, "set")


def test_several_machines_need_address_and_token() -> None:
    for call in (lambda s: where_to_listen(APART, s), lambda s: find(APART, s, Path("/nowhere"))):
        with pytest.raises(ConfigError, match=r"4 ranks on several machines \(torchrun\): set COMMSCHED_CONTROL"):
            call(Settings())
        with pytest.raises(ConfigError, match="no token: set the same COMMSCHED_TOKEN"):
            call(Settings(control="10.0.0.1:29600"))
        token = "a long secret that nobody guesses"
        assert call(Settings(control="10.0.0.1:29600", token=token)) == Endpoint("10.0.0.1:29600", token)


@pytest.mark.parametrize("address", ["0.0.0.0:29600", "[::]:29600", "10.0.0.1:0"])
def test_an_address_at_which_no_other_rank_finds_rank_0_is_refused_there(address: str) -> None:
    settings = Settings(control=address, token="a long secret that nobody guesses")
    with pytest.raises(ConfigError, match=r"rank 1 cannot find rank 0 there; give the address of rank 0's machine, and a port"):
        find(replace(APART, rank=1), settings, Path("/nowhere"))


@pytest.mark.parametrize("address", ["10.0.0.1:29600", "0.0.0.0:0", "[::]:1", "node0:29600"])
def test_a_token_that_strangers_may_guess_is_refused_where_they_can_reach_us(address: str) -> None:
    refused = f"the token has 1 of at least 16 characters, and {re.escape(address)} may be reached by other machines"
    with pytest.raises(ConfigError, match=refused):
        require_strong("x", address)
    with pytest.raises(ConfigError, match="the token has 15 of at least 16 characters"):
        where_to_listen(APART, Settings(control=address, token="x" * 15))
    require_strong("x" * 16, address)


@pytest.mark.parametrize("address", ["127.0.0.1:29600", "[::1]:0", "localhost:1", "127.9.9.9:1"])
def test_any_token_will_do_where_nobody_else_can_reach_us(address: str) -> None:
    require_strong("x", address)


def test_loopback_is_no_address_for_ranks_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    where_to_listen(APART, Settings(control="127.0.0.1:29600", token="x"))
    assert caplog.messages == [
        "rank 0 listens at 127.0.0.1, by control='127.0.0.1:29600', which ranks on other machines cannot reach"
    ]
    where_to_listen(HERE, Settings(control="127.0.0.1:29600", token="x"))
    assert len(caplog.messages) == 1


def test_a_name_of_rank_0_that_stands_for_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /etc/hosts gives a machine's own name to 127.0.1.1."""
    where = {"node0": "127.0.1.1", "node1": "10.0.0.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(0, 0, 0, "", (where[host], 0))])
    token = "a long secret that nobody guesses"
    with pytest.raises(ConfigError, match=r"control='node0:29600': on rank 0's machine the name node0 stands for a loopback"):
        where_to_listen(APART, Settings(control="node0:29600", token=token))
    assert where_to_listen(APART, Settings(control="node1:29600", token=token)).address == "node1:29600"
    assert where_to_listen(HERE, Settings(control="node0:29600", token=token)).address == "node0:29600"


def test_a_loopback_address_will_do_for_ranks_on_one_machine_only() -> None:
    here, there = Reached("127.0.0.1", True, "a"), Reached("10.0.0.2", False, "b")
    require_reachable([here, here])
    require_reachable([Reached("10.0.0.1", False, "a"), there])
    with pytest.raises(
        ConfigError, match=r"rank 0 would be reached at 127\.0\.0\.1, but rank 2 is .*: set control to an address"
    ):
        require_reachable([here, here, there])
    with pytest.raises(ConfigError, match=r"rank 1 would be reached at 127\.0\.0\.1, but rank 0 is .*: set COMMSCHED_HOST to"):
        require_reachable([there, here])


def test_what_a_process_says_of_its_address() -> None:
    mine = reached_at("127.0.0.1")
    assert (mine.host, mine.loopback) == ("127.0.0.1", True)
    script = "from commsched.control.rendezvous import reached_at; print(reached_at('192.0.2.1').machine)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == mine.machine
    assert not reached_at("192.0.2.1").loopback
    assert not reached_at("no such name").loopback


TORCHRUN = {"TORCHELASTIC_RUN_ID": "run", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "3"}


@pytest.mark.parametrize(
    ("launcher", "environ", "name"),
    [
        ("torchrun", TORCHRUN, "run-29500"),
        ("torchrun", {"MASTER_PORT": "29500"}, ""),  # started by hand
        ("srun", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, "7-2"),
        ("mpirun (Open MPI)", {"PMIX_NAMESPACE": "prterun-h-1@1"}, "prterun-h-1@1"),
        ("mpiexec (MPICH)", {"SLURM_JOB_ID": "7"}, ""),  # its first ranks may lack what the others have
        ("commsched run", TORCHRUN, ""),
    ],
)
def test_a_job_is_called_what_its_launcher_calls_it(launcher: str, environ: dict[str, str], name: str) -> None:
    world = World(1, 4, 1, 2, launcher)
    assert job_name(world, Settings(), environ) == name
    assert job_name(world, Settings(job="mine"), environ) == "mine"


def test_a_long_name_of_a_job_is_as_good_as_a_short_one() -> None:
    names = {job_name(HERE, Settings(job="x" * 1000 + end), {}) for end in ("", "a", "b")}
    assert len(names) == 3
    assert {len(name) for name in names} == {64}
    # On the TCP lane one byte says how many the name has.
    assert [len(job_name(HERE, Settings(job="x" * length), {})) for length in (255, 256)] == [255, 64]


def test_token_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_token(Settings(token_file=str(path)))
    path.write_text("")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is empty"):
        read_token(Settings(token_file=str(path)))
    path.write_bytes(b"\xff" * 32)
    with pytest.raises(ConfigError, match=r"token_file='.*' is not text: write a token into it, such as openssl rand -hex 32"):
        read_token(Settings(token_file=str(path)))
    path.write_text("secret\n")
    assert read_token(Settings(token_file=str(path))) == "secret"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="may be read by other users; chmod 600"):
        read_token(Settings(token_file=str(path)))
    assert read_token(Settings(token="given", token_file=str(path))) == "given"


def test_jobs_of_one_user_have_files_of_their_own() -> None:
    a = rendezvous_path(Settings(), {"TORCHELASTIC_RUN_ID": "a", "MASTER_PORT": "1"})
    b = rendezvous_path(Settings(), {"TORCHELASTIC_RUN_ID": "b", "MASTER_PORT": "1"})
    assert a != b
    assert a.parent.name == f"commsched-{os.getuid()}"
    assert rendezvous_path(Settings(), {"PMIX_NAMESPACE": "../../x"}).parent == a.parent
    assert rendezvous_path(Settings(rendezvous="/some/file"), {}) == Path("/some/file")


def test_hosts() -> None:
    assert own_host(Settings(), "127.0.0.1:1") == "127.0.0.1"
    assert own_host(Settings(host="10.0.0.7"), "10.0.0.1:1") == "10.0.0.7"
    assert own_host(Settings(), "127.0.0.1:1") == "127.0.0.1"  # the address by which rank 0 is reached


def test_a_link_local_address_is_no_address_for_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe(ExitStack):
        def __init__(self, *which: object) -> None:
            super().__init__()

        def connect(self, where: object) -> None: ...

        def getsockname(self) -> tuple[object, ...]:
            return "fe80::fc:ff:fe00:1", 40000, 0, 2

    monkeypatch.setattr(socket, "socket", Probe)
    with pytest.raises(
        ConfigError, match=r"from fe80::fc:ff:fe00:1, a link-local address.*or set COMMSCHED_HOST on every rank"
    ):
        own_host(Settings(), "[::1]:29500")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[]",
        "[" * 100_000,
        '{"address": "127.0.0.1:1", "token": "t", "pid": "x", "started": 1}',
        '{"address": "127.0.0.1:1", "token": "t", "pid": 1e999, "started": 1}',
        '{"address": "nowhere", "token": "t", "pid": 1, "started": 1}',
    ],
)
def test_a_damaged_file_is_named_in_the_end(tmp_path: Path, text: str) -> None:
    path = tmp_path / "control.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"control\.json cannot be read .*; remove it"):
        find(HERE, Settings(join_within=0.05), path)
