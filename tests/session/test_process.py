"""What ``commsched.init`` opens, once for a process, and what it takes its launcher's word for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import commsched
from commsched.core.errors import ConfigError, PeerLost, TransportError
from commsched.session import process

from ..jobs.job import clean_environ


def test_a_process_without_launcher_is_one_rank(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "commsched")
    monkeypatch.setattr(os, "environ", {})
    session = commsched.init(partition="1MB")
    assert caplog.messages[0].startswith("1 process, so nothing is averaged; start more with commsched run -n N")
    try:
        assert (session.rank, session.world_size) == (0, 1)
        assert session.core.config.partition_bytes == 1_000_000
        assert commsched.init() is session
        with pytest.raises(commsched.ConfigError, match="already initialised; give credit at the first call of init"):
            commsched.init(credit="1MB")
    finally:
        commsched.shutdown()
    commsched.shutdown()
    with pytest.raises(commsched.ConfigError, match="partiton is not a setting; did you mean partition"):
        commsched.init(partiton="1MB")


def test_a_session_that_a_handler_could_not_close_stays_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    session = commsched.init()
    with session.core._lock, pytest.raises(commsched.UnsupportedError, match="has interrupted its thread within commsched"):
        commsched.shutdown()
    assert commsched.init() is session
    with process._lock:  # it has interrupted init
        assert commsched.init() is session
        commsched.shutdown()
        with pytest.raises(commsched.UnsupportedError, match="has interrupted commsched"):
            commsched.init()
    assert session.closed
    assert commsched.init() is not session
    commsched.shutdown()


def test_a_library_that_counts_other_ranks_than_the_launcher_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    commsched.require_world_size(3, "its own launcher")
    launched = {"COMMSCHED_RANK": "0", "COMMSCHED_WORLD_SIZE": "2"}
    monkeypatch.setattr(os, "environ", launched)
    commsched.require_world_size(2, "Trainer(devices=2)")
    with pytest.raises(ConfigError, match=r"commsched run started 2 ranks, but Trainer\(devices=1\) makes 1; make them agree"):
        commsched.require_world_size(1, "Trainer(devices=1)")


def test_a_process_asks_for_its_place_in_an_elastic_job_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher would not hear a second one, which would wait without end."""
    asked: list[object] = []

    def move(member: object, its: object) -> None:
        asked.append(its)

    monkeypatch.setattr(process.ElasticMember, "move", move)
    monkeypatch.setattr(process, "_member", None)
    several = {"COMMSCHED_RANK": "0", "COMMSCHED_WORLD_SIZE": "2", "COMMSCHED_ELASTIC": "/run/member-0"}
    monkeypatch.setattr(os, "environ", several)
    with pytest.raises(ConfigError, match="COMMSCHED_TOKEN is missing"):
        commsched.init()
    assert asked == []
    monkeypatch.setattr(os, "environ", several | {"COMMSCHED_TOKEN": "a token of this test"})
    with pytest.raises(TransportError, match="the job has made all its steps"):
        commsched.init()
    with pytest.raises(ConfigError, match="this process has asked for its place in the elastic job before"):
        commsched.init()
    assert len(asked) == 1


#: A script that starts a process, which imports it or the module ``joins`` before it works.
_SPAWNS = """
import multiprocessing, sys

class Work:
    def __reduce__(self): return __import__, ("joins",)

def work(*_): print("worked")

if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=[Work()] if sys.argv[2:] else [])
    child.start()
    child.join()
    sys.exit(child.exitcode)
elif not sys.argv[2:]:
    import joins
"""


@pytest.mark.parametrize(
    ("method", "by_argument", "elastic"),
    [("spawn", False, False), ("forkserver", False, False), ("spawn", True, False), ("forkserver", False, True)],
)
def test_a_process_that_a_rank_spawns_does_not_join_the_job_while_it_imports_the_script(
    method: str, by_argument: bool, elastic: bool, tmp_path: Path
) -> None:
    """Such a process, a data loader's worker for one, has the rank's variables. It waited for the job's other ranks, or made
    another job with their workers."""
    (tmp_path / "script.py").write_text(_SPAWNS)
    (tmp_path / "joins.py").write_text("import commsched\ncommsched.init()")
    rank_1 = {"COMMSCHED_RANK": "1", "COMMSCHED_WORLD_SIZE": "2", "COMMSCHED_RENDEZVOUS": str(tmp_path / "nobody.json")}
    if elastic:
        rank_1 |= {"COMMSCHED_ELASTIC": str(tmp_path / "nobody"), "COMMSCHED_TOKEN": "a token of this test"}

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, str(tmp_path / "script.py"), method, *(["as an argument"] if by_argument else [])]
        return subprocess.run(argv, env=clean_environ(**more), capture_output=True, text=True, timeout=50, check=False)

    done = run(**rank_1)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "was started by multiprocessing for rank 1, and imports its script or modules: it cannot join the job again"
        in done.stderr
    )
    done = run() if elastic else run(**rank_1, COMMSCHED_DISABLE="1")
    assert (done.returncode, done.stdout) == (0, "worked\n"), done.stderr


def test_whether_the_job_is_elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    several = {"COMMSCHED_RANK": "0", "COMMSCHED_WORLD_SIZE": "2"}
    path = {"COMMSCHED_ELASTIC": "/run/member-0"}
    for environ, is_elastic in [
        ({}, False),
        (several, False),
        (several | path, True),
        (several | path | {"COMMSCHED_WORLD_SIZE": "1"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | path, False),  # torchrun, in a rank of an elastic job
    ]:
        monkeypatch.setattr(os, "environ", environ)
        assert commsched.is_elastic() == is_elastic, environ


@pytest.mark.parametrize(
    ("ends_by", "code", "told"),
    [
        ("signal.default_int_handler(2, None)", 130, "commsched: rank 0: KeyboardInterrupt"),
        ("sys.exit(143)", 143, "commsched: rank 0: SystemExit: 143"),  # as a handler of SIGTERM may
        ("sys.exit()", 1, "commsched: rank 0: SystemExit: None"),
        ("1 / 0", 1, "commsched: rank 0: ZeroDivisionError: division by zero"),
    ],
)
def test_a_process_that_is_interrupted_while_it_closes_its_session_does_not_end_well(
    ends_by: str, code: int, told: str
) -> None:
    """Its last updates may not be in place."""
    script = f"import signal, sys, commsched\ncommsched.init().on_close(lambda: {ends_by})"
    environ = clean_environ()
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, told)


@pytest.mark.parametrize("noticed", [None, "closed", "has_raised"])
def test_a_failure_is_said_where_nothing_raises_it_without_keeping_the_process(
    noticed: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_NOTICE_SECONDS", 0.1)
    session: Any = SimpleNamespace(rank=1, closed=noticed == "closed", has_raised=noticed == "has_raised")
    process._say_if_unnoticed(session, PeerLost("rank 0 is gone"))
    (timer,) = (thread for thread in threading.enumerate() if thread.name == "commsched-unnoticed")
    assert timer.daemon
    timer.join()
    assert caplog.messages == ([] if noticed else ["rank 1: the job has failed: PeerLost: rank 0 is gone"])
