"""A fork that stands for a command does what the command does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.jobs.job import clean_environ, gone

#: Says all that a process is given.
SAYS = """
import json, os, signal, sys
said = {
    "argv": sys.argv,
    "name": __name__,
    "path": sys.path[0],
    "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(),
    "cwd": os.getcwd(),
    "variables": dict(os.environ),
    "stdin": sys.stdin.read(),
    "descriptors": [number for number in range(3, 60) if os.path.exists(f"/proc/self/fd/{number}")],
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)],
    "line": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")[1:],
    "imported": "commsched.cli.main" in sys.modules,
}
print(json.dumps(said), flush=True)
print("an error", file=sys.stderr)
sys.exit(7)
"""


def said(popen: Any, command: list[str], cwd: Path, **options: Any) -> tuple[dict[str, Any], str, int, bool]:
    """Run it. Returns what the process says of itself and on stderr, its exit code, and whether it is our child."""
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w"):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        given = {"cwd": cwd, "env": clean_environ(MINE="1"), "pass_fds": [writer], "start_new_session": True}
        with popen(command, **pipes, **given, **options) as process:
            out, err = process.communicate("what it reads", timeout=300)
        found = json.loads(out)
        passed = found.pop("descriptors")
        assert writer in passed
        return found, err, process.returncode, found.pop("parent") == os.getpid()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "says.py"
    path.parent.mkdir()
    path.write_text(SAYS)
    return path


@pytest.mark.parametrize("how", ["script", "module"])
def test_it_is_given_what_a_process_is_given(how: str, script: Path, tmp_path: Path) -> None:
    words = [str(script)] if how == "script" else ["-m", "folder.says"]
    command = [sys.executable, *words, "a word", "--option"]
    plain = said(subprocess.Popen, command, tmp_path)
    forked = said(warm.Popen, command, tmp_path, imports=warm.NUMPY)
    assert not plain[0].pop("imported")
    assert forked[0].pop("imported")
    added = forked[0]["variables"].keys() - plain[0]["variables"].keys()
    assert added <= {"GRPC_VERBOSITY"}, added
    for name in added:
        del forked[0]["variables"][name]
    assert forked == plain
    assert plain[1:] == ("an error\n", 7, True)


def test_signals_that_are_to_be_ignored_are_ignored_and_others_are_not(script: Path, tmp_path: Path) -> None:
    found, *_ = said(warm.Popen, [sys.executable, str(script)], tmp_path, imports=warm.NUMPY, ignored=[signal.SIGHUP])
    assert found["signals"][0] == str(signal.SIG_IGN)
    assert "default_int_handler" in found["signals"][1]
    assert found["signals"][2] == str(signal.SIG_DFL)


def test_signals_are_ignored_as_asked_also_if_no_fork_stands_for_the_command() -> None:
    code = "import signal; print([signal.getsignal(n).name for n in (signal.SIGHUP, signal.SIGTERM)])"
    ended = warm.run([sys.executable, "-S", "-c", code], imports=warm.NUMPY, ignored=[signal.SIGTERM], env=clean_environ())
    assert (ended.stdout, ended.stderr) == ("['SIG_DFL', 'SIG_IGN']\n", "")


def test_an_option_that_a_fork_does_not_honour_is_honoured() -> None:
    code = "import os, sys; print(oct(os.umask(0)), 'commsched.cli.main' in sys.modules)"
    assert warm.run([sys.executable, "-c", code], imports=warm.NUMPY, env=clean_environ(), umask=0o27).stdout == "0o27 False\n"


ENDS = """
import atexit, sys, threading, weakref
it = threading.Event()
atexit.register(print, weakref.ref(it))
if len(sys.argv) > 1:
    sys.exit(3)
