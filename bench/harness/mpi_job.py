"""Starts ranks by ``mpiexec`` on the hosts of a cluster, as on real machines. MPI connects them over their shaped links.

``mpiexec`` runs on the first host and starts a process of its own on each host by a remote shell. The remote shell here is a
script that enters the network namespace of the host with the given address.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .cluster import Cluster, Hosts
from .processes import JobFailed, Process

#: Makes MPICH use TCP. Its UCX and libfabric detect that all namespaces are on one machine, and would use shared memory.
_MPICH = {"UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp", "MPIR_CVAR_NOLOCAL": "1"}
#: Runs a command under a host name of its own, which is the first argument. MPI would use shared memory between ranks of one
#: host name.
_NAMED = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
#: Open MPI runs as root, which namespaces need, only if both variables are set.
_OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpiexec_of(python: str = sys.executable) -> Path:
    """The ``mpiexec`` beside ``python``. It belongs to the MPI that this Python's mpi4py finds first.

    Raises:
        JobFailed: there is no ``mpiexec``; the message says what to install.
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
    """Start ``command`` as ``ranks_per_host`` ranks on each host of ``names``, rank 0 first. Returns mpiexec's process, which
    ends with 0 when all ranks have ended with 0.

    The ranks get ``environ`` and the variables that their launcher sets. For ``commsched`` and MPI, each host of a cluster is a
    machine.

    Args:
        directory: a directory for files that are needed until the job has ended.
        mpiexec: the ``mpiexec`` of MPICH or Open MPI; None means :func:`mpiexec_of`.
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
    # mpiexec runs on the first host, so that the other hosts reach it at that host's address.
    return hosts.start(names[0], "mpiexec", [*argv, *command], {**_without_launchers(environ), **more})


def _place_mpich(addresses: Sequence[str], ranks_per_host: int, script: str) -> list[str]:
    where = ["-hosts", ",".join(addresses), "-ppn", str(ranks_per_host), "-iface", "eth0"]
    return [*where, "-launcher", "ssh", "-launcher-exec", script]


def _place_open_mpi(addresses: Sequence[str], ranks_per_host: int, script: str) -> list[str]:
    where = ["--host", ",".join(f"{address}:{ranks_per_host}" for address in addresses), "--map-by", "slot"]
    network = ["--mca", "btl_tcp_if_include", "eth0", "--prtemca", "oob_tcp_if_include", "eth0"]
    return [*where, *network, "--prtemca", "plm_ssh_agent", script, "--bind-to", "none"]


def _remote_shell(cluster: Cluster, names: Sequence[str], directory: str) -> str:
    """Write a program that is called like ssh, with options, an address and a command. It runs the command on the host with
    that address."""
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
    """``environ`` without the variables that would contradict the ranks that mpiexec assigns."""
    places = {"COMMSCHED_RANK", "COMMSCHED_WORLD_SIZE", "COMMSCHED_LOCAL_RANK", "COMMSCHED_LOCAL_WORLD_SIZE"}
    return {key: value for key, value in environ.items() if key not in places}
