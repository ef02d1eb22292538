"""Ranks that ``mpiexec`` starts, on the hosts of a cluster as on machines: MPI reaches the others over their shaped links.

``mpiexec`` runs on the first host and starts a process of its own on each by a remote shell; here that is a script, which
enters the network namespace of the host with the address it is given.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .cluster import Cluster, Hosts
from .processes import JobFailed, Process

#: MPICH's UCX and libfabric see that all namespaces are one machine, and would use its memory.
_MPICH = {"UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp", "MPIR_CVAR_NOLOCAL": "1"}
#: Runs a command under a host name of its own, its first argument: MPI takes ranks of one host name for neighbours in memory.
_NAMED = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
#: As root, which namespaces need, Open MPI wants to be told twice.
_OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpiexec_of(python: str = sys.executable) -> Path:
    """The ``mpiexec`` beside ``python``, so that of the MPI its mpi4py finds first.

    Raises:
        JobFailed: there is none; says what to install.
    """
    path = Path(python).parent / "mpiexec"
    if not path.exists():
        raise JobFailed(f"ranks over MPI need {path}: pip install mpi4py mpich")
    return path


def start_ranks(
    hosts: Hosts,
    names: Sequence[str],
    ranks_per_host: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    directory: str,
    mpiexec: Path | None = None,
) -> Process:
    """Start ``command`` as ``ranks_per_host`` ranks on each of ``names``, rank 0 first; returns mpiexec's process, which ends
    with 0 when all ranks have.

    The ranks get ``environ`` and what their launcher sets. To ``commsched`` and MPI, each host of a cluster is a machine.

    Args:
        directory: where files that the start needs may lie until the job has ended.
        mpiexec: that of MPICH or Open MPI; None: see :func:`mpiexec_of`.
    """
    mpiexec = mpiexec or mpiexec_of()
    open_mpi = (mpiexec.parent / "ompi_info").exists()
    ranks = len(names) * ranks_per_host
    argv = [str(mpiexec), "-n", str(ranks)]
    more: dict[str, str] = dict(_OPEN_MPI if open_mpi else {})
    if isinstance(hosts, Cluster):
        script = _remote_shell(hosts, names, directory)
        addresses = [hosts.address(name) for name in names]
        place = _place_open_mpi if open_mpi else _place_mpich
        argv += place(addresses, ranks_per_host, script)
        more |= {} if open_mpi else _MPICH
        argv = [*_NAMED, names[0], *argv]
    elif open_mpi:
        argv.append("--oversubscribe")
    # On the first host, so that the others reach it under its address there.
    return hosts.start(names[0], "mpiexec", [*argv, *command], {**_without_launchers(environ), **more})


def _place_mpich(addresses: Sequence[str], ranks_per_host: int, script: str) -> list[str]:
    where = ["-hosts", ",".join(addresses), "-ppn", str(ranks_per_host), "-iface", "eth0"]
    return [*where, "-launcher", "ssh", "-launcher-exec", script]


def _place_open_mpi(addresses: Sequence[str], ranks_per_host: int, script: str) -> list[str]:
    where = ["--host", ",".join(f"{address}:{ranks_per_host}" for address in addresses), "--map-by", "slot"]
    network = ["--mca", "btl_tcp_if_include", "eth0", "--prtemca", "oob_tcp_if_include", "eth0"]
    return [*where, *network, "--prtemca", "plm_ssh_agent", script, "--bind-to", "none"]


def _remote_shell(cluster: Cluster, names: Sequence[str], directory: str) -> str:
    """A program that is called as ssh is, with options, an address and a command, and runs that command there."""
    cases = "\n".join(
        f"{cluster.address(name)}) name={shlex.quote(name)} namespace={shlex.quote(cluster.namespace(name))} ;;"
        for name in names
    )
    path = Path(directory, "remote-shell")
    path.write_text(
        f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case "$1" in
{cases}
*) echo "no host has the address $1" >&2; exit 1 ;;
esac
shift
exec ip netns exec "$namespace" {shlex.join(_NAMED)} "$name" sh -c "$*"
"""
    )
    path.chmod(0o700)
    return str(path)


def _without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what would tell the ranks another place than mpiexec does."""
    places = {"COMMSCHED_RANK", "COMMSCHED_WORLD_SIZE", "COMMSCHED_LOCAL_RANK", "COMMSCHED_LOCAL_WORLD_SIZE"}
    return {key: value for key, value in environ.items() if key not in places}
