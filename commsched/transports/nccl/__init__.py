"""NCCL, through a process group of PyTorch's that is ours alone: averages of tensors in the memory of CUDA devices."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from ..context import TransportContext

if TYPE_CHECKING:
    from .transport import NcclTransport


def open_transport(context: TransportContext) -> NcclTransport:
    """The transport of this rank, on its current CUDA device. Collective; returns when a first sum has come back right.

    Raises:
        ConfigError: there is no PyTorch with NCCL, no device, or two ranks would share one.
        TransportError: NCCL could not connect the ranks.
    """
    if "torch" not in sys.modules and find_spec("torch") is None:
        raise ConfigError("transport='nccl' needs PyTorch: pip install \"commsched[torch]\"")
    from .connect import connect
    from .transport import NcclTransport

    group = connect(context)
    world = context.world
    return NcclTransport(world.rank, world.world_size, group, context.on_failure, context.when_failed)