"""


@pytest.mark.parametrize("how", ["script", "module", "code"])
@pytest.mark.parametrize("more", [[], ["exits"]], ids=["returns", "exits"])
def test_globals_outlive_the_exit_handlers(how: str, more: list[str], tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    words = {"script": ["ends.py"], "module": ["-m", "ends"], "code": ["-c", ENDS]}[how]
    ended = warm.run([sys.executable, *words, *more], imports=warm.NUMPY, env=clean_environ(), cwd=tmp_path)
    assert (ended.stderr, ended.returncode) == ("", 3 if more else 0)
    assert "to 'Event'" in ended.stdout


def test_forks_have_random_numbers_of_their_own() -> None:
    code = "import numpy; print(numpy.random.random())"
    ended = [warm.run([sys.executable, "-c", code], imports=warm.NUMPY, env=clean_environ()) for _ in range(2)]
    assert ended[0].stdout != ended[1].stdout


def test_libraries_start_no_threads_whatever_the_variables_say() -> None:
    code = "import os; print([os.environ.get(name) for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS')])"
    for number in (None, "4"):
        environ = clean_environ() if number is None else clean_environ(OPENBLAS_NUM_THREADS=number)
        del environ["OMP_NUM_THREADS"]
        ended = warm.run([sys.executable, "-c", code], imports=("numpy",), env=environ)
        assert (ended.stdout, ended.stderr) == (f"{[None, number]}\n", "")


@pytest.mark.parametrize("asked_by", ["a process", "a stand-in"])
def test_a_process_that_forks_and_has_ended_is_told_of_once(asked_by: str) -> None:
    command = [sys.executable, "-c", "print('runs')"]
    options: dict[str, Any] = {"imports": ("json",), "env": clean_environ()}
    assert warm.run(command, **options).stdout == "runs\n"
    *_, source = warm._sources.values()
    assert source._process is not None
    source._process.kill()
    source._process.wait()
    ask = (
        partial(warm.run, command, **options)
        if asked_by == "a process"
        else partial(warm._stand_in, ("json",), clean_environ())
    )
    with pytest.raises(RuntimeError, match=r"the process that forks after \('json',\) were imported has ended: exit code -9"):
        ask()
    assert warm.run(command, **options).stdout == "runs\n"


def test_one_that_ends_while_it_is_asked_is_told_of_too() -> None:
    with pytest.raises(RuntimeError, match=r"after \('no_such_module',\) were imported has ended: exit code 1"):
        warm.run([sys.executable, "-c", "print('runs')"], imports=("no_such_module",), env=clean_environ())
    assert "no_such_module" not in str(warm._sources.keys())


def test_threads_may_fork_from_different_processes_at_once() -> None:
    """A process whose fork is not our child by then has no exit code that we are told."""
    command, codes = [sys.executable, "-c", "import sys; sys.exit(7)"], []

    def start_many(module: str) -> None:
        for _ in range(50):
            codes.append(warm.run(command, imports=(module,), env=clean_environ()).returncode)

    threads = [threading.Thread(target=start_many, args=(module,)) for module in ("json", "csv")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [7] * 100


FORKS_ONCE = """
import os
fork, server = os.fork, os.getpid()
def fork_once():
    if os.getpid() != server:
        raise BlockingIOError("too many processes")
    return fork()
os.fork = fork_once
"""


def test_a_process_that_could_not_fork_says_so(tmp_path: Path) -> None:
    (tmp_path / "forks_once.py").write_text(FORKS_ONCE)
    environ = clean_environ(PYTHONPATH=os.pathsep.join([str(tmp_path), warm.ROOT]))
    for _ in range(2):
        with pytest.raises(OSError, match=r"the process that forks .* could not fork"):
            warm.run([sys.executable, "-c", "print('runs')"], imports=("forks_once",), env=environ)


@pytest.mark.parametrize(("pid", "what"), [(0, "could not fork"), (1, "the fork 1 is a child of 0 instead of {}")])
def test_a_fork_that_is_none_or_not_our_child_is_an_error(pid: int, what: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(pid.to_bytes(8, "big"))
        with pytest.raises(OSError, match=what.format(os.getpid())):
            warm._Source(ours).fork({}, [], pytest.fail)


def test_one_that_is_killed_is_seen_to_be_killed(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time\nprint('waits', flush=True)\ntime.sleep(1000)\n")
    command = [sys.executable, str(tmp_path / "waits.py")]
    with warm.Popen(command, imports=warm.NUMPY, env=clean_environ(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        assert process.poll() is None
        process.kill()
        assert process.wait(60) == -signal.SIGKILL


STARTS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.pid, child.communicate()[0].strip(), child.returncode, flush=True)
time.sleep(1000)
"""
CHILD = """
import os, sys
print(os.getpid(), os.getppid(), "commsched.cli.main" in sys.modules)
sys.exit(3)
"""


