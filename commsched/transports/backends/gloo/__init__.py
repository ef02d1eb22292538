"""Averages over gloo, by PyTorch's process group. gloo's traffic is neither authenticated nor encrypted."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from ....core.errors import ConfigError, PeerTimeout, TransportError
from ....core.order.messages import LARGEST
from ...backend import Backend, TransportContext
from ...collective import COLLECTIVE_SETTINGS, CollectiveTransport

#: One channel is for large tensors, the other for small messages that need not wait behind them.
_CHANNELS = 2

#: One attempt to connect may take so long, at least.
_LEAST_CONNECT_SECONDS = 2.0

#: In a static order a rank launches without knowing whether the other ranks are ready. Another rank may save a checkpoint or
#: validate for any length of time, which is no failure. gloo requires a limit.
_STATIC_PATIENCE_SECONDS = 24 * 3600.0


def open_transport(context: TransportContext) -> CollectiveTransport:
    """Open the transport of this rank, over process groups of its own.

    The default process group cannot serve, because the training's own collectives on it would come between ours. Collective:
    every rank calls it. Returns when all ranks are connected.

    Raises:
        ConfigError: PyTorch is missing, or ``torch.distributed`` was set up with another rank or world size.
        TransportError: gloo cannot listen at ``context.host``.
        PeerTimeout: a rank could not be reached.
        CommschedError: the job failed meanwhile.
    """
    world = context.world
    dist = _require_gloo()
    _require_same_world(dist, context.job_rank, context.contributors.divisor)

    from .channel import GlooChannel, unless_job_fails
    from .meeting import GatherStore, ListeningSocket

    who = f"rank {context.job_rank} at {context.host}"
    try:
        listener = ListeningSocket(partial(_make_device, dist, context.host))
    except RuntimeError as error:
        raise TransportError(f"{who} cannot listen there for gloo: {error}") from error
    # All ranks have joined. Heartbeats reveal a rank that is lost now after ``fail_after``. gloo waits five times as long as it
    # is told for a rank that has to connect to this one.
    within = timedelta(seconds=max(_LEAST_CONNECT_SECONDS, context.settings.fail_after / 5))
    channels: list[GlooChannel] = []
    try:
        for channel in range(_CHANNELS):
            store = GatherStore(context.gather, world.world_size)
            static = channel == LARGEST and context.settings.order != "agreed"  # auto: it may become static
            patience_seconds = _STATIC_PATIENCE_SECONDS if static else _patience_seconds(context)
            make = partial(GlooChannel, world.rank, world.world_size, listener.made, store, within, patience_seconds)
            channels.append(unless_job_fails(make, context.when_failed))
        listener.ignore_strangers(store.published)
    except BaseException as error:
        for opened in channels:
            opened.close(graceful=False)
        if isinstance(error, RuntimeError):
            raise PeerTimeout(f"{who} cannot reach all ranks over gloo: {error}") from error
        raise
    finally:
        listener.close()
    return CollectiveTransport(context, channels)


def _make_device(dist: Any, host: str) -> Any:
    """Make gloo's device. It must connect at once, whatever TORCH_GLOO_LAZY_INIT says: later connections are ignored."""
    try:
        return dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
    except TypeError:  # an older PyTorch, which always connects at once
        return dist.ProcessGroupGloo.create_device(hostname=host)


def _patience_seconds(context: TransportContext) -> float:
    """Timeout of operations that all ranks were ready for.

    It is longer than failure detection, so that the control channel reports the lost rank first, and so long that a job may be
    stopped for a while and go on.
    """
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
    """Check that ``torch.distributed``, if it is initialised, has the job's ``rank`` and ``world_size``."""
    if not dist.is_initialized():
        return
    theirs = dist.get_rank(), dist.get_world_size()
    if theirs != (rank, world_size):
        raise ConfigError(
            f"torch.distributed was initialised as rank {theirs[0]} of {theirs[1]}, but commsched was launched as rank "
            f"{rank} of {world_size}; give both the same"
        )


BACKEND = Backend(open_transport, settings=COLLECTIVE_SETTINGS, listens_at_host=True, library=("torch", "torch"))
