"""One MPI communicator. It uses buffer calls only, which copy and pickle nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...collective.channel import Done
from .progress import Progress, abandon


class MpiChannel:
    """A channel on a communicator of its own, so that no message of ours can match a message of the program.

    See ``collective.channel.Channel``. MPI matches collectives only by their order, so ranks call :meth:`all_reduce` of one
    channel in the same order.

    Args:
        MPI: ``mpi4py.MPI``.
        comm: a communicator that nothing else uses.
        progress: the thread that calls MPI and each ``done``.
        on_close: called once, with ``graceful``.
    """

    def __init__(self, MPI: Any, comm: Any, progress: Progress, on_close: Callable[[bool], None]) -> None:
        self.rank: int = comm.rank
        self.world_size: int = comm.size
        # Not uint8: sums of bytes must wrap, and Open MPI's sums saturate at 255 where the processor has AVX.
        self._types = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}
        self.native = frozenset(self._types)
        self._MPI = MPI
        self._comm = comm
        self._progress = progress
        self._on_close = on_close
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # else an error ends the process without saying which task it hit

    def all_reduce(self, data: memoryview, dtype: str, done: Done) -> None:
        """Replace ``data`` by its sum over all ranks. Thread-safe, but call it in the same order on all ranks."""
        message = [data, self._types[dtype]]
        self._progress.submit(lambda: [self._comm.Iallreduce(self._MPI.IN_PLACE, message, self._MPI.SUM)], done)

    def exchange(
        self,
        tag: int,
        sends: Sequence[tuple[int, memoryview]],
        receives: Sequence[tuple[int, memoryview]],
        done: Done,
    ) -> None:
        """Send to and receive from each ``(rank, memory)``. ``tag`` matches messages. Thread-safe."""

        def begin() -> list[Any]:
            byte = self._MPI.BYTE
            requests: list[Any] = []
            try:
                for rank, data in receives:
                    requests.append(self._comm.Irecv([data, byte], rank, tag))
                for rank, data in sends:
                    requests.append(self._comm.Isend([data, byte], rank, tag))
            except BaseException:
                abandon(requests)  # the requests that did begin
                raise
            return requests

        self._progress.submit(begin, done)

    def close(self, graceful: bool) -> None:
        self._on_close(graceful)
