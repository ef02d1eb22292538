"""The default process group of ``torch.distributed`` in an elastic job. Its collectives travel through the session, so they end
with an error when a rank is lost, and each generation gets a group of its own without any meeting of its ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

import commsched

from ...core.errors import UnsupportedError
from ...core.manifest import TensorSpec

_NAME = "commsched"
_ProcessGroup: Any = dist.ProcessGroup  # its stubs are those of the class in C++, which has other overloads
_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def renew(session: commsched.Session) -> None:
    """Let ``torch.distributed`` have the ranks of ``session``. Not collective.

    Raises:
        UnsupportedError: the script has initialised ``torch.distributed`` before.
    """
    group = _current()
    if group is not None and group.session is session:
        return
    end()
    if not hasattr(dist.Backend, _NAME.upper()):
        dist.Backend.register_backend(_NAME, _make, devices=["cpu", "cuda"])
    hook = sys.excepthook  # else each generation would put one more prefix before the lines of an uncaught exception
    store: Any = dist.HashStore()  # type: ignore[attr-defined]  # of this process: torch requires one
    dist.init_process_group(_NAME, store=store, rank=session.rank, world_size=session.world_size)
    sys.excepthook = hook


def end() -> None:
    """Leave ``torch.distributed`` without a group, since the ranks of the last one are not together any more. Idempotent."""
    if _current() is not None:
        dist.destroy_process_group()


def allow() -> None:
    """The training loop has begun: from now on all ranks make the same collective calls."""
    group = _current()
    if group is not None:
        group.is_allowed = True


def _current() -> _SessionGroup | None:
    if not dist.is_initialized():
        return None
    group = dist.group.WORLD
    if not isinstance(group, _SessionGroup):
        raise UnsupportedError(
            "torch.distributed was initialised before the session of an elastic job, and could not follow its ranks: make the "
            "Accelerator first, and no process group of your own"
        )
    return group


def _make(store: Any, rank: int, world_size: int, timeout: timedelta) -> _SessionGroup:
    if dist.is_initialized():
        raise UnsupportedError(
            "torch.distributed.new_group cannot be used in an elastic job: its group would not follow the ranks"
        )
    return _SessionGroup(commsched.init())


class _SessionGroup(_ProcessGroup):  # type: ignore[misc]
    """Gathers what the ranks have, and lets each rank compute from that. So results are the same bits on all ranks. Gradients
    do not travel here. torch calls the methods by their names, and waits for what they return."""

    def __init__(self, session: commsched.Session) -> None:
        super().__init__(session.rank, session.world_size)
        self.session = session
        self.is_allowed = False

    def getBackendName(self) -> str:
        return _NAME

    def shutdown(self) -> None:
        """The session has its own end."""

    def allgather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        for own, places in zip(inputs, outputs, strict=True):
            for place, value in zip(places, self._gathered("all_gather", own), strict=True):
                place.detach().copy_(value)
        return _done(outputs)

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        values = self._gathered("all_gather_into_tensor", own)
        output.detach().copy_(torch.stack(values).reshape(output.shape))
        return _done(output)

    _allgather_base = all_gather_single  # its name before PyTorch 2.13

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        name = opts.reduceOp.op.name
        if name not in _REDUCTIONS:
            raise UnsupportedError(f"torch.distributed.all_reduce with {name} has no form in an elastic job")
        for tensor in tensors:
            result = reduce(_REDUCTIONS[name], self._gathered(f"all_reduce {name}", tensor))
            tensor.detach().copy_(result / self.session.world_size if name == "AVG" else result)
        return _done(tensors)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        for tensor in tensors:
            what = self._named("broadcast", tensor)
            data = _bytes_of(tensor)
            self.session.broadcast(what, data.numpy().data, opts.rootRank)
            tensor.detach().copy_(data.view(tensor.dtype).reshape(tensor.shape))
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        self._require_allowed("barrier")
        self.session.gather(None, "a barrier of torch.distributed")
        return _done([])

    def _gathered(self, what: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The ``tensor`` of each rank. It is a sum of bytes, to which each rank contributes zeros but in its own place."""
        name = self._named(what, tensor)
        own = _bytes_of(tensor)
        flat = torch.zeros(self.session.world_size * len(own), dtype=torch.uint8, device="cpu")
        places = flat.chunk(self.session.world_size) if len(own) else [flat] * self.session.world_size
        places[self.session.rank].copy_(own)
        self.session.average(TensorSpec(name, (len(flat),), "uint8"), flat.numpy().data)
        return [place.view(tensor.dtype).reshape(tensor.shape) for place in places]

    def _named(self, what: str, tensor: torch.Tensor) -> str:
        """The name of a call. Ranks compare it, so different types, shapes or calls end with an error that says both."""
        self._require_allowed(what.split()[0])
        return f"torch.distributed.{what} of {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    def _require_allowed(self, what: str) -> None:
        if not self.is_allowed:
            raise UnsupportedError(
                f"torch.distributed.{what}, before the loop over Elastic.steps() has begun: a new process would wait there for "
                "ranks that are in the loop already. Do without it (main_process_first and wait_for_everyone call it, too), or "
                "call it within a step"
            )


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(group: _SessionGroup, *arguments: Any, **more: Any) -> Any:
        raise UnsupportedError(
            f"torch.distributed's {name} has no form in an elastic job; all_gather, all_reduce, broadcast and barrier have one"
        )

    return refuse


for _name in (
    *("reduce", "gather", "scatter", "send", "recv", "recv_anysource", "alltoall", "alltoall_base", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "allreduce_coalesced", "allgather_coalesced"),
    *("all_gather_single_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "monitored_barrier"),
):
    setattr(_SessionGroup, _name, _refusing(_name))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the values, as bytes in the host's memory."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)
