"""``transport="auto"``: which transport a job gets that names none."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec

from ..core.config import Settings
from ..core.world import World


@dataclass(frozen=True, slots=True)
class Seen:
    """What the choice depends on, beside the settings and the launcher.

    ``cuda_tensors``: the gradients lie in a CUDA device's memory. ``nccl``: PyTorch is loaded, has NCCL and sees a device.
    ``torch_group``: ``torch.distributed`` is initialised. ``gloo``: it has Gloo. ``mpi4py``: it is installed.
    """

    cuda_tensors: bool = False
    nccl: bool = False
    torch_group: bool = False
    gloo: bool = False
    mpi4py: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """``name`` of a transport, and why it was chosen; as text, the line that tells the user."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"transport=auto: {self.name} ({self.reason})"


def choose(settings: Settings, world: World, seen: Seen) -> Choice:
    """The transport for ``settings``; pure, so equal arguments give equal choices on all ranks.

    CUDA tensors come before the launcher: NCCL alone carries them, under mpiexec too.
    """
    if settings.transport != "auto":
        return Choice(settings.transport, "as set")
    if world.world_size == 1:
        return Choice("local", "one rank, nothing to send")
    if settings.servers:
        return Choice("ps", f"servers={','.join(settings.servers)}")
    if seen.cuda_tensors and seen.nccl:
        return Choice("nccl", "CUDA tensors, and PyTorch has NCCL")
    started_by_mpi = world.launcher.startswith(("mpirun", "mpiexec"))
    if started_by_mpi and seen.mpi4py:
        return Choice("mpi", f"started by {world.launcher}")
    if seen.torch_group and seen.gloo:
        return Choice("gloo", "torch.distributed is initialised")
    if started_by_mpi:
        return Choice("ps", f'started by {world.launcher}, but mpi4py is missing: pip install "commsched[mpi]" gives mpi')
    return Choice("ps", "every rank hosts a shard; no servers are named")


def look_around(device: str = "cpu") -> Seen:
    """What there is for gradients on ``device`` ("cpu", or a name of PyTorch's such as "cuda:1"). Imports nothing."""
    torch, distributed = sys.modules.get("torch"), sys.modules.get("torch.distributed")
    available = torch is not None and distributed is not None and distributed.is_available()
    cuda_tensors = device.partition(":")[0] == "cuda"
    cuda = cuda_tensors and available and torch.cuda.is_available()  # type: ignore[union-attr]  # wakes the driver
    return Seen(
        cuda_tensors=cuda_tensors,
        nccl=cuda and distributed.is_nccl_available(),  # type: ignore[union-attr]
        torch_group=available and distributed.is_initialized(),  # type: ignore[union-attr]
        gloo=available and distributed.is_gloo_available(),  # type: ignore[union-attr]
        mpi4py=find_spec("mpi4py") is not None,
    )
