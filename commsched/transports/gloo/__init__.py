"""All-reduce over gloo, by PyTorch's process group. What it sends is neither authenticated nor encrypted."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ...core.errors import ConfigError, PeerTimeout, TransportError
from ...core.order.agreed import STATIC
from ..collective import CollectiveTransport
from ..context import TransportContext

#: One for large tensors, one for small messages that need not wait behind them.
_CHANNELS = 2

#: In a static order a rank launches without knowing whether the others are ready, and one of them may save a checkpoint or
#: validate for as long as it likes: that is no failure. gloo wants some limit.
_STATIC_PATIENCE_SECONDS = 24 * 3600.0


def open_transport(context: TransportContext) -> CollectiveTransport:
    """The transport of this rank, over process groups of its own: the default group's collectives, if the training has one,
    would come between ours. Collective: every rank calls it. Returns when all are connected.

    Raises:
        ConfigError: PyTorch is missing, or ``torch.distributed`` was set up with another rank or world size.
        TransportError: gloo cannot listen at ``context.host``.
        PeerTimeout: a rank could not be reached.
    """
    world = context.world
    dist = _require_gloo()
    _require_same_world(dist, context.members[world.rank], context.divisor)

    from .channel import GlooChannel
    from .store import GatherStore

    who = f"rank {context.members[world.rank]} at {context.host}"
    try:
        device = dist.ProcessGroupGloo.create_device(hostname=context.host)
    except RuntimeError as error:
        raise TransportError(f"{who} cannot listen there for gloo: {error}") from error
    # All are there; one that is lost now is known after ``fail_after`` by its heartbeats.
    within = timedelta(seconds=context.settings.fail_after)
    channels: list[GlooChannel] = []
    try:
        for channel in range(_CHANNELS):
            store = GatherStore(context.gather)
            patience_seconds = _STATIC_PATIENCE_SECONDS if channel == STATIC else _patience_seconds(context)
            channels.append(GlooChannel(world.rank, world.world_size, device, store, within, patience_seconds))
    except BaseException as error:
        for opened in channels:
            opened.close(graceful=False)
        if isinstance(error, RuntimeError):
            raise PeerTimeout(f"{who} cannot reach all ranks over gloo: {error}") from error
        raise
    return CollectiveTransport(context, channels)


def _patience_seconds(context: TransportContext) -> float:
    """Of what all ranks were ready for: so long that the control channel knows first who is lost, and that a job may be
    stopped for a while and go on."""
    return max(120.0, 6 * context.settings.fail_after)


def _require_gloo() -> Any:
    try:
        import torch.distributed as dist
    except ModuleNotFoundError as error:
        raise ConfigError("transport='gloo' needs PyTorch: pip install torch") from error
    if not dist.is_available() or not dist.is_gloo_available():
        raise ConfigError("transport='gloo' needs a PyTorch that was built with gloo: pip install torch")
    return dist


def _require_same_world(dist: Any, rank: int, world_size: int) -> None:
    """``rank`` of the job, and how many it has."""
    if not dist.is_initialized():
        return
    theirs = dist.get_rank(), dist.get_world_size()
    if theirs != (rank, world_size):
        raise ConfigError(
            f"torch.distributed was initialised as rank {theirs[0]} of {theirs[1]}, but commsched was launched as rank "
            f"{rank} of {world_size}; give both the same"
        )
