"""The rank of this process, as set by its launcher: commsched run, torchrun, mpirun (Open MPI, MPICH) or srun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class World:
    """This process is ``rank`` of ``world_size`` processes, and ``local_rank`` of ``local_world_size`` on its machine.
    ``launcher`` names the launcher that set these numbers."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"

    @property
    def one_machine(self) -> bool:
        return self.local_world_size == self.world_size


# For each launcher, the variables of rank, world_size, local_rank and local_world_size. The first launcher whose world_size is
# set counts, so that a launcher started inside another's job (torchrun in a Slurm allocation) takes precedence.
_LAUNCHERS = {
    "commsched run": ("COMMSCHED_RANK", "COMMSCHED_WORLD_SIZE", "COMMSCHED_LOCAL_RANK", "COMMSCHED_LOCAL_WORLD_SIZE"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun (Open MPI)": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec (MPICH)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Only srun sets SLURM_STEP_NUM_TASKS; it is not set in a batch script or an interactive allocation.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def detect_world(environ: Mapping[str, str]) -> World:
    """The world of this process; one rank if no launcher's variables are set.

    Raises:
        ConfigError: a launcher's variables contradict each other; the message names them.
    """
    for launcher, names in _LAUNCHERS.items():
        if names[1] not in environ or (launcher == "mpiexec (MPICH)" and names[3] not in environ):
            continue  # Slurm also sets PMI_SIZE when it stands in for MPICH's launcher
        rank, size, local_rank = (_number(environ, name) for name in names[:3])
        local_size = _local_world_size(environ, names[3], size)
        if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
            said = ", ".join(f"{name}={environ.get(name, '')}" for name in names)
            raise ConfigError(f"{launcher} gave an impossible world: {said}")
        return World(rank, size, local_rank, local_size, launcher)
    return World()


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "0" if "LOCAL" in name else "")
    if not value.isdecimal():
        raise ConfigError(f"{name}={value!r} is not a number, but the launcher's other variables are set")
    return int(value)


def _local_world_size(environ: Mapping[str, str], name: str, size: int) -> int:
    if name not in environ:
        return size
    if name != "SLURM_STEP_TASKS_PER_NODE":
        return _number(environ, name)
    counts: list[int] = []  # Slurm writes "2(x3),1" for nodes of 2, 2, 2 and 1 tasks
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ[name]):
        counts += [int(count)] * int(times or 1)
    node = _number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    return counts[node] if node < len(counts) else 0
