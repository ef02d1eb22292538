"""Runs one job of several rank processes, with parameter servers if wanted, on a cluster or on loopback."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commsched import ConfigError
from commsched.core.world import detect_world

from .cluster import Cluster, ClusterUnavailable, Hosts, Loopback
from .mpi_job import start_ranks
from .processes import Process

assert __package__ is not None
#: The directory from which this package is imported.
_ROOT = Path(__file__).resolve().parents[__package__.count(".") + 1]
_CONTROL_PORT = 29600
_START_SECONDS = 60.0
_FIXED_SIZES = {"COMMSCHED_PARTITION": "4MB", "COMMSCHED_CREDIT": "16MB"}


@dataclass(frozen=True)
class Job:
    """A job to run. ``settings`` are the settings of ``commsched.init``. ``bandwidth`` (``"1gbit"``) is the rate of every link,
    or a mapping with the rate of each host (``worker0``, .., ``server0``, ..), which needs shaped links. ``ranks_per_host``
    ranks share a host and its link; without a bandwidth all ranks are on one host. ``mpi`` says that some gradients travel by
    MPI, whatever the setting ``transport`` is. ``auto_sizes``: partition and credit choose themselves, as in a user's job,
    unless ``settings`` has them; otherwise they stay until the job changes them. ``flow_bandwidth`` is the rate of each TCP
    connection on shaped links.

    Raises:
        ConfigError: there is a ``flow_bandwidth`` and no bandwidth.
    """

    workers: int
    servers: int = 0
    bandwidth: str | Mapping[str, str] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = 600.0
    ranks_per_host: int = 1
    mpi: bool = False
    auto_sizes: bool = False
    flow_bandwidth: str | None = None

    def __post_init__(self) -> None:
        require_links(self.flow_bandwidth, self.bandwidth)

    @property
    def hosts(self) -> int:
        """Number of worker hosts."""
        return self.workers // self.ranks_per_host

    @property
    def by_mpiexec(self) -> bool:
        """Whether mpiexec has to start the ranks."""
        return self.mpi or self.settings.get("transport") == "mpi"

    @property
    def caps_itself(self) -> bool:
        """Whether the ranks can limit their rate by themselves. The rate is then the same for all ranks, and there are no
        separate hosts."""
        own_hosts = self.ranks_per_host == 1 and self.settings.get("hierarchy") != "on"
        return self.settings.get("transport", "ps") == "ps" and own_hosts


@dataclass(frozen=True)
class Outcome:
    """The result of a job. ``by_rank[r]`` is the value that rank ``r`` returned; ``link`` describes the ranks' network."""

    by_rank: list[Any]
    link: str


def require_links(flow_bandwidth: str | None, bandwidth: object) -> None:
    """Check that there are links whose connections can be capped.

    Raises:
        ConfigError: there is a ``flow_bandwidth`` and no bandwidth.
    """
    if flow_bandwidth is not None and bandwidth is None:
        raise ConfigError(f"flow-bandwidth={flow_bandwidth}: it needs links with a bandwidth")


def require_no_launcher() -> None:
    """Check that this process may start the ranks of a benchmark.

    Raises:
        ConfigError: a launcher has started this process as one of several ranks, which would each start a job.
    """
    world = detect_world(os.environ)
    if world.world_size > 1:
        raise ConfigError(
            f"{world.launcher} has started this process as rank {world.rank} of {world.world_size}, but this benchmark starts "
            "its own ranks: run it without a launcher (train --real runs with one)"
        )


def run_job(job: Job, module: str, arguments: Mapping[str, Any]) -> Outcome:
    """Call ``module.rank_main(session, arguments)`` in a process per rank and return the JSON values that they return.

    The process ids of the servers are added to ``arguments`` as ``server_pids``. With a bandwidth, processes run on hosts with
    shaped links (``ranks_per_host`` ranks or one server each). If links cannot be shaped, the reason is printed and the ranks
    limit their sending rate by themselves, if they can.

    Raises:
        ConfigError: see ``require_no_launcher``.
        ClusterUnavailable: links cannot be shaped, but must be, for example because each has a bandwidth of its own or because
            collectives use them.
        JobFailed: a process failed or took too long.
    """
    require_no_launcher()
    if job.bandwidth is None:
        with Loopback() as hosts:
            return Outcome(_run(hosts, job, {}, module, arguments), "loopback")
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(Cluster(_host_names(job), job.bandwidth, job.flow_bandwidth))
        except ClusterUnavailable as error:
            if not isinstance(job.bandwidth, str) or not job.caps_itself or job.flow_bandwidth is not None:
                raise
            print(f"no shaped links here, so each rank limits its sending rate to {job.bandwidth}: {error}", file=sys.stderr)
        else:
            return Outcome(_run(cluster, job, _several_machines(cluster, job), module, arguments), _words(job))
    with Loopback() as hosts:
        cap = {"COMMSCHED_RATE": job.bandwidth}
        return Outcome(_run(hosts, job, cap, module, arguments), f"{job.bandwidth} cap in the transport")


