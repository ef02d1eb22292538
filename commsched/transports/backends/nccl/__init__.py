"""NCCL, by cupy: averages the memory of CUDA devices, of whatever engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...backend import Backend, TransportContext

if TYPE_CHECKING:
    from .transport import NcclTransport


def open_transport(context: TransportContext) -> NcclTransport:
    """Open the transport of this rank, on ``context.device``, or else on CUDA's current device. Collective. Returns when a
    first sum was correct. Raises as ``group.connect`` does."""
    from .group import connect
    from .transport import NcclTransport

    return NcclTransport(context, connect(context))


# It takes no wire and no hierarchy, since it moves device memory, and uses the links within a host better than the hierarchy.
# It takes no order, since a static one needs a second communicator, and NCCL may hang if ranks launch on two in other orders.
BACKEND = Backend(open_transport, settings=frozenset({"collective"}), library=("cupy", "cuda"))
