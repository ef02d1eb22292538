"""torch.distributed's process group over gloo, beside commsched's session and on the same network."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .context import Context

_TIMEOUT = timedelta(seconds=300)
_TRIALS = 21


class GlooGroup:
    """The default process group of this process. Collective.

    ``message_seconds`` is what the smallest all-reduce takes: what each one costs besides its bytes.
    """

    def __init__(self, context: Context) -> None:
        session = context.session
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if context.host.startswith("127.") else "eth0"
        leader = session.rank == 0
        if leader:
            store = TCPStore(context.host, 0, session.world_size, True, _TIMEOUT, wait_for_workers=False)
        host, port = session.gather([context.host, store.port if leader else None])[0]
        if not leader:
            store = TCPStore(host, port, session.world_size, False, _TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=session.rank, world_size=session.world_size, timeout=_TIMEOUT)
        self.message_seconds = max(session.gather(_smallest_all_reduce_seconds()))


def _smallest_all_reduce_seconds() -> float:
    number = torch.zeros(1)
    seconds = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        dist.all_reduce(number)
        seconds.append(time.perf_counter() - began)
    return median(seconds)
