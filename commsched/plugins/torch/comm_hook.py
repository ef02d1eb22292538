"""A communication hook for training scripts that keep DistributedDataParallel (DDP).

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(cs.CommHookState(ddp), cs.comm_hook)

Everything else of the training loop stays as it is.
"""
# No ``from __future__ import annotations`` here: DDP compares the hook's annotations with classes, and would find strings.

import weakref
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

import commsched

from ...core.errors import ConfigError, UnsupportedError, and_more
from ...core.group import TensorGroup
from .device import init_for, open_device, register_on, spec_of


class _Bucket(NamedTuple):
    """A submitted bucket: the future that DDP waits for, the buffer that the future returns, and the gradients in the buffer
    by index of tensor."""

    average: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    gradients: dict[int, torch.Tensor]


class CommHookState:
    """Averages the gradients of ``ddp`` over all ranks, front layers first, instead of bucket after bucket.

    The scheduler treats every gradient as a separate tensor, so the session's partition, credit, policy and transport apply. A
    gradient is submitted when DDP's bucket is full. With small buckets (``bucket_cap_mb=1``) communication begins earlier, and
    there are more gradients to order. DDP waits for all averages at the end of each backward, so the next forward cannot start
    layer by layer as with ``ScheduledOptimizer``: time is saved within backward only.

    DDP does everything else: the initial broadcast, ``no_sync()``, ``join()``, unused parameters, buffers, the optimizer. With
    one rank, or with ``COMMSCHED_DISABLE=1``, the hook does the same as DDP without a hook, over DDP's own process group.

    Making one is collective: every rank makes its own, in the same order. An error of the session, or of another rank, is
    raised by ``backward()``.

    Args:
        ddp: the model, wrapped in DDP. All ranks must be in its process group.
        session: the session to use instead of the one of ``commsched.init()``.

    Raises:
        UnsupportedError: a parameter's type or device, or the process group, is not supported; the message says which.
        ManifestMismatch: the ranks' models differ; the message names the parameter.
        CommschedError: ``commsched.init()`` failed.
    """

    def __init__(self, ddp: DistributedDataParallel, *, session: commsched.Session | None = None) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise ConfigError(f"the hook is for a DistributedDataParallel, not for a {type(ddp).__name__}")
        self._ddp = weakref.ref(ddp)  # weak, because DDP refers to this object where the garbage collector does not see it
        self._group: TensorGroup | None = None
        self._buckets: list[_Bucket] = []  # the submitted buckets of the running backward
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
        self._group, self._views = register_on(session, self._device, specs)
        self._tensors = {id(parameter): tensor for tensor, (_, parameter) in enumerate(parameters)}

    def detach(self) -> None:
        """Release the flat buffers: from now on DDP averages by itself. Every rank must call it, after the same step."""
        if self._group is not None:
            self._group.release()
            self._device.close()
            self._group, self._views = None, []

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """See :func:`comm_hook`."""
        ddp = self._ddp()
        if ddp is None:
            raise UnsupportedError("this CommHookState belongs to a DistributedDataParallel that is gone; make one for each")
        if not isinstance(bucket, GradBucket):
            raise UnsupportedError("a backward compiled with optimize_ddp='python_reducer' has no buckets; use another mode")
        if not getattr(ddp, "_divide_by_initial_world_size", True):  # set by join()
            raise UnsupportedError(
                "join(divide_by_initial_world_size=False) divides by the ranks that still have data; averages are over all"
            )
        if self._group is None:
            return _all_reduce(bucket.buffer(), ddp.process_group)
        if bucket.index() == 0:
            if self._buckets:
                self._group.require_whole_step()
                raise UnsupportedError(
                    f"the first bucket came again before the averages of step {self._group.step} were used: backward was "
                    "broken off, or the hook was called twice"
                )
            self._group.begin_step()
        self._submit(bucket, self._group, ddp)
        average = self._buckets[-1].average
        if bucket.is_last():
            self._require_all(self._group)
            if torch._C._current_autograd_node() is None:
                # No backward is running: this rank has joined, or this is the first step of a static graph, where DDP submits
                # the buckets after backward. DDP waits for all buckets next.
                self._wait(self._group)
            else:
                # This callback runs before DDP's own callback, which waits for the buckets. Waiting in the callback, not in a
                # thread, raises an error unchanged: DDP would replace an error that it finds in a bucket's future.
                torch.autograd.Variable._execution_engine.queue_callback(partial(self._wait, self._group))
        return average

    def _submit(self, bucket: GradBucket, group: TensorGroup, ddp: DistributedDataParallel) -> None:
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
        """Wait for all averages, put them into the buckets, and complete the buckets' futures."""
        gradients = {tensor: gradient for bucket in self._buckets for tensor, gradient in bucket.gradients.items()}
        for tensor in sorted(gradients, key=lambda tensor: (not group.proxies[tensor].is_open, tensor)):
            group.proxies[tensor].wait()
            with torch.no_grad():
                gradients[tensor].copy_(self._views[tensor])
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            bucket.average.set_result(bucket.buffer)

    # --- checks for cases that would hang or average wrongly ---

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
        submitted = {tensor for bucket in self._buckets for tensor in bucket.gradients}
        if missing := [tensor for tensor in range(len(self._views)) if tensor not in submitted]:
            raise UnsupportedError(
                f"{_names(group, missing)}: not averaged by DistributedDataParallel, since it did not require a gradient when "
                "that was made"
            )


def comm_hook(state: CommHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over all ranks; the returned future gets the average.

    Pass it to ``DistributedDataParallel.register_comm_hook``, with a :class:`CommHookState`. DDP calls it with each bucket,
    within backward, in the thread that runs backward. It waits for other ranks only where DDP itself waits.
    """
    return state.average(bucket)


def _all_reduce(buffer: torch.Tensor, process_group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Average ``buffer`` as DDP does without a hook. DDP multiplies by 1 / ranks instead of dividing; doing the same gives the
    same bits."""
    with torch.no_grad():
        buffer.mul_(1.0 / dist.get_world_size(process_group))
    work = dist.all_reduce(buffer, group=process_group, async_op=True)
    assert work is not None, "this rank is in its own process group"
    average: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return average


def _names(group: TensorGroup, tensors: Iterable[int]) -> str:
    first, *others = (group.manifest.tensors[tensor].name for tensor in tensors)
    return f"parameter '{first}'{and_more(len(others))}"
