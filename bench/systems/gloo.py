"""torch.distributed's process group over gloo, beside commsched's session and on the same network."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .context import Context

if TYPE_CHECKING:
    from commsched.session.session import Session

_TIMEOUT = timedelta(seconds=300)
_TRIALS = 21


class GlooGroup:
    """The default process group of this process. Collective.

    ``message_seconds`` is the time of the smallest all-reduce: the overhead of each all-reduce, besides its bytes.
    """

    def __init__(self, context: Context) -> None:
        open_process_group(context.session, context.host)
        self.message_seconds = max(context.session.gather(_smallest_all_reduce_seconds()))


def open_process_group(session: Session, host: str) -> None:
    """Make the default process group of the ranks of ``session``. ``host`` is the address of this rank. Collective."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if host.startswith("127.") else "eth0"
    leader = session.rank == 0
    if leader:
        store = TCPStore(host, 0, session.world_size, True, _TIMEOUT, wait_for_workers=False)
    host, port = session.gather([host, store.port if leader else None])[0]
    if not leader:
        store = TCPStore(host, port, session.world_size, False, _TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=session.rank, world_size=session.world_size, timeout=_TIMEOUT)


def _smallest_all_reduce_seconds() -> float:
    number = torch.zeros(1)
    seconds = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        dist.all_reduce(number)
        seconds.append(time.perf_counter() - began)
    return median(seconds)
