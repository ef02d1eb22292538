"""The communicators and the progress thread of this process while a transport is open, and the channels on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ....core.errors import PeerTimeout
from ...backend import WhenFailed
from ...collective import Done
from .library import ending_with
from .progress import Progress, abandon

_CHANNELS = 2
#: Distinguishes our creation of a communicator from one that the program may create of the same ranks, at the same time, in
#: another thread.
_TAG = 29_600


class Communicators:
    """One communicator of ``mpi4py.MPI`` for each channel. Closing all channels closes it.

    ``ranks`` are the ranks in ``COMM_WORLD``, in the order of our ranks.
    """

    def __init__(self, MPI: Any, ranks: Sequence[int]) -> None:
        self._MPI = MPI
        self._ranks = ranks
        self._comms: list[Any] = []
        self._open_channels = _CHANNELS
        self._progress = Progress(MPI)

    def open(self, when_failed: WhenFailed, timeout_seconds: float) -> list[MpiChannel]:
        """Create the communicators, and return the channels when all ranks have come. Collective.

        Raises:
            CommschedError: the job failed meanwhile, or a rank did not come within ``timeout_seconds``.
            CannotBegin: MPI failed to create a communicator.
        """
        opened = threading.Event()
        errors: list[BaseException] = []

        def end(error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            opened.set()

        # The progress thread creates them, because creation waits in MPI for the other ranks, and only their arrival ends it.
        self._progress.submit(self._make_communicators, end)
        when_failed(end)
        if not opened.wait(timeout_seconds):
            errors.append(PeerTimeout(f"not all ranks made MPI's communicators within {timeout_seconds:g} s"))
        if errors:
            self._progress.stop()
            ending_with(self._MPI).arm()
            raise errors[0]
        return [MpiChannel(self._MPI, comm, self._progress, self._close_one) for comm in self._comms]

    def _make_communicators(self) -> list[Any]:
        everybody = self._MPI.COMM_WORLD.Get_group()
        group = everybody.Incl(self._ranks)
        first = self._MPI.COMM_WORLD.Create_group(group, _TAG)
        self._comms = [first, *(first.Dup() for _ in range(_CHANNELS - 1))]
        group.Free()
        everybody.Free()
        return []

    def _close_one(self, graceful: bool) -> None:
        """When the last channel closes, end the thread and free the communicators."""
        self._open_channels -= 1
        if self._open_channels:
            return
        idle = self._progress.stop()
        if idle and graceful:
            for comm in self._comms:
                comm.Free()
        elif not idle or self._progress.used:  # an operation that is complete here may not have been sent to others
            ending_with(self._MPI).arm()


class MpiChannel:
    """A channel on a communicator of its own, so that no message of ours can match a message of the program.

    See ``collective.channel.Channel``. MPI matches collectives only by their order, so ranks call :meth:`all_reduce` of one
    channel in the same order.

    Nothing else uses ``comm``. The thread of ``progress`` calls MPI and each ``done``. ``on_close`` is called once, with
    ``graceful``.
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
