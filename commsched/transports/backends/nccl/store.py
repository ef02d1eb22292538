"""The store through which the ranks' process groups find each other."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ....core.errors import TransportError
from ...context import TransportContext


def open_store(context: TransportContext) -> Store:
    """Open a store of our own. Rank 0 serves it, at rank 0's ``context.host`` only, for as long as rank 0 holds it. Collective.

    NCCL's identifier passes through the store, and torch's watchdogs read it at any time, so it must be a server. Like NCCL's
    traffic it is neither authenticated nor encrypted.

    Raises:
        TransportError: rank 0 could not open the store, or this rank could not reach it; names the address.
    """
    rank, within = context.world.rank, timedelta(seconds=context.settings.join_within)
    store, told = _listen(context.host, within) if rank == 0 else (None, None)
    host, port = context.gather([context.host, told])[0]
    if not isinstance(port, int):
        raise TransportError(f"rank 0 could not open a store for process groups on {host}: {port}")
    if store is not None:
        return store
    try:
        return TCPStore(host, port, is_master=False, timeout=within, wait_for_workers=False)
    except Exception as error:
        raise TransportError(f"rank {rank} could not reach the store of rank 0 on {host}:{port}: {error}") from error


def _listen(host: str, within: timedelta) -> tuple[Store | None, int | str]:
    """Return the store and its port. If it cannot be opened, return None and the reason, to be raised on all ranks."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listener:
            port: int = listener.getsockname()[1]
            store = TCPStore(
                host, port, is_master=True, timeout=within, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        return store, port
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
