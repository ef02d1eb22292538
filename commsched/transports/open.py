"""The transport of a job: its choice with ``transport="auto"``, and its opening inside the wrappers that settings ask for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from ..core.errors import ConfigError
from ..core.interfaces import Transport
from ..core.world import World
from ..settings import Settings
from . import load_backend, require_transport
from .backend import TransportContext

#: ``auto`` takes gloo instead of a shard on every rank from this many ranks on the network (machines, if the ranks of one sum
#: first): see "Which one ``auto`` takes" in ``docs/transports.md``. The ranks of a parameter server drift apart, and then wait
#: for one another's shards.
GLOO_FROM = 8


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The facts that the choice depends on, beside the settings and the launcher.

    ``cuda_tensors``: the gradients lie in a CUDA device's memory. ``nccl``: the gradients do, and cupy has NCCL. ``gloo``:
    ``torch.distributed`` has Gloo. ``mpi4py``: mpi4py is installed.
    """

    cuda_tensors: bool = False
    nccl: bool = False
    gloo: bool = False
    mpi4py: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The ``name`` of a transport and the ``reason`` for the choice. ``str`` gives the line that is logged for the user."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"transport=auto: {self.name} ({self.reason})"


def choose(settings: Settings, world: World, seen: Capabilities) -> Choice:
    """Choose the transport for ``settings``. Pure, so equal arguments give equal choices on all ranks.

    CUDA tensors come before the launcher: NCCL knows the links between devices, under mpiexec too.
    """
    if settings.transport != "auto":
        return Choice(settings.transport, "as set")
    if world.world_size == 1:
        return Choice("local", "one rank, nothing to send")
    if settings.servers:
        return Choice("ps", f"servers={','.join(settings.servers)}")
    if settings.security != Settings().security:
        return Choice("ps", f"security={settings.security}, which the others do not have")
    if seen.cuda_tensors and seen.nccl:
        return Choice("nccl", "CUDA tensors, and cupy has NCCL")
    started_by_mpi = world.launcher.startswith(("mpirun", "mpiexec"))
    if started_by_mpi and seen.mpi4py:
        return Choice("mpi", f"started by {world.launcher}")
    defaults = Settings()  # of settings of the parameter server alone
    only_ps = any(getattr(settings, name) != getattr(defaults, name) for name in ("rate", "lane", "flows"))
    on_network = world.world_size // (1 if settings.hierarchy == "off" else world.local_world_size)
    if seen.gloo and on_network >= GLOO_FROM and not world.one_machine and not only_ps:
        return Choice("gloo", f"{on_network} ranks on the network")
    if started_by_mpi:
        return Choice("ps", f'started by {world.launcher}, but mpi4py is missing: pip install "commsched[mpi]" gives mpi')
    return Choice("ps", "every rank hosts a shard; no servers are named")


def detect_capabilities(device: str = "cpu") -> Capabilities:
    """Detect the capabilities for gradients on ``device`` ("cpu", or a PyTorch name such as "cuda:1"). Imports no engine, and
    cupy only for a CUDA device."""
    torch, distributed = sys.modules.get("torch"), sys.modules.get("torch.distributed")
    cuda_tensors = device.partition(":")[0] == "cuda"
    return Capabilities(
        cuda_tensors=cuda_tensors,
        nccl=cuda_tensors and _has_nccl(),
        gloo=torch is not None and distributed is not None and distributed.is_available() and distributed.is_gloo_available(),
        mpi4py=find_spec("mpi4py") is not None,
    )


def _has_nccl() -> bool:
    try:
        from cupy.cuda import nccl
    except ImportError:
        return False
    return bool(nccl.available)


log = logging.getLogger("commsched")


def transport_name(world: World, settings: Settings, device: str, gather: Callable[[Any], list[Any]]) -> str:
    """Return the transport that is set or, for ``auto``, chosen. Collective.

    Args:
        device: the device that holds the gradients.
        gather: the session's ``gather``.

    Raises:
        ConfigError: ranks detect different capabilities and choose differently; names both choices and their reasons.
    """
    if settings.transport != "auto":
        return settings.transport
    seen = detect_capabilities(device)
    # A rank may import PyTorch for itself, to write logs, say. That alone must not make it differ from the others.
    reports = gather([seen.gloo, world.local_world_size])
    everywhere = all(gloo for gloo, _ in reports)
    world = replace(world, local_world_size=max(ranks for _, ranks in reports))  # machines may have different numbers of ranks
    choice = choose(settings, world, replace(seen, gloo=everywhere))
    choices = gather([choice.name, choice.reason])
    name_on_0, reason_on_0 = choices[0]
    for rank, (name, reason) in enumerate(choices):
        if name != name_on_0:
            raise ConfigError(
                f"transport=auto is {name_on_0} on rank 0 ({reason_on_0}) but {name} on rank {rank} ({reason}); set transport"
            )
    if world.rank == 0:
        log.info("%s", choice)
    return choice.name


def open_named(context: TransportContext, name: str) -> Transport:
    """Open the transport ``name``, inside the wire dtype and the hierarchy if ``settings`` ask for them.

    Collective: every rank of the job calls it, with the same name and settings.

    Raises:
        ConfigError: no transport has that name, the transport lacks a package, or a setting does not fit it.
        CommschedError: opening failed for another reason; see the transport.
    """
    from .hierarchy import open_flat, open_hierarchy  # here: it imports the shared parts of all transports

    require_transport(name)
    backend = load_backend(name)
    backend.prepare(context)
    return (open_hierarchy if "hierarchy" in backend.settings else open_flat)(context, backend.open)
