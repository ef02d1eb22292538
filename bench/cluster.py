"""Stand-ins for a cluster on one machine: hosts with links of a known rate, or plain loopback, behind one surface.

A :class:`Cluster` gives every host a network namespace of its own, joined by a bridge, whose link ``tc tbf`` shapes in both
directions. The bridge has a namespace too, so that nothing of it shows outside. It needs root, iproute2 and the kernel's
veth, bridge and tbf.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol

from commsched.core.config import parse_rate

from . import termination
from .processes import JobFailed, Process, Processes

_NAME = re.compile(r"commsched-bench-(\d+)-(\d+)-\d+-(bridge|host-.+)")  # pid, its start, serial number
#: What a shaped link lets through at once after a pause, before its rate counts.
BURST_BYTES = 256 * 1024
#: Linux's default, for every connection of every system, so that figures do not depend on what this machine's owner chose.
CONGESTION_CONTROL = "cubic"

_NAMESPACES = Path("/run/netns")
_serial = itertools.count()


class ClusterUnavailable(JobFailed):
    """This machine, or this user, cannot have network namespaces; says why."""


class Hosts(Protocol):
    """Where the processes of a job run."""

    def address(self, host: str) -> str:
        """The address at which other hosts reach ``host``."""
        ...

    def start(self, host: str, name: str, argv: Sequence[str], environ: Mapping[str, str], says_line: bool = False) -> Process:
        """Start ``argv`` on ``host``, as :meth:`Processes.start` does. It is killed, with its children, when this ends."""
        ...

    @property
    def processes(self) -> Processes: ...


class Loopback:
    """Every host is this machine itself; links are not shaped. A context manager."""

    def __init__(self) -> None:
        self.processes = Processes()
        self._stack = ExitStack()

    def address(self, host: str) -> str:
        return "127.0.0.1"

    def start(self, host: str, name: str, argv: Sequence[str], environ: Mapping[str, str], says_line: bool = False) -> Process:
        return self.processes.start(name, argv, environ, says_line)

    def __enter__(self) -> Loopback:
        self._stack.enter_context(termination.handled())
        self._stack.enter_context(self.processes)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)


class Cluster:
    """Hosts in network namespaces with shaped links. A context manager: all of it goes when the block ends, by an exception,
    SIGINT and SIGTERM too; what a run killed outright left behind is removed by the next.

    Args:
        hosts: their names, at most 250.
        rate: of every link and direction, as ``tc`` writes it (``"1gbit"``), or one for each host; None: not shaped.

    Raises:
        ConfigError: a rate is not one.
        ClusterUnavailable: on entering; says what is missing.
    """

    def __init__(self, hosts: Sequence[str], rate: str | Mapping[str, str] | None) -> None:
        if len(set(hosts)) != len(hosts) or not 0 < len(hosts) <= 250:
            raise ValueError(f"a cluster has 1 to 250 hosts with different names, not {list(hosts)}")
        rates = dict.fromkeys(hosts, rate) if rate is None or isinstance(rate, str) else {h: rate[h] for h in hosts}
        self._rates = {host: None if each is None else parse_rate(each) for host, each in rates.items()}
        self._number = {host: number for number, host in enumerate(hosts, 1)}
        self._prefix = f"commsched-bench-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}"
        self._stack = ExitStack()
        self.processes = Processes()

    def address(self, host: str) -> str:
        return f"10.77.0.{self._number[host]}"

    def namespace(self, host: str) -> str:
        """The name of its network namespace, for ``ip netns``."""
        return f"{self._prefix}-host-{host}"

    def start(self, host: str, name: str, argv: Sequence[str], environ: Mapping[str, str], says_line: bool = False) -> Process:
        return self.processes.start(name, ["ip", "netns", "exec", self.namespace(host), *argv], environ, says_line)

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            stack.enter_context(termination.handled())
            with termination.deferred():
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
            _shape(inside, "eth0", self._rates[host])
            _shape(bridge, port, self._rates[host])

    def _remove_all(self) -> None:
        with termination.deferred(), ExitStack() as stack:  # an error with one does not keep the others
            for name in _existing():
                if name.startswith(f"{self._prefix}-"):
                    stack.callback(_remove, name)


def _route(namespace: str, address: str) -> None:
    # By route, because a namespace may not choose what the machine does not allow everybody.
    route = ("10.77.0.0/24", "dev", "eth0", "proto", "kernel", "scope", "link", "src", address)
    _ip("-n", namespace, "route", "replace", *route, "congctl", CONGESTION_CONTROL)


def _shape(namespace: str, device: str, rate_bytes_per_second: float | None) -> None:
    if rate_bytes_per_second is None:
        return
    rate = f"{round(rate_bytes_per_second * 8)}bit"
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


def _remove_leftovers() -> None:
    """Remove the namespaces of runs of ours that are dead; a process id that was given out again does not keep them."""
    for name in _existing():
        match = _NAME.fullmatch(name)
        if match and _started(int(match[1])) != int(match[2]):
            _remove(name)


def _remove(namespace: str) -> None:
    """Kill what runs in a namespace of ours, and remove it."""
    try:
        for pid in _ip("netns", "pids", namespace).split():
            os.kill(int(pid), signal.SIGKILL)
    except (ClusterUnavailable, ProcessLookupError):
        pass  # gone by itself meanwhile
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
    """When the process started, in clock ticks since boot: with the pid, the name of a process for ever. None: it is gone."""
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
