"""By default nobody but this machine can reach a job."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.transports.backends.mpi.launch import BOTH, Mpi, MpiJob

from .job import WORKER, Job, listening, worker
from .test_faults import server_pids, started

OPTIONS = [("--transport", "ps"), ("--transport", "ps", "--lane", "grpc", "--servers", "1"), ("--transport", "gloo")]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_everything_listens_on_loopback(options: tuple[str, ...]) -> None:
    with Job("-n", "2", *options, *worker("1000000")) as job:
        pids = [*started(job, 2).values(), *server_pids(job)]
        found = set().union(*map(listening, pids))
    assert len(found) >= 2
    assert {address for address, _ in found} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


#: As in docs/transports.md: a network of its own for the command that follows, with loopback and nothing else.
OWN_NETWORK = ["unshare", "--map-current-user", "--keep-caps", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "-"]


@BOTH
def test_an_mpi_job_in_a_network_of_its_own_can_be_reached_by_nobody(mpi: Mpi) -> None:
    """MPICH's and Open MPI's launchers listen at all addresses, whatever one tells them."""
    probe = subprocess.run([*OWN_NETWORK, "true"], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"this machine does not give a user a network: {probe.stderr.strip()}")
    by_default = mpi._replace(options=mpi.options[:1])  # ranks meet in memory: Open MPI's TCP leaves out loopback
    job = MpiJob(by_default, 2, str(WORKER), "1000000")
    job._command = [*OWN_NETWORK, *job._command]
    with job:
        pids = [job.process.pid, *started(job, 2).values()]
        found = set().union(*map(listening, pids))
        interfaces = [_interfaces(pid) for pid in pids]
    assert {address for address, _ in found} & {"0.0.0.0", "::"}  # so it is the network that keeps others out
    assert interfaces == [{"lo"}] * 3


def _interfaces(pid: int) -> set[str]:
    return {line.partition(":")[0].strip() for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]}
