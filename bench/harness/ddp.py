"""torch's DistributedDataParallel over gloo or NCCL, in a process group beside commsched's session and on the same network."""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from statistics import median
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from commsched import ConfigError, Session
from commsched.simulator.scenario import DDP_BUCKET_MIB, DDP_FIRST_BUCKET_MIB
from commsched.tuner.link import describe_link

from ..workloads.compiled import CompiledWorkload
from .reference import LEARNING_RATE, put_weights, weights_of
from .system import Context, Setup
from .timeline import Recorder

#: DDP with copies of no gradient, and in the same graph in each step, since every step uses every parameter.
FASTEST: Mapping[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True}

_TIMEOUT = timedelta(seconds=300)
_TRIALS = 21


class ProcessGroup:
    """The default process group of this process. Collective.

    ``backend`` is NCCL if each rank has a GPU of its own, and otherwise gloo. ``message_seconds`` is the time of the smallest
    all-reduce: the overhead of each all-reduce, besides its bytes.
    """

    def __init__(self, context: Context) -> None:
        device = torch.device(context.workload.device)
        mine = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else None
        theirs = context.session.gather(None if mine is None else str(mine))
        self.backend = "nccl" if None not in theirs and len(set(theirs)) == len(theirs) else "gloo"
        open_process_group(context.session, context.host, self.backend)
        self.message_seconds = max(context.session.gather(_smallest_all_reduce_seconds(device)))


def open_process_group(session: Session, host: str, backend: str = "gloo") -> None:
    """Make the default process group of the ranks of ``session``. ``host`` is the address of this rank. Collective."""
    interface = describe_link(host).partition(",")[0]
    if interface != "unknown":
        name = "lo" if interface == "loopback" else interface
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
    leader = session.rank == 0
    if leader:
        store = TCPStore(host, 0, session.world_size, True, _TIMEOUT, wait_for_workers=False)
    host, port = session.gather([host, store.port if leader else None])[0]
    if not leader:
        store = TCPStore(host, port, session.world_size, False, _TIMEOUT)
    dist.init_process_group(backend, store=store, rank=session.rank, world_size=session.world_size, timeout=_TIMEOUT)


def _smallest_all_reduce_seconds(device: torch.device) -> float:
    number = torch.zeros(1, device=device)
    seconds = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        dist.all_reduce(number)
        number.item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    return median(seconds)


_OPTIONS = inspect.signature(DistributedDataParallel).parameters


def least_bucket_bytes(context: Context) -> int:
    """The least size of buckets with which the forward can be compiled: torch splits it at buckets, and requires that the first
    one, for which it takes its own default, is no larger than the others."""
    return DDP_FIRST_BUCKET_MIB * 2**20 if isinstance(context.workload, CompiledWorkload) else 0


class DdpSystem:
    """DDP with given buckets; see ``bench.harness.system.System``. ``buckets`` are arguments of DistributedDataParallel.

    Raises:
        ConfigError: the buckets are too small for a forward that is compiled.
    """

    def __init__(self, context: Context, buckets: dict[str, Any], words: str) -> None:
        self._workload = context.workload
        self._rank = context.session.rank
        group = context.shared(ProcessGroup)
        self.setup = Setup(group.backend, words, group.message_seconds)
        self.model = context.workload.make_model()
        self.initial = weights_of(self.model)
        # Buffers need no broadcast, because no layer reads a buffer of another rank.
        no_broadcast = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
        options: dict[str, Any] = {no_broadcast: False, **buckets}
        self._ddp = DistributedDataParallel(self.model, **FASTEST, **options)
        least = least_bucket_bytes(context)
        if self._ddp.bucket_bytes_cap < least:
            own = sum(parameter.nbytes for parameter in self.model.parameters())
            raise ConfigError(
                f"compile: torch compiles the forward of DDP only with buckets of at least {least / 2**20:g} MiB, but they "
                f"shrink like the model ({words}); set megabytes to {math.ceil(own * least / self._ddp.bucket_bytes_cap / 1e6)}"
            )
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self._loop = context.make_loop()
        self._recorder: Recorder | None = None
        self._last_bucket_at = 0.0

    def begin(self) -> None:
        put_weights(self.model, self.initial)

    def require_ready(self) -> None:
        """Does nothing: the system has only one configuration."""

    def forward(self, step: int) -> torch.Tensor:
        self._optimizer.zero_grad()
        return self._workload.loss(self._ddp, step, self._rank)

    def update(self, loss: torch.Tensor) -> None:
        self._loop.backward(loss)
        if self._recorder is not None:
            self._recorder.on_span("wait", "all buckets", self._last_bucket_at, monotonic())
        self._loop.step(self.model, self._optimizer)

    def end(self) -> None:
        """Does nothing: no work is ever outstanding."""

    def observe(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._ddp.register_comm_hook(None, lambda state, bucket: self._average(bucket))  # torch refuses our annotations

    def _average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average as DDP does without a hook, and record the times."""
        self._last_bucket_at = began = monotonic()
        name = f"bucket {bucket.index()}"

        def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            if self._recorder is not None:
                self._recorder.on_message(name, began, monotonic())
            return future.value()[0]

        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
        return future


def default_buckets(bytes_scale: float) -> tuple[dict[str, Any], str]:
    """DDP's arguments for its default buckets, scaled like the bytes of the model, and their description in words."""
    if bytes_scale == 1:
        return {}, f"buckets {DDP_BUCKET_MIB} MiB (default)"
    first, size = DDP_FIRST_BUCKET_MIB * bytes_scale, DDP_BUCKET_MIB * bytes_scale
    if "bucket_cap_mb_list" in _OPTIONS:
        return {"bucket_cap_mb_list": [first, size]}, f"buckets {size:.3g} MiB (default, scaled)"
    return {"bucket_cap_mb": size}, f"buckets {size:.3g} MiB (default, scaled), the first too"
