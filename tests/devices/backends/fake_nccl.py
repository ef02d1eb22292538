"""``cupy.cuda.nccl`` over a simulated device: the names, arguments and meanings of cupy 14, as its source has them.

Operations only queue work, on the stream they are given. As with NCCL, the n-th operation of a communicator on one rank meets
the n-th on every other, whatever they are: ranks that launch in different orders mix up their data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from commsched.testing import SimulatedBuffer, SimulatedDevice
from commsched.testing.simulated_device import SimulatedCollective

NCCL_SUM = 0
NCCL_UINT8, NCCL_FLOAT32, NCCL_FLOAT64 = 1, 7, 8
TYPES = {NCCL_UINT8: np.dtype(np.uint8), NCCL_FLOAT32: np.dtype(np.float32), NCCL_FLOAT64: np.dtype(np.float64)}
ID_BYTES = 128
ERRORS = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(ERRORS[status])
        self.status = status


class _Clique:
    """The communicators that have one identifier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.joined = threading.Barrier(size)
        self.lock = threading.Lock()
        self.collectives: dict[int, tuple[SimulatedCollective, dict[int, list[_Part]]]] = {}
        self.status = 0


class _Part:
    """One rank's part of one call: its arrays once its kernel runs, and the function that makes the results."""

    def __init__(
        self, name: str, root: int, kind: int, sends: SimulatedBuffer | None, receives: SimulatedBuffer | None
    ) -> None:
        self.name, self.root, self.sends, self.receives = name, root, sends, receives
        self.dtype = TYPES[kind]
        self.sent: Any = None
        self.received: Any = None


def make(
    device: SimulatedDevice,
    memory_at: Callable[[int, int], SimulatedBuffer],
    stream_at: Callable[[int], Any],
    current_device: Callable[[], int],
) -> Any:
    """Return the module. Its ``fail(status)`` breaks all connections: operations that are queued then never end."""
    cliques: dict[bytes, _Clique] = {}
    lock, identifiers = threading.Lock(), count(1)
    thread = threading.local()

    def get_unique_id() -> bytes:
        return next(identifiers).to_bytes(ID_BYTES, "big")

    def fail(status: int) -> None:
        for clique in cliques.values():
            clique.status = status

    def groupStart() -> None:
        assert getattr(thread, "calls", None) is None
        thread.calls = []

    def groupEnd() -> None:
        calls, thread.calls = thread.calls, None
        if calls:
            communicator, _, stream = calls[0]
            assert all(each[0] is communicator and each[2] == stream for each in calls)
            communicator._launch([part for _, part, _ in calls], stream)

    class NcclCommunicator:
        def __init__(self, ndev: int, commId: bytes, rank: int, config: None = None) -> None:
            if len(commId) != ID_BYTES:
                raise ValueError(f"commId length {len(commId)} != {ID_BYTES}.")
            with lock:
                self._clique = cliques.setdefault(commId, _Clique(ndev))
            self._rank, self._device, self._calls, self._comm = rank, current_device(), 0, 1
            self._clique.joined.wait(60)

        def size(self) -> int:
            return self._clique.size

        def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
            self._call("sum", op, -1, (sendbuf, count), (recvbuf, count), datatype, stream)

        def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
            receives = (recvbuf, count) if root == self._rank else None
            self._call("reduce", op, root, (sendbuf, count), receives, datatype, stream)

        def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
            sends = (sendbuff, count) if root == self._rank else None
            self._call("broadcast", NCCL_SUM, root, sends, (recvbuff, count), datatype, stream)

        def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
            sends = (sendbuf, recvcount * self.size())
            self._call("reduce-scatter", op, -1, sends, (recvbuf, recvcount), datatype, stream)

        def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
            self._call("gather", NCCL_SUM, -1, (sendbuf, count), (recvbuf, count * self.size()), datatype, stream)

        def check_async_error(self) -> None:
            self._require(not self._clique.status, self._clique.status)

        def abort(self) -> None:
            if self._comm:
                self._comm = 0
                with self._clique.lock:
                    collectives = [collective for collective, _ in self._clique.collectives.values()]
                for collective in collectives:
                    for stream in {part[0] for part in collective.parts}:
                        if stream is self._stream:
                            device.break_off(collective, stream)

        def destroy(self) -> None:
            self._comm = 0

        _stream: Any = None

        def _require(self, holds: bool, status: int = 4) -> None:
            if not holds or not self._comm:
                raise NcclError(status if self._comm else 4)

        def _call(self, name: str, op: int, root: int, sends: Any, receives: Any, kind: int, stream: int) -> None:
            self._require(op == NCCL_SUM and kind in TYPES)
            self._require(current_device() == self._device, 1)
            spans = [None if each is None else memory_at(each[0], each[1] * TYPES[kind].itemsize) for each in (sends, receives)]
            part = _Part(name, root, kind, *spans)
            if getattr(thread, "calls", None) is not None:
                thread.calls.append((self, part, stream))
            else:
                self._launch([part], stream)

        def _launch(self, parts: list[_Part], stream: int) -> None:
            clique, self._stream = self._clique, stream_at(stream)
            with clique.lock:
                number, self._calls = self._calls, self._calls + 1
                collective, everybodys = clique.collectives.setdefault(number, (SimulatedCollective(clique.size), {}))
            sends = [part.sends for part in parts if part.sends is not None]
            receives = [part.receives for part in parts if part.receives is not None]

            def kernel(*arrays: Any) -> None:
                given = iter(arrays)
                for part in parts:
                    part.sent = None if part.sends is None else next(given).view(part.dtype).copy()
                for part in parts:
                    part.received = None if part.receives is None else next(given).view(part.dtype)
                everybodys[self._rank] = parts
                if len(everybodys) == clique.size:
                    _exchange(everybodys)
                    with clique.lock:
                        del clique.collectives[number]

            if clique.status:
                collective = SimulatedCollective(clique.size + 1)  # it never ends
                with clique.lock:
                    clique.collectives[number] = (collective, everybodys)
            self._stream.launch(kernel, sends, receives, collective=collective)

    return SimpleNamespace(
        available=True,
        NcclCommunicator=NcclCommunicator,
        NcclError=NcclError,
        get_unique_id=get_unique_id,
        get_version=lambda: 22703,
        groupStart=groupStart,
        groupEnd=groupEnd,
        fail=fail,
        **{name: value for name, value in globals().items() if name.startswith("NCCL_")},
    )


def _exchange(everybodys: dict[int, list[_Part]]) -> None:
    """Do the calls that meet. Those that differ between ranks have whatever result their memory gives."""
    size = len(everybodys)
    for parts in zip(*(everybodys[rank] for rank in range(size)), strict=True):
        for rank, part in enumerate(parts):
            if part.received is None:
                continue
            length = part.received.size
            if part.name == "broadcast":
                result = parts[part.root].sent
            elif part.name == "gather":
                result = np.concatenate([each.sent for each in parts])
            else:
                sent = [each.sent for each in parts]
                if part.name == "reduce-scatter":
                    sent = [each[rank * length : (rank + 1) * length] for each in sent]
                result = sent[0].copy()
                for each in sent[1:]:
                    result += each.view(result.dtype)[: result.size]
            part.received[:] = result
