"""How ranks find rank 0, and who may not."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from commsched import ConfigError, PeerTimeout
from commsched.core.config import Settings
from commsched.core.world import World
from commsched.rendezvous import Meeting, find, own_host, publish, read_token, rendezvous_path, where_to_listen

HERE = World(1, 4, 1, 4, "commsched run")
APART = World(1, 4, 1, 2, "torchrun")


def test_one_machine_needs_nothing() -> None:
    address, token = where_to_listen(HERE, Settings())
    assert address == "127.0.0.1:0"
    assert len(token) == 64
    assert where_to_listen(HERE, Settings()).token != token


def test_published_is_found_and_private(tmp_path: Path) -> None:
    path = tmp_path / "job" / "control.json"
    meeting = Meeting("127.0.0.1:1234", "secret")
    publish(path, meeting)
    assert find(HERE, Settings(), path) == meeting
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_left_by_a_dead_process_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    publish(path, Meeting("127.0.0.1:1234", "secret"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": 2**22 + 1}))
    with pytest.raises(PeerTimeout, match=r"rank 1 waited 0.1 s for rank 0 to say where it listens"):
        find(HERE, Settings(join_within=0.1), path)


def test_a_directory_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="may be written by other users"):
        publish(tmp_path / "control.json", Meeting("127.0.0.1:1", "secret"))


def test_several_machines_need_address_and_token() -> None:
    for call in (lambda s: where_to_listen(APART, s), lambda s: find(APART, s, Path("/nowhere"))):
        with pytest.raises(ConfigError, match=r"4 ranks on several machines \(torchrun\): set COMMSCHED_CONTROL"):
            call(Settings())
        with pytest.raises(ConfigError, match="no token: set the same COMMSCHED_TOKEN"):
            call(Settings(control="10.0.0.1:29600"))
        assert call(Settings(control="10.0.0.1:29600", token="t")) == Meeting("10.0.0.1:29600", "t")


def test_token_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_token(Settings(token_file=str(path)))
    path.write_text("")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is empty"):
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
    assert own_host(HERE, Settings(), "127.0.0.1:1") == "127.0.0.1"
    assert own_host(APART, Settings(host="10.0.0.7"), "10.0.0.1:1") == "10.0.0.7"
    assert own_host(APART, Settings(), "127.0.0.1:1") == "127.0.0.1"  # the address by which rank 0 is reached


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    for text in ("{", "{}", "[]", '{"address": "a", "token": "t", "pid": "x"}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"control\.json cannot be read .*; remove it"):
            find(HERE, Settings(), path)


def test_a_control_host_that_is_not_found_is_named() -> None:
    with pytest.raises(ConfigError, match=r"control='nohost.invalid:29600' cannot be reached"):
        own_host(APART, Settings(join_within=0.1), "nohost.invalid:29600")
