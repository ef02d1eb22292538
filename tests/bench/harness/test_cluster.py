import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness import cluster as cluster_module
from bench.harness.cluster import Cluster, ClusterUnavailable
from bench.harness.processes import JobFailed
from commsched.core.errors import ConfigError

ROOT = Path(__file__).parents[2]


def reason_for_none():
    try:
        with Cluster(["probe"], "1gbit"):
            return None
    except ClusterUnavailable as error:
        return str(error)


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    if reason := reason_for_none():
        pytest.skip(reason)


def namespaces(pid):
    return [name for name in cluster_module._existing() if name.startswith(f"commsched-bench-{pid}-")]


def links():
    return sorted(name for _, name in socket.if_nameindex())


def run(cluster, host, *argv):
    process = cluster.start(host, f"{argv[0]} on {host}", argv, os.environ, says_line=True)
    cluster.processes.wait([process], 60)
    return process.popen.stdout.read().decode()


SERVE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, received = listener.accept()[0], 0
while data := connection.recv(65536):
    received += len(data)
print(received)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(300_000))
"""


def test_hosts_reach_each_other_and_nothing_shows_outside():
    before = links()
    with Cluster(["a", "b"], "1gbit") as cluster:
        assert links() == before
        assert len(namespaces(os.getpid())) == 3
        server = cluster.start("a", "server", [sys.executable, "-c", SERVE, cluster.address("a")], os.environ, says_line=True)
        assert server.first_line(60) == "ready"
        client = cluster.start("b", "client", [sys.executable, "-c", SEND, cluster.address("a")], os.environ)
        cluster.processes.wait([client, server], 60)
        assert server.popen.stdout.read().split() == [b"300000"]
    assert namespaces(os.getpid()) == []
    assert links() == before


def test_each_link_has_its_rate_in_both_directions():
    with Cluster(["fast", "slow"], {"fast": "10gbit", "slow": "200mbit"}) as cluster:
        assert "rate 10Gbit" in run(cluster, "fast", "tc", "qdisc", "show", "dev", "eth0")
        assert "rate 200Mbit" in run(cluster, "slow", "tc", "qdisc", "show", "dev", "eth0")
        bridge = cluster.namespace("x").replace("host-x", "bridge")
        ports = subprocess.run(["tc", "-n", bridge, "qdisc"], capture_output=True, text=True, check=True).stdout
        assert re.search(r"dev port1 root .*rate 10Gbit", ports)
        assert re.search(r"dev port2 root .*rate 200Mbit", ports)


SEND_TWICE = """
import socket, sys
with socket.create_connection((sys.argv[1], 32768)) as first, socket.create_connection((sys.argv[1], 32768)) as second:
    first.sendall(bytes(100_000))
    second.sendall(bytes(200_000))
"""
SERVE_TWICE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 32768))
print("ready", flush=True)
for connection, _ in [listener.accept(), listener.accept()]:
    while connection.recv(65536):
        pass
"""


