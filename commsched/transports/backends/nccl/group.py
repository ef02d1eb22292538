"""The collectives on a device that the transport needs, by cupy's binding of NCCL, and how the ranks meet."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from ....core.errors import CommschedError, ConfigError, TransportError, error_text
from ....core.interfaces import Buffer
from ....core.late_thread import LateThread
from ....core.manifest import ITEMSIZE
from ....devices import open_device
from ...backend import TransportContext
from ...collective.failures import exit_if_job_fails

if TYPE_CHECKING:
    from ....devices.backends.cuda.device import CudaDevice

#: How often NCCL is asked whether a connection broke. It has no way to tell by itself.
_ASK_SECONDS: Final = 1.0

#: How long an abort waits for a call that another thread makes. A call may wait for other ranks, which only an abort can end.
_CALL_SECONDS: Final = 2.0

#: How long ``close`` waits for NCCL. It may wait for ranks of this host that have ended without a word.
_CLOSE_SECONDS: Final = 5.0


class NcclGroup:
    """Collectives over all ranks, on one stream of the device. They queue work and return before it is done.

    The stream has high priority, so that the kernels that move data get their share of the device beside the kernels of the
    training. One thread at a time calls the collectives, and any thread the other methods.
    """

    def __init__(self, device: CudaDevice, rank: int, world_size: int, identifier: bytes) -> None:
        from cupy.cuda import Device, nccl

        from ....devices.backends.cuda.device import entered  # here: it imports cupy

        self.device = device
        self.stream = device.stream(priority=-1)
        self._nccl: Any = nccl
        self._rank, self._world_size = rank, world_size
        self._current = Device(device.number)
        self._entered = entered
        with entered(self._current):
            self._communicator = nccl.NcclCommunicator(world_size, identifier, rank)
        self._types = {"float32": nccl.NCCL_FLOAT32, "float64": nccl.NCCL_FLOAT64, "uint8": nccl.NCCL_UINT8}
        self._lock = threading.Lock()  # guards the communicator: all other calls of NCCL are made with it
        self._end = threading.Lock()  # taken, once, by whoever ends the communicator
        self._broken = ""
        self._ended = threading.Event()
        self._asking = threading.Thread(target=self._ask, name="commsched-nccl-errors", daemon=True)
        self._asking.start()
        self._closer = LateThread("commsched-nccl-close")

    def all_reduce(self, values: Buffer, dtype: str) -> None:
        """Replace ``values`` by the sum of all ranks' ``values``."""
        at, kind = self.stream.address_of(values), self._types[dtype]
        self._call(lambda to: to.allReduce(at, at, self._count(values, dtype), kind, self._nccl.NCCL_SUM, self.stream.address))

    def reduce_scatter(self, chunks: Sequence[Buffer], dtype: str) -> None:
        """Replace this rank's own chunk, ``chunks[rank]``, by its sum over all ranks. The other chunks become undefined. The
        chunks lie one after another in memory."""
        kind, add, stream = self._types[dtype], self._nccl.NCCL_SUM, self.stream.address
        at, counts = self._places(chunks, dtype)
        if len(set(counts)) == 1:
            self._call(lambda to: to.reduceScatter(at[0], at[self._rank], counts[0], kind, add, stream))
        else:
            self._call_each(lambda to, root: to.reduce(at[root], at[root], counts[root], kind, add, root, stream))

    def all_gather(self, chunks: Sequence[Buffer]) -> None:
        """Replace each ``chunks[r]`` by the own chunk of rank ``r``. The chunks lie one after another in memory."""
        kind, stream = self._types["uint8"], self.stream.address
        at, counts = self._places(chunks, "uint8")
        if len(set(counts)) == 1:
            self._call(lambda to: to.allGather(at[self._rank], at[0], counts[0], kind, stream))
        else:
            self._call_each(lambda to, root: to.broadcast(at[root], at[root], counts[root], kind, root, stream))

    def error(self) -> str:
        """Return what broke the group, or an empty string. An operation that ended because it was aborted gives no result."""
        with self._lock:
            if not self._broken:
                try:
                    self._communicator.check_async_error()
                except self._nccl.NcclError as error:
                    self._broken = f"NCCL reports {error}"
            return self._broken

    def abort(self) -> None:
        """End all launched operations, and release everything, without waiting for other ranks."""
        self._broken = self._broken or "it was aborted"  # before the abort can end a launched operation
        self._ended.set()
        if self._end.acquire(blocking=False):
            has_lock = self._lock.acquire(timeout=_CALL_SECONDS)
            with self._entered(self._current):
                self._communicator.abort()
            if has_lock:
                self._lock.release()
            self._closer.forget()
        if threading.current_thread() is not self._asking:
            self._asking.join(_CLOSE_SECONDS)

    def close(self) -> None:
        """Release everything. Call it when no operation is outstanding on any rank."""
        self._ended.set()
        self._asking.join(_CLOSE_SECONDS)
        if self._end.acquire(blocking=False):
            self._closer.run(self._destroy, _CLOSE_SECONDS)

    def _destroy(self) -> None:
        with self._entered(self._current):
            self._communicator.destroy()

    def _call(self, call: Callable[[Any], object]) -> None:
        with self._lock, self._entered(self._current):
            if self._broken:
                raise RuntimeError(self._broken)
            call(self._communicator)

    def _call_each(self, call: Callable[[Any, int], object]) -> None:
        """Call it for every rank, as one operation."""

        def call_all(communicator: Any) -> None:
            self._nccl.groupStart()
            try:
                for rank in range(self._world_size):
                    call(communicator, rank)
            finally:
                self._nccl.groupEnd()

        self._call(call_all)

    def _places(self, chunks: Sequence[Buffer], dtype: str) -> tuple[list[int], list[int]]:
        return [self.stream.address_of(chunk) for chunk in chunks], [self._count(chunk, dtype) for chunk in chunks]

    def _count(self, values: Buffer, dtype: str) -> int:
        return len(values) // ITEMSIZE[dtype]

    def _ask(self) -> None:
        """The thread commsched-nccl-errors: abort when a connection broke, since operations would wait for it for ever."""
        while not self._ended.wait(_ASK_SECONDS):
            if self.error():
                self.abort()


