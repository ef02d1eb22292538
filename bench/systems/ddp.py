"""ddp: torch's DistributedDataParallel over gloo, with its default buckets."""

from __future__ import annotations

import inspect
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..harness.reference import LEARNING_RATE, put_weights, weights_of
from ..harness.timeline import Recorder
from . import Setup, System
from .context import Context
from .gloo import GlooGroup

#: DDP's defaults: a small first bucket, so that sending starts early, and larger ones after it.
FIRST_BUCKET_MIB = 1
BUCKET_MIB = 25

_OPTIONS = inspect.signature(DistributedDataParallel).parameters


class DdpSystem:
    """DDP with given buckets; see ``systems.System``. ``buckets`` are arguments of DistributedDataParallel."""

    def __init__(self, context: Context, buckets: dict[str, Any], words: str) -> None:
        self._workload = context.workload
        self._rank = context.session.rank
        self.setup = Setup("gloo", words, context.shared(GlooGroup).message_seconds)
        self.model = context.workload.make_model()
        self.initial = weights_of(self.model)
        # Buffers need no broadcast, because no layer reads a buffer of another rank. The graph is static, because every step
        # uses every parameter.
        no_broadcast = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
        options: dict[str, Any] = {no_broadcast: False, **buckets}
        self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True, static_graph=True, **options)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
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
        loss.backward()
        if self._recorder is not None:
            self._recorder.on_span("wait", "all buckets", self._last_bucket_at, monotonic())
        self._optimizer.step()

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
        return {}, f"buckets {BUCKET_MIB} MiB (default)"
    first, size = FIRST_BUCKET_MIB * bytes_scale, BUCKET_MIB * bytes_scale
    if "bucket_cap_mb_list" in _OPTIONS:
        return {"bucket_cap_mb_list": [first, size]}, f"buckets {size:.3g} MiB (default, scaled)"
    return {"bucket_cap_mb": size}, f"buckets {size:.3g} MiB (default, scaled), the first too"


def make_system(context: Context) -> System:
    return DdpSystem(context, *default_buckets(context.bytes_scale))