def _words(job: Job) -> str:
    assert job.bandwidth is not None
    rates = job.bandwidth if isinstance(job.bandwidth, str) else ",".join(job.bandwidth.values())
    return f"{rates} tbf" if job.flow_bandwidth is None else f"{rates}, each connection {job.flow_bandwidth} htb"


def _host_names(job: Job) -> list[str]:
    return [f"worker{host}" for host in range(job.hosts)] + [f"server{index}" for index in range(job.servers)]


def _several_machines(hosts: Hosts, job: Job) -> dict[str, str]:
    return {
        "COMMSCHED_CONTROL": f"{hosts.address('worker0')}:{_CONTROL_PORT}",
        "COMMSCHED_LOCAL_WORLD_SIZE": str(job.ranks_per_host),
    }


def _run(hosts: Hosts, job: Job, placement: Mapping[str, str], module: str, arguments: Mapping[str, Any]) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="commsched-bench-") as directory:
        environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith("COMMSCHED_")},
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
            "COMMSCHED_TOKEN": secrets.token_hex(32),
            "COMMSCHED_RENDEZVOUS": f"{directory}/control.json",
            "COMMSCHED_WORLD_SIZE": str(job.workers),
            "COMMSCHED_LOCAL_WORLD_SIZE": str(job.workers),
            **placement,
            **({} if job.auto_sizes else _FIXED_SIZES),
            **{f"COMMSCHED_{key.upper()}": value for key, value in job.settings.items()},
        }
        servers = _start_servers(hosts, job, environ)
        if servers:
            environ["COMMSCHED_SERVERS"] = ",".join(servers.values())
        given = json.dumps({**arguments, "server_pids": list(servers)})
        command = [sys.executable, "-m", f"{__package__}.rank", module, directory, given]
        start = _start_by_mpiexec if job.by_mpiexec else _start_each
        hosts.processes.wait(start(hosts, job, command, environ, directory), job.timeout_seconds)
        return [json.loads(Path(directory, f"rank{rank}.json").read_text()) for rank in range(job.workers)]


def _start_each(hosts: Hosts, job: Job, command: Sequence[str], environ: Mapping[str, str], directory: str) -> list[Process]:
    per_host = int(environ["COMMSCHED_LOCAL_WORLD_SIZE"])
    return [
        hosts.start(
            f"worker{rank // per_host}",
            f"rank {rank}",
            command,
            {**environ, "COMMSCHED_RANK": str(rank), "COMMSCHED_LOCAL_RANK": str(rank % per_host)},
        )
        for rank in range(job.workers)
    ]


def _start_by_mpiexec(
    hosts: Hosts, job: Job, command: Sequence[str], environ: Mapping[str, str], directory: str
) -> list[Process]:
    per_host = int(environ["COMMSCHED_LOCAL_WORLD_SIZE"])
    names = [f"worker{host}" for host in range(job.workers // per_host)]
    return [start_ranks(hosts, names, per_host, command, environ, directory)]


def _start_servers(hosts: Hosts, job: Job, environ: Mapping[str, str]) -> dict[int, str]:
    """Start the servers. Returns the address of each server by its process id."""
    started = []
    for index in range(job.servers):
        host = f"server{index}"
        argv = [sys.executable, "-m", "commsched.cli.main", "server", "--bind", f"{hosts.address(host)}:0"]
        started.append(hosts.start(host, f"server {index}", argv, environ, says_line=True))
    return {server.pid: server.first_line(_START_SECONDS).rpartition(" ")[2] for server in started}
