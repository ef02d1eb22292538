"""Stand-ins for a cluster on one machine: hosts with links of a known rate, or plain loopback, behind one interface.

A :class:`Cluster` gives every host a network namespace of its own. A bridge joins them, and ``tc tbf`` shapes each host's link
in both directions. The bridge has a namespace too, so that it is invisible outside. A cluster needs root, iproute2 and the
kernel's veth, bridge and tbf; htb and u32 too, if single connections are capped.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

from commsched import ConfigError
from commsched.settings import parse_rate

from .processes import JobFailed, Process, Processes, signals_deferred, signals_handled

_NAME = re.compile(r"commsched-bench-(\d+)-(\d+)-\d+-(bridge|host-.+)")  # pid, its start time, serial number
#: Bytes that a shaped link lets through at once after a pause, before its rate applies.
BURST_BYTES = 256 * 1024
#: Congestion control of every connection of every system: Linux's default, so that figures do not depend on this machine's
#: configuration.
CONGESTION_CONTROL = "cubic"

_MOST_HOSTS = 250  # each has an address of one network
_NAMESPACES = Path("/run/netns")
_serial = itertools.count()


class ClusterUnavailable(JobFailed):
    """This machine or this user cannot have network namespaces; the message says why."""


class Hosts(Protocol):
    """The hosts on which the processes of a job run."""

    def address(self, host: str) -> str:
        """The address at which other hosts reach ``host``."""
        ...

    def start(self, host: str, name: str, argv: Sequence[str], environ: Mapping[str, str], says_line: bool = False) -> Process:
        """Start ``argv`` on ``host``, as :meth:`Processes.start` does. The process and its children are killed when the context
        ends."""
        ...

    @property
    def processes(self) -> Processes: ...


class Loopback:
    """A context manager. Every host is this machine itself; links are not shaped."""

    def __init__(self) -> None:
        self.processes = Processes()
        self._stack = ExitStack()

    def address(self, host: str) -> str:
        return "127.0.0.1"

    def start(self, host: str, name: str, argv: Sequence[str], environ: Mapping[str, str], says_line: bool = False) -> Process:
        return self.processes.start(name, argv, environ, says_line)

    def __enter__(self) -> Loopback:
        self._stack.enter_context(signals_handled())
        self._stack.enter_context(self.processes)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)


class Cluster:
    """Hosts in network namespaces with shaped links. A context manager: everything is removed when the block ends, also by an
    exception, SIGINT or SIGTERM. The next run removes the remains of a run that was killed.

    Args:
        hosts: names of the hosts, at most :data:`_MOST_HOSTS`.
        rate: rate of every link in each direction, in ``tc``'s notation (``"1gbit"``), or one rate for each host; None means
            not shaped.
        flow_rate: rate of each TCP connection in each direction, as clouds cap it, on links with a rate.

    Raises:
        ConfigError: a rate is invalid, or there are too many hosts.
        ClusterUnavailable: raised on entering; the message says what is missing.
    """

    def __init__(self, hosts: Sequence[str], rate: str | Mapping[str, str] | None, flow_rate: str | None = None) -> None:
        if len(hosts) > _MOST_HOSTS:
            raise ConfigError(f"{len(hosts)} hosts with links of their own are more than {_MOST_HOSTS}")
        if len(set(hosts)) != len(hosts) or not hosts:
            raise ValueError(f"a cluster has hosts with different names, not {list(hosts)}")
        rates = dict.fromkeys(hosts, rate) if rate is None or isinstance(rate, str) else {h: rate[h] for h in hosts}
        self._rates = {host: None if each is None else parse_rate(each) for host, each in rates.items()}
        self._flow_rate = None if flow_rate is None else parse_rate(flow_rate)
        self._number = {host: number for number, host in enumerate(hosts, 1)}
        self._prefix = f"commsched-bench-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}"
        self._stack = ExitStack()
        self.processes = Processes()

    def address(self, host: str) -> str:
        return f"10.77.0.{self._number[host]}"

    def namespace(self, host: str) -> str:
        """The name of the host's network namespace, for ``ip netns``."""
        return f"{self._prefix}-host-{host}"

    def start(self, host: str, name: str, argv: Sequence[str], environ: Mapping[str, str], says_line: bool = False) -> Process:
        return self.processes.start(name, ["ip", "netns", "exec", self.namespace(host), *argv], environ, says_line)

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            stack.enter_context(signals_handled())
            with signals_deferred():
                _remove_leftovers()
                stack.callback(self._remove_all)
            stack.enter_context(self.processes)
            self._build()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    def _build(self) -> None:
        bridge = f"{self._prefix}-bridge"
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for host, number in self._number.items():
            inside, port = self.namespace(host), f"port{number}"
            _ip("netns", "add", inside)
            _ip("-n", bridge, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", inside)
            _ip("-n", bridge, "link", "set", port, "master", "bridge", "up")
            _ip("-n", inside, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", inside, "link", "set", "lo", "up")
            _ip("-n", inside, "link", "set", "eth0", "up")
            _route(inside, self.address(host))
            _shape(inside, "eth0", self._rates[host], self._flow_rate)
            _shape(bridge, port, self._rates[host])

    def _remove_all(self) -> None:
        with signals_deferred(), ExitStack() as stack:  # an error with one does not stop the removal of the others
            for name in _existing():
                if name.startswith(f"{self._prefix}-"):
                    stack.callback(_remove, name)


def _route(namespace: str, address: str) -> None:
    # Set by route, because a namespace may not select an algorithm that the machine does not allow for all users.
    route = ("10.77.0.0/24", "dev", "eth0", "proto", "kernel", "scope", "link", "src", address)
    _ip("-n", namespace, "route", "replace", *route, "congctl", CONGESTION_CONTROL)


def _shape(
    namespace: str, device: str, rate_bytes_per_second: float | None, flow_bytes_per_second: float | None = None
) -> None:
    if rate_bytes_per_second is None:
        return
    rate = f"{round(rate_bytes_per_second * 8)}bit"
    if flow_bytes_per_second is not None:
        return _cap_flows(namespace, device, rate, flow_bytes_per_second)
    _command(
        "tc",
        "-n",
        namespace,
        "qdisc",
        "add",
        "dev",
        device,
        "root",
        "tbf",
        "rate",
        rate,
        "burst",
        str(BURST_BYTES),
        "latency",
        "50ms",
    )


#: The ports of a host with capped flows: so few that every pair of a port here and a port there has a class of its own.
_FIRST_PORT, _PORTS = 32768, 32
_FLOW_BURST_BYTES = 64 * 1024  # a packet that the network card would cut has as many


def _cap_flows(namespace: str, device: str, rate: str, flow_bytes_per_second: float) -> None:
    ports = range(_FIRST_PORT, _FIRST_PORT + _PORTS)
    change = "import sys; open('/proc/sys/net/ipv4/ip_local_port_range', 'w').write(sys.argv[1])"
    _command("ip", "netns", "exec", namespace, sys.executable, "-c", change, f"{ports[0]} {ports[-1]}")
    cap = f"ceil {round(flow_bytes_per_second * 8)}bit burst {_FLOW_BURST_BYTES} cburst {_FLOW_BURST_BYTES} quantum 65536"
    queued = max(BURST_BYTES, round(0.05 * flow_bytes_per_second))  # as much as 50 ms, like the ``latency`` of tbf
    lines = [
        f"qdisc add dev {device} root handle 1: htb default 2",
        f"class add dev {device} parent 1: classid 1:1 htb rate {rate} burst {BURST_BYTES} cburst {BURST_BYTES}",
        f"class add dev {device} parent 1:1 classid 1:2 htb rate {rate} burst {BURST_BYTES} cburst {BURST_BYTES} quantum 65536",
        # The first port chooses a bucket of a hash table, in which the rules compare both.
        f"filter add dev {device} parent 1: protocol ip prio 1 handle 2: u32 divisor {_PORTS}",
        f"filter add dev {device} parent 1: protocol ip prio 1 u32 ht 800:: match ip protocol 6 0xff "
        f"hashkey mask 0x{_PORTS - 1:04x}0000 at 20 link 2:",
    ]
    for number, (here, there) in enumerate(itertools.product(ports, ports), 0x100):
        lines += [
            f"class add dev {device} parent 1:1 classid 1:{number:x} htb rate 64kbit {cap}",
            f"qdisc add dev {device} parent 1:{number:x} bfifo limit {queued}",
            f"filter add dev {device} parent 1: protocol ip prio 1 u32 ht 2:{here % _PORTS:x}: match ip sport {here} 0xffff "
            f"match ip dport {there} 0xffff flowid 1:{number:x}",
        ]
    with tempfile.NamedTemporaryFile("w", prefix="commsched-bench-") as batch:
        batch.write("\n".join(lines))
        batch.flush()
        _command("tc", "-n", namespace, "-batch", batch.name)


def _remove_leftovers() -> None:
    """Remove the namespaces of our runs whose process is dead. A reused process id does not keep them."""
    for name in _existing():
        match = _NAME.fullmatch(name)
        if match and _started(int(match[1])) != int(match[2]):
            _remove(name)


def _remove(namespace: str) -> None:
    """Kill the processes in one of our namespaces and remove the namespace."""
    with suppress(ClusterUnavailable):  # it has disappeared meanwhile
        for pid in _ip("netns", "pids", namespace).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    try:
        _ip("netns", "delete", namespace)
    except ClusterUnavailable:
        if namespace in _existing():
            raise


def _existing() -> list[str]:
    try:
        return os.listdir(_NAMESPACES)
    except FileNotFoundError:
        return []


def _started(pid: int) -> int | None:
    """Start time of the process in clock ticks since boot; None if it does not exist. Start time and pid together identify a
    process uniquely."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _ip(*arguments: str) -> str:
    return _command("ip", *arguments)


def _command(*argv: str) -> str:
    try:
        return subprocess.run(argv, check=True, capture_output=True, text=True, start_new_session=True).stdout
    except FileNotFoundError as error:
        raise ClusterUnavailable(f"shaped links need '{argv[0]}' (iproute2), which is not installed") from error
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip() or f"code {error.returncode}"
        hint = "; shaped links need root" if os.geteuid() or "not permitted" in why else ""
        raise ClusterUnavailable(f"{' '.join(argv)}: {why}{hint}") from error
