"""NCCL, through a PyTorch process group of our own: averages tensors in the memory of CUDA devices."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ....core.errors import ConfigError
from ...backend import Backend, TransportContext

if TYPE_CHECKING:
    from .transport import NcclTransport


def open_transport(context: TransportContext) -> NcclTransport:
    """Open the transport of this rank, on its current CUDA device. Collective. Returns when a first sum was correct.

    Raises as ``group.connect`` does, and ConfigError if PyTorch is missing.
    """
    if "torch" not in sys.modules and find_spec("torch") is None:
        raise ConfigError("transport='nccl' needs PyTorch: pip install \"commsched[torch]\"")
    from .group import connect
    from .transport import NcclTransport

    return NcclTransport(context, connect(context))


# Without wire and hierarchy: it moves device memory, and uses the links within a host better than the hierarchy.
BACKEND = Backend(open_transport, settings=frozenset({"order", "collective"}), library=("torch", "torch"))
