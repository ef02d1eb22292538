"""The collectives on a device that the transport needs, by torch's NCCL process group, and the store by which the ranks'
process groups meet."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ....core.device_events import Event
from ....core.errors import ConfigError, TransportError
from ...backend import TransportContext
from ...collective.failures import exit_if_job_fails


class NcclGroup:
    """Collectives over all ranks, on one queue of the device. All methods but ``abort`` are called by one thread at a time.

    ``all_reduce``, ``reduce_scatter`` and ``all_gather`` are called within the ``work`` given to :meth:`launch`, and take
    contiguous tensors on :attr:`device`. The queue is a stream of high priority, so that the kernels that move data get their
    share of the device beside the kernels of the training.

    Depending on its version, torch launches collectives on the current stream or on a stream of its own. ``Work.wait`` makes
    the current stream, which is ours, wait for them, and not the host. An event recorded on our stream afterwards marks the end
    of the collective.
    """

    def __init__(self, store: Store, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options(is_high_priority_stream=True)
        options._timeout = timeout
        self.device = device
        self._rank = rank
        self._group = nccl(store, rank, world_size, options)
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._aborted = False
        self._lock = threading.Lock()

    def all_reduce(self, values: torch.Tensor) -> None:
        """Replace ``values`` by the sum of all ranks' ``values``."""
        self._group.allreduce([values]).wait()

    def reduce_scatter(self, chunks: Sequence[torch.Tensor]) -> None:
        """Replace this rank's own chunk, ``chunks[rank]``, by its sum over all ranks. The other chunks become undefined."""
        own = chunks[self._rank]
        if (whole := _as_one(chunks)) is not None:
            self._group._reduce_scatter_base(own, whole).wait()
        else:  # torch makes it a group of reductions, one to each rank
            self._group.reduce_scatter([own], [list(chunks)]).wait()

    def all_gather(self, chunks: Sequence[torch.Tensor]) -> None:
        """Replace each ``chunks[r]`` by the own chunk of rank ``r``. The chunks lie one after another in memory."""
        own = chunks[self._rank]
        if (whole := _as_one(chunks)) is not None:
            self._group._allgather_base(whole, own).wait()
        else:  # torch makes it a group of broadcasts, one from each rank
            self._group.allgather([list(chunks)], [own]).wait()

    def launch(self, work: Callable[[], None]) -> Event:
        """Run ``work``, which queues its operations on the device after all earlier launches. The event marks their end."""
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        with torch.cuda.stream(self._stream):
            work()
            event.record(self._stream)
        return event

    def error(self) -> str:
        """Return what broke the group, or an empty string. An operation that ended because it was aborted gives no result."""
        if self._aborted:
            return "it was aborted"
        state: Any = self._group.get_error()
        return "" if state.name == "SUCCESS" else f"NCCL reports {state.name}"

    def abort(self) -> None:
        """End all launched operations, and release everything, without waiting for other ranks. Thread-safe."""
        with self._lock:
            aborted, self._aborted = self._aborted, True  # set before the abort can end a launched operation
        if not aborted:
            self._group.abort()

    def close(self) -> None:
        """Release everything. Call it when no launched operation is outstanding."""
        if not self._aborted:
            self._group.shutdown()


def _as_one(chunks: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return consecutive chunks of equal size as one tensor, which saves copies, or None if their sizes differ."""
    first = chunks[0]
    if any(chunk.numel() != first.numel() for chunk in chunks):
        return None
    return first.as_strided((first.numel() * len(chunks),), (1,))


#: torch ends the process when a collective takes longer. This is a last resort, far behind ``fail_after``, which names the
#: silent rank.
_MIN_TIMEOUT_SECONDS = 600.0


def connect(context: TransportContext) -> NcclGroup:
    """Return the group of this rank, on the current device of the calling thread. Collective.

    Raises:
        ConfigError: PyTorch lacks NCCL or a device, or two ranks would share a device.
        TransportError: NCCL could not connect the ranks, or a first sum was wrong.
    """
    device = _own_device(context)
    rank, world_size, settings = context.world.rank, context.world.world_size, context.settings
    store = open_store(context)
    timeout = timedelta(seconds=max(_MIN_TIMEOUT_SECONDS, 10 * settings.fail_after))
    group = NcclGroup(store, rank, world_size, device, timeout)
    # Without an abort, a collective that waits for a lost rank would block the device, and every thread that synchronises with
    # it, for ever.
    context.when_failed(lambda _: _abort_aside(group))
    try:
        with exit_if_job_fails(context.when_failed):  # while it connects, NCCL waits for all ranks without a limit
            ones = torch.ones(1, device=device)
            torch.cuda.current_stream(device).synchronize()
            group.launch(lambda: group.all_reduce(ones)).synchronize()
            total = ones.item()
        if broken := group.error():
            raise RuntimeError(broken)
    except Exception as error:
        group.abort()
        raise TransportError(f"rank {rank}: NCCL could not connect {device}: {type(error).__name__}: {error}") from error
    if total != world_size:
        group.abort()
        raise TransportError(f"rank {rank}: NCCL's first sum of {world_size} ones on {device} is {total:g}")
    return group


def _abort_aside(group: NcclGroup) -> None:
    """Abort in a thread of its own: an abort may take a while, and the caller is a control thread."""
    threading.Thread(target=group.abort, name="commsched-nccl-abort", daemon=True).start()


def _own_device(context: TransportContext) -> torch.device:
    """Return this rank's device. Collective: an error of one rank is raised on every rank."""
    devices = context.gather(_describe_device(context.host))
    for rank, record in enumerate(devices):
        if "error" in record:
            raise ConfigError(f"transport='nccl' on rank {rank}: {record['error']}")
        for other in range(rank):
            if devices[other]["identity"] == record["identity"]:
                raise ConfigError(
                    f"transport='nccl': ranks {other} and {rank} share the device {record['name']}; NCCL needs one for each: "
                    "call torch.cuda.set_device(local_rank) before commsched.init"
                )
    return torch.device(devices[context.world.rank]["name"])


def _describe_device(host: str) -> dict[str, str]:
    if not dist.is_available() or not dist.is_nccl_available():
        return {"error": f"this PyTorch ({torch.__version__}) is built without NCCL; install one built for CUDA"}
    if not all(hasattr(dist.ProcessGroupNCCL, name) for name in ("abort", "shutdown", "get_error")):
        return {"error": f'this PyTorch ({torch.__version__}) is too old for it: pip install "torch>=2.7"'}
    if not torch.cuda.is_available():
        return {"error": "PyTorch sees no CUDA device"}
    index = torch.cuda.current_device()
    # In containers, each rank may call its device cuda:0.
    identity = str(getattr(torch.cuda.get_device_properties(index), "uuid", f"{host} {index}"))
    return {"name": f"cuda:{index}", "identity": identity}


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
