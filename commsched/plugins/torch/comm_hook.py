"""A communication hook for those who keep DistributedDataParallel (DDP).

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(cs.CommHookState(ddp), cs.comm_hook)

Everything else of the training loop stays as it is.
"""
# Without ``from __future__ import annotations``: DDP compares the hook's annotations with classes, and would find strings.

import weakref
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

import commsched

from ...core.errors import ConfigError, UnsupportedError
from ...core.group import TensorGroup
from .device import init_for, open_device
from .flat import register_flat, spec_of


class _Bucket(NamedTuple):
    """One that was handed over: what DDP waits for, what it is to get, and the gradients in it by index of tensor."""

    average: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    gradients: dict[int, torch.Tensor]


class CommHookState:
    """Averages the gradients of ``ddp`` over all ranks, front layers first, instead of bucket after bucket.

    Every gradient is a tensor of its own to the scheduler, so partition, credit, policy and transport are those of the session.
    It is handed over when DDP's bucket is full: with small buckets (``bucket_cap_mb=1``) communication begins earlier and there
    is more to order. DDP ends each backward by waiting for all averages, so the next forward cannot start layer by layer, as it
    does with ``ScheduledOptimizer``: what is gained is gained within backward.

    All else is DDP's: the initial broadcast, ``no_sync()``, ``join()``, unused parameters, buffers, the optimizer. With one
    rank, or with ``COMMSCHED_DISABLE=1``, the hook does what DDP does without one, over DDP's own process group.

    Making one is collective: every rank does, in the same order. An error of the session, or of another rank, is raised by
    ``backward()``.

    Args:
        ddp: the model, wrapped; all ranks must be in its process group.
        session: a session other than that of ``commsched.init()``.

    Raises:
        UnsupportedError: a parameter's type or device, or the process group, is not supported; says which.
        ManifestMismatch: the ranks' models differ; names the parameter.
        CommschedError: from ``commsched.init()``.
    """

    def __init__(self, ddp: DistributedDataParallel, *, session: commsched.Session | None = None) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise ConfigError(f"the hook is for a DistributedDataParallel, not for a {type(ddp).__name__}")
        self._ddp = weakref.ref(ddp)  # which holds this in turn, where no garbage collector sees it
        self._group: TensorGroup | None = None
        self._buckets: list[_Bucket] = []  # of the backward that is going on
        parameters = [
            (name, parameter)
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in ddp.parameters_to_ignore
        ]
        session = session or init_for(parameter for _, parameter in parameters)
        if session.world_size == 1:
            return
        if (size := dist.get_world_size(ddp.process_group)) != session.world_size:
            raise UnsupportedError(
                f"the process group of this DistributedDataParallel has {size} ranks, but the job {session.world_size}; "
                "gradients are averaged over all"
            )
        specs = [spec_of(name, parameter) for name, parameter in parameters]
        self._device = open_device(session, parameters)
        self._views, self._group = register_flat(session, self._device, specs)
        self._tensors = {id(parameter): tensor for tensor, (_, parameter) in enumerate(parameters)}

    def detach(self) -> None:
        """Let go of the flat buffers: from now on DDP averages by itself. Every rank must, after the same step."""
        if self._group is not None:
            self._group.release()
            self._device.close()
            self._group, self._views = None, []

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """See :func:`comm_hook`."""
        ddp = self._ddp()
        if ddp is None:
            raise UnsupportedError("this CommHookState is of a DistributedDataParallel that is gone; make one for each")
        if not isinstance(bucket, GradBucket):
            raise UnsupportedError("a backward compiled with optimize_ddp='python_reducer' has no buckets; use another mode")
        if not getattr(ddp, "_divide_by_initial_world_size", True):  # set by join()
            raise UnsupportedError(
                "join(divide_by_initial_world_size=False) divides by the ranks that still have data; averages are over all"
            )
        if self._group is None:
            return _all_reduce(bucket.buffer(), ddp.process_group)
        if bucket.index() == 0:
            if self._buckets:  # to begin a step would be to wait for ever
                raise UnsupportedError(f"the first bucket comes again before all of step {self._group.step} have come")
            self._group.begin_step()
        self._hand_over(bucket, self._group, ddp)
        average = self._buckets[-1].average
        if bucket.is_last():
            self._require_all(self._group)
            if torch._C._current_autograd_node() is None:
                # No backward is going on: a rank that has joined, or the first step of a static graph, whose buckets come when
                # backward is over. What comes next is the wait for all buckets.
                self._wait(self._group)
            else:
                # Ours comes before DDP's own, which waits for the buckets. To wait there, and not in a thread, is to raise an
                # error as it is: DDP would make another of one that it finds in a bucket.
                torch.autograd.Variable._execution_engine.queue_callback(partial(self._wait, self._group))
        return average

    def _hand_over(self, bucket: GradBucket, group: TensorGroup, ddp: DistributedDataParallel) -> None:
        buffer = bucket.buffer()
        tensors = [self._tensor(parameter, ddp) for parameter in bucket.parameters()]
        if buffer.layout != torch.strided:
            name = group.manifest.tensors[tensors[0]].name
            raise UnsupportedError(f"the gradient of '{name}' is {buffer.layout}; only dense ones are averaged")
        average = torch.futures.Future[torch.Tensor](devices=[buffer.device] if buffer.is_cuda else None)
        self._buckets.append(_Bucket(average, buffer, dict(zip(tensors, bucket.gradients(), strict=True))))
        for tensor, gradient in self._buckets[-1].gradients.items():
            with torch.no_grad():
                self._views[tensor].copy_(gradient)
            self._device.when_written(partial(group.notify_ready, tensor))

    def _wait(self, group: TensorGroup) -> None:
        """Put all averages into the buckets."""
        gradients = {tensor: gradient for bucket in self._buckets for tensor, gradient in bucket.gradients.items()}
        for tensor in sorted(gradients, key=lambda tensor: (not group.proxies[tensor].is_open, tensor)):
            group.proxies[tensor].wait()
            with torch.no_grad():
                gradients[tensor].copy_(self._views[tensor])
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            bucket.average.set_result(bucket.buffer)

    # --- what would end in a hang, or in wrong numbers ---

    def _tensor(self, parameter: torch.Tensor, ddp: DistributedDataParallel) -> int:
        tensor = self._tensors.get(id(parameter))
        if tensor is None:
            names = [name for name, each in ddp.module.named_parameters() if each is parameter] or ["unknown"]
            raise UnsupportedError(
                f"parameter '{names[0]}' is averaged by DistributedDataParallel, but did not require a gradient when "
                "CommHookState was made, or belongs to another model"
            )
        return tensor

    def _require_all(self, group: TensorGroup) -> None:
        handed_over = {tensor for bucket in self._buckets for tensor in bucket.gradients}
        if missing := [tensor for tensor in range(len(self._views)) if tensor not in handed_over]:
            raise UnsupportedError(
                f"{_names(group, missing)}: not averaged by DistributedDataParallel, since it did not require a gradient when "
                "that was made"
            )


def comm_hook(state: CommHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls with each bucket of gradients; the future becomes the bucket's average over all ranks.

    For ``DistributedDataParallel.register_comm_hook``, with a :class:`CommHookState`. Called within backward, by the thread
    that runs it; never waits for other ranks but where DDP waits itself.
    """
    return state.average(bucket)


def _all_reduce(buffer: torch.Tensor, process_group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """As DDP does without a hook, which multiplies and does not divide: for the same bits."""
    with torch.no_grad():
        buffer.mul_(1.0 / dist.get_world_size(process_group))
    work = dist.all_reduce(buffer, group=process_group, async_op=True)
    assert work is not None, "this rank is in its own process group"
    average: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return average


def _names(group: TensorGroup, tensors: Iterable[int]) -> str:
    first, *others = (group.manifest.tensors[tensor].name for tensor in tensors)
    return f"parameter '{first}'" + (f" and {len(others)} more" if others else "")
