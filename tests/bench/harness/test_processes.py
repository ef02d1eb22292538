import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bench.harness.processes import JobFailed, Processes, signals_deferred, signals_handled

ROOT = Path(__file__).parents[2]


def python(code):
    return [sys.executable, "-c", code]


def gone(pid):
    return not Path(f"/proc/{pid}").exists()


def test_wait_returns_when_all_wanted_have_ended():
    with Processes() as processes:
        waits = processes.start("one that stays", python("import time; time.sleep(600)"), os.environ)
        wanted = [processes.start(f"worker {index}", python(""), os.environ) for index in range(3)]
        processes.wait(wanted, 60)
        assert [process.popen.returncode for process in wanted] == [0, 0, 0]
    assert gone(waits.pid)


def test_a_failure_names_the_process_and_quotes_it():
    with Processes() as processes:
        sleeps = processes.start("worker 0", python("import time; time.sleep(600)"), os.environ)
        fails = processes.start(
            "worker 1", python("import sys; print('step 3', flush=True); sys.exit('no such tensor')"), os.environ
        )
        with pytest.raises(JobFailed, match=r"^worker 1 ended with code 1:\nstep 3\nno such tensor$"):
            processes.wait([sleeps, fails], 60)


def test_a_signal_is_named():
    with Processes() as processes:
        killed = processes.start("worker 2", python("import os; os.kill(os.getpid(), 9)"), os.environ)
        with pytest.raises(JobFailed, match=r"^worker 2 was killed by SIGKILL$"):
            processes.wait([killed], 60)


def test_a_process_that_takes_too_long_is_named():
    with Processes() as processes:
        sleeps = processes.start("worker 3", python("import time; time.sleep(600)"), os.environ)
        with pytest.raises(JobFailed, match=r"^worker 3 did not end within 0.05 s$"):
            processes.wait([sleeps], 0.05)


def test_first_line():
    with Processes() as processes:
        says = processes.start(
            "server 0", python("print('listening on a:1', flush=True); print('more')"), os.environ, says_line=True
        )
        assert says.first_line(60) == "listening on a:1"
        silent = processes.start("server 1", python("import sys; sys.exit('port taken')"), os.environ, says_line=True)
        with pytest.raises(JobFailed, match=r"^server 1 ended without printing a line:\nport taken$"):
            silent.first_line(60)
        hangs = processes.start("server 2", python("import time; time.sleep(600)"), os.environ, says_line=True)
        with pytest.raises(JobFailed, match=r"^server 2 printed no line within 0.05 s$"):
            hangs.first_line(0.05)


def test_children_end_too(ended):
    code = "import subprocess, sys; c = subprocess.Popen(['sleep', '600']); print(c.pid, flush=True); c.wait()"
    with Processes() as processes:
        child = os.pidfd_open(int(processes.start("parent", python(code), os.environ, says_line=True).first_line(60)))
    assert ended(child)


def test_a_deferred_signal_is_raised_at_the_end_of_the_outermost_block():
    reached = []

    def terminate():
        with signals_handled():
            with signals_deferred():
                with signals_deferred():
                    os.kill(os.getpid(), signal.SIGTERM)
                    reached.append("inner")
                reached.append("outer")
            reached.append("never")

    with pytest.raises(SystemExit) as end:
        terminate()
    assert reached == ["inner", "outer"]
    assert end.value.code == 143


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        with signals_handled():
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_may_use_it():
    done = []

    def use():
        with signals_handled(), signals_deferred():
            done.append(True)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(300)
    assert done == [True]


LOOPBACK = """
import os
from bench.harness.cluster import Loopback
with Loopback() as hosts:
    sleeper = hosts.start("a", "sleeper", ["sleep", "600"], os.environ)
    print(sleeper.pid, flush=True)
    hosts.processes.wait([sleeper], 600)
"""


def test_sigterm_ends_the_processes_started():
    with subprocess.Popen(python(LOOPBACK), cwd=ROOT, stdout=subprocess.PIPE, text=True) as bench:
        pid = int(bench.stdout.readline())
        bench.terminate()
        assert bench.wait(300) == 143
    assert gone(pid)