def connect(context: TransportContext) -> NcclGroup:
    """Return the group of this rank. Collective.

    Raises:
        ConfigError: a rank lacks cupy, NCCL or a device, two ranks share a device, or ranks have different versions of NCCL.
        TransportError: NCCL could not connect the ranks, or a first sum was wrong.
    """
    rank, world_size = context.world.rank, context.world.world_size
    device, identifier = _meet(context)
    group = None
    try:
        with exit_if_job_fails(context.when_failed):  # while it connects, NCCL waits for all ranks without a limit
            group = NcclGroup(device, rank, world_size, identifier)
            # Without an abort, an operation that waits for a lost rank would block the device, and every thread that
            # synchronises with it, for ever.
            context.when_failed(partial(_abort_aside, group))
            total = _count_ranks(group)
        if broken := group.error():
            raise RuntimeError(broken)
        if total != world_size:
            raise RuntimeError(f"the first sum of {world_size} ones is {total:g}")
    except Exception as error:
        if group is not None:
            group.abort()
        raise TransportError(f"rank {rank}: NCCL could not connect {device.name}: {error_text(error)}") from error
    return group


def _abort_aside(group: NcclGroup, error: CommschedError) -> None:
    """Abort in a thread of its own: an abort may take a while, and the caller is a control thread. At the interpreter's end
    there may be no other thread (Python 3.12)."""
    try:
        threading.Thread(target=group.abort, name="commsched-nccl-abort", daemon=True).start()
    except RuntimeError:
        group.abort()


def _count_ranks(group: NcclGroup) -> float:
    there, here = group.device.allocate(4), group.device.allocate_host(4)
    struct.pack_into("f", here, 0, 1.0)
    group.stream.copy(there, here)
    group.all_reduce(there, "float32")
    group.stream.copy(here, there)
    group.stream.synchronize()
    total: float = struct.unpack("f", here)[0]
    return total


def _meet(context: TransportContext) -> tuple[CudaDevice, bytes]:
    """Return this rank's device, and the identifier that rank 0 has made. Collective: an error of one rank is raised on all.

    NCCL's ranks find each other by the identifier, so nobody who does not see the control channel can join them.
    """
    device, described = None, {}
    try:
        device = _own_device(context.device)
        described = _describe(device, context)
    except Exception as error:
        described = {"error": str(error) if isinstance(error, ConfigError) else error_text(error)}
    ranks = context.gather(described)
    for rank, record in enumerate(ranks):
        if "error" in record:
            raise ConfigError(f"transport='nccl' on rank {rank}: {record['error']}")
        if record["version"] != ranks[0]["version"]:
            versions = f"{ranks[0]['version']} on rank 0 and {record['version']} on rank {rank}"
            raise ConfigError(f"transport='nccl': NCCL has version {versions}; install the same on all machines")
        for other in range(rank):
            if ranks[other]["identity"] == record["identity"]:
                raise ConfigError(
                    f"transport='nccl': ranks {other} and {rank} share the device {record['name']}; NCCL needs one for each: "
                    "keep each rank's model on the device of its local rank, and call torch.cuda.set_device(local_rank), or "
                    "commsched.init(device=...), before anything else opens the session; for JAX, set CUDA_VISIBLE_DEVICES to "
                    "another one for each rank. Over transport=ps ranks may share one"
                )
    return cast("CudaDevice", device), bytes.fromhex(ranks[0]["identifier"])


def _own_device(name: str) -> CudaDevice:
    if not name.startswith("cuda"):  # the session was opened before there was a model
        open_device("cuda")  # says what is missing
        from cupy.cuda import runtime

        name = f"cuda:{runtime.getDevice()}"
    return cast("CudaDevice", open_device(name))


def _describe(device: CudaDevice, context: TransportContext) -> dict[str, str]:
    from cupy.cuda import Device, nccl, runtime

    if not nccl.available:
        raise ConfigError('cupy finds no NCCL: pip install "nvidia-nccl-cu12" for CUDA 12, or "nvidia-nccl-cu13" for CUDA 13')
    # In containers each rank may call its device cuda:0.
    identity = f"{runtime.getDeviceProperties(device.number)['uuid'].hex()} {Device(device.number).pci_bus_id}"
    identifier = nccl.get_unique_id().hex() if context.world.rank == 0 else ""
    version = str(nccl.get_version())
    return {"name": device.name, "identity": identity, "version": version, "identifier": identifier}