def test_every_connection_has_a_cap_of_its_own():
    with Cluster(["a", "b"], "1gbit", "100mbit") as cluster:
        serve = [sys.executable, "-c", SERVE_TWICE, cluster.address("a")]
        server = cluster.start("a", "server", serve, os.environ, says_line=True)
        assert server.first_line(60) == "ready"
        client = cluster.start("b", "client", [sys.executable, "-c", SEND_TWICE, cluster.address("a")], os.environ)
        cluster.processes.wait([client, server], 60)
        command = ["tc", "-n", cluster.namespace("b"), "-s", "class", "show", "dev", "eth0"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used = re.findall(r"class htb 1:\w+ parent 1:1 .*ceil (\w+) .*\n Sent (\d+) bytes", shown)
        sent = sorted((int(nbytes) // 100_000, ceil) for ceil, nbytes in used if int(nbytes) >= 100_000)
        assert sent == [(1, "100Mbit"), (2, "100Mbit")]


def test_without_a_rate_links_are_not_shaped():
    with Cluster(["a"], None) as cluster:
        assert "tbf" not in run(cluster, "a", "tc", "qdisc", "show")


def test_two_clusters_of_one_process_are_apart():
    with Cluster(["a"], None) as first, Cluster(["a"], None) as second:
        assert first.namespace("a") != second.namespace("a")
        assert len(namespaces(os.getpid())) == 4
    assert namespaces(os.getpid()) == []


def test_an_exception_removes_everything():
    started = []

    def fail():
        with Cluster(["a"], "1gbit") as cluster:
            started.append(cluster.start("a", "sleeper", ["sleep", "600"], os.environ))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert namespaces(os.getpid()) == []
    assert started[0].popen.returncode == -signal.SIGKILL


def test_a_failure_while_building_removes_what_was_built(monkeypatch):
    def fail(*arguments):
        raise ClusterUnavailable("no tbf")

    monkeypatch.setattr(cluster_module, "_shape", fail)
    with pytest.raises(ClusterUnavailable, match="no tbf"):
        with Cluster(["a"], "1gbit"):
            pytest.fail("entered")
    assert namespaces(os.getpid()) == []


def test_a_process_that_left_its_session_is_killed_as_well(ended):
    with Cluster(["a"], None) as cluster:
        escape = ["setsid", "--fork", "sh", "-c", "exec sleep 600"]
        cluster.processes.wait([cluster.start("a", "setsid", escape, os.environ)], 60)
        name = cluster.namespace("a")
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout.split()
        pidfds = [os.pidfd_open(int(pid)) for pid in pids]
    assert len(pidfds) == 1
    assert ended(pidfds[0])


HOLD = """
import os
import re
from bench.harness.cluster import Cluster
with Cluster(["a", "b"], "1gbit") as cluster:
    sleeper = cluster.start("a", "sleeper", ["sleep", "600"], os.environ)
    print(sleeper.pid, flush=True)
    cluster.processes.wait([sleeper], 600)
"""


def holder():
    return subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_removes_everything(number, code, ended):
    with holder() as bench:
        sleeper = os.pidfd_open(int(bench.stdout.readline()))
        assert len(namespaces(bench.pid)) == 3
        bench.send_signal(number)
        assert bench.wait(300) == code
    assert namespaces(bench.pid) == []
    assert ended(sleeper)


def test_what_a_killed_run_left_is_removed_by_the_next_but_a_living_run_is_left_alone(ended):
    with holder() as dead, holder() as living:
        sleeper = os.pidfd_open(int(dead.stdout.readline()))
        living.stdout.readline()
        assert len(namespaces(dead.pid)) == 3
        dead.kill()
        dead.wait(300)
        # Whichever comes next: where tests run side by side it may be another's.
        with Cluster(["a"], None):
            assert namespaces(dead.pid) == []
            assert len(namespaces(living.pid)) == 3
        assert ended(sleeper)
        living.terminate()
        living.wait(300)
    assert namespaces(living.pid) == []


def test_a_process_id_given_out_again_does_not_keep_leftovers():
    name = f"commsched-bench-{os.getpid()}-1-0-host-a"  # this process, but it did not start then
    subprocess.run(["ip", "netns", "add", name], check=True)
    with Cluster(["a"], None):
        assert name not in cluster_module._existing()


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterUnavailable, match=r"shaped links need 'ip' \(iproute2\), which is not installed"):
        with Cluster(["a"], None):
            pytest.fail("entered")


def test_a_command_that_fails_on_a_host_is_named():
    with Cluster(["a"], None) as cluster:
        with pytest.raises(JobFailed, match=r"^false on a ended with code 1$"):
            run(cluster, "a", "false")


@pytest.mark.parametrize("hosts", [[], ["a", "a"]])
def test_impossible_hosts_are_refused(hosts):
    with pytest.raises(ValueError, match="hosts with different names"):
        Cluster(hosts, None)


def test_too_many_hosts_are_refused():
    with pytest.raises(ConfigError, match=r"^251 hosts with links of their own are more than 250$"):
        Cluster([f"worker{number}" for number in range(251)], None)


def test_a_process_that_has_ended_does_not_keep_the_others_alive(monkeypatch):
    killed = []

    def kill(pid, signal_number):
        killed.append(pid)
        if pid == 1001:
            raise ProcessLookupError

    monkeypatch.setattr(cluster_module, "_ip", lambda *words: "1001\n1002\n1003\n" if words[1] == "pids" else "")
    monkeypatch.setattr(cluster_module.os, "kill", kill)
    cluster_module._remove("commsched-bench-1-1-1-bridge")
    assert killed == [1001, 1002, 1003]


def test_a_wrong_rate_is_refused():
    with pytest.raises(ConfigError, match="'fast' is not a rate"):
        Cluster(["a"], "fast")