def test_what_a_nested_one_starts_are_forks_too_and_its_own_children(tmp_path: Path) -> None:
    """And nothing of either is left when it is killed."""
    (tmp_path / "starts.py").write_text(STARTS)
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, str(tmp_path / "starts.py"), str(tmp_path / "child.py")]
    options: dict[str, Any] = {"env": clean_environ(), "stdout": subprocess.PIPE, "text": True}
    with warm.Popen(command, imports=warm.NUMPY, nested=True, **options) as process:
        assert process.stdout is not None
        pid, its_own, its_parent, imported, code = process.stdout.readline().split()
        assert (its_own, its_parent, imported, code) == (pid, str(process.pid), "True", "3")
        [source] = children(process.pid)  # it forks for this process
        process.kill()
    assert gone(source)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_other_commands_run_as_usual(tmp_path: Path) -> None:
    code = "import sys; print('commsched.cli.main' in sys.modules)"
    for command, said in (
        ([sys.executable, "-c", code], "True\n"),
        ([sys.executable, "-S", "-c", code], "False\n"),
        (["sh", "-c", "echo $0"], "sh\n"),
    ):
        assert warm.run(command, imports=warm.NUMPY, env=clean_environ()).stdout == said


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A shell starts what runs in the background with SIGINT ignored, and nohup with SIGHUP, and processes inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_interruptible")
def test_another_program_may_start_one_by_one_that_stands_for_it(script: Path, tmp_path: Path) -> None:
    words = warm._stand_in(warm.NUMPY, clean_environ())

    def standing(command: list[str], **options: Any) -> Any:
        return subprocess.Popen([*words, *command[1:]], **options)

    command = [sys.executable, str(script), "a word"]
    (plain, *ends), (forked, *its_ends) = said(subprocess.Popen, command, tmp_path), said(standing, command, tmp_path)
    for different in ("session", "imported"):
        assert plain.pop(different) != forked.pop(different)
    assert plain["variables"].items() <= forked.pop("variables").items()
    del plain["variables"]
    assert forked == plain
    assert its_ends[:2] == ends[:2] == ["an error\n", 7]


@pytest.mark.parametrize("killed", ["fork", "stand-in"])
def test_a_fork_and_what_stands_for_it_end_together(killed: str, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)\n")
    command = [*warm._stand_in(warm.NUMPY, clean_environ()), str(tmp_path / "waits.py")]
    with subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(pid if killed == "fork" else process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        assert gone(pid)


def test_variables_that_count_at_the_start_are_those_of_the_start(tmp_path: Path) -> None:
    """Python reads this one for ``sys.path`` when it starts."""
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "found_beside.py").write_text("")
    (tmp_path / "script.py").write_text("import found_beside\nprint(found_beside.__file__)\n")
    path = os.pathsep.join([str(tmp_path / "beside"), warm.ROOT])
    command = [sys.executable, str(tmp_path / "script.py")]
    ended = warm.run(command, imports=("json",), env=clean_environ(PYTHONPATH=path))
    assert (ended.stdout, ended.stderr) == (f"{tmp_path / 'beside' / 'found_beside.py'}\n", "")


def test_a_time_limit_ends_it(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(1000)\n")
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run([sys.executable, str(tmp_path / "waits.py")], imports=warm.NUMPY, env=clean_environ(), timeout=0.2)
    assert time.monotonic() - began < 500
