"""Runs one job of several rank processes, and parameter servers if asked, on a cluster or on loopback."""

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

from .cluster import Cluster, ClusterUnavailable, Hosts, Loopback
from .mpi_job import start_ranks
from .processes import Process

_ROOT = Path(__file__).resolve().parent.parent
_CONTROL_PORT = 29600
_START_SECONDS = 60.0


@dataclass(frozen=True)
class Job:
    """What to run. ``settings`` are those of ``commsched.init``; ``bandwidth`` (``"1gbit"``) is that of every link, or a
    mapping with that of each host: ``worker0``, .., ``server0``, .., which only shaped links can have. ``ranks_per_host`` share
    a host and its link; without a bandwidth all ranks are on one. ``mpi``: some gradients travel by MPI, whatever the setting
    says."""

    workers: int
    servers: int = 0
    bandwidth: str | Mapping[str, str] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = 600.0
    ranks_per_host: int = 1
    mpi: bool = False

    @property
    def hosts(self) -> int:
        """Of workers."""
        return self.workers // self.ranks_per_host

    @property
    def by_mpiexec(self) -> bool:
        """Whether mpiexec has to start the ranks."""
        return self.mpi or self.settings.get("transport") == "mpi"

    @property
    def caps_itself(self) -> bool:
        """Whether its ranks keep to a rate by themselves; it is the same for all then, and there are no hosts."""
        own_hosts = self.ranks_per_host == 1 and self.settings.get("hierarchy") != "on"
        return self.settings.get("transport", "ps") == "ps" and own_hosts


@dataclass(frozen=True)
class Outcome:
    """``by_rank[r]`` is what rank ``r`` returned; ``link`` says what the ranks' network was."""

    by_rank: list[Any]
    link: str


def run_job(job: Job, module: str, arguments: Mapping[str, Any]) -> Outcome:
    """Call ``module.rank_main(session, arguments)`` in a process per rank and return the JSON values returned.

    ``arguments`` gets the process ids of the servers as ``server_pids``. With a bandwidth each process is a host with a
    shaped link; where that cannot be had, the reason is printed and the ranks cap what they send by themselves, if they can.

    Raises:
        ClusterUnavailable: links cannot be shaped, and have to be: each is to have a bandwidth of its own, say, or collectives
            are to use them.
        JobFailed: a process failed or took too long.
    """
    if job.bandwidth is None:
        with Loopback() as hosts:
            return Outcome(_run(hosts, job, {}, module, arguments), "loopback")
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(Cluster(_host_names(job), job.bandwidth))
        except ClusterUnavailable as error:
            if not isinstance(job.bandwidth, str) or not job.caps_itself:
                raise
            print(f"no shaped links here, so each rank caps what it sends at {job.bandwidth}: {error}", file=sys.stderr)
        else:
            return Outcome(
                _run(cluster, job, _several_machines(cluster, job), module, arguments), f"{_words(job.bandwidth)} tbf"
            )
    with Loopback() as hosts:
        cap = {"COMMSCHED_RATE": job.bandwidth}
        return Outcome(_run(hosts, job, cap, module, arguments), f"{job.bandwidth} cap in the transport")


def _words(bandwidth: str | Mapping[str, str]) -> str:
    return bandwidth if isinstance(bandwidth, str) else ",".join(bandwidth.values())


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
            **{f"COMMSCHED_{key.upper()}": value for key, value in job.settings.items()},
        }
        servers = _start_servers(hosts, job, environ)
        if servers:
            environ["COMMSCHED_SERVERS"] = ",".join(servers.values())
        given = json.dumps({**arguments, "server_pids": list(servers)})
        command = [sys.executable, "-m", "bench.rank", module, directory, given]
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
    """Process id and address of each server."""
    started = []
    for index in range(job.servers):
        host = f"server{index}"
        argv = [sys.executable, "-m", "commsched.cli", "server", "--bind", f"{hosts.address(host)}:0"]
        started.append(hosts.start(host, f"server {index}", argv, environ, says_line=True))
    return {server.pid: server.first_line(_START_SECONDS).rpartition(" ")[2] for server in started}
