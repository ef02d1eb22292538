"""The communicators and the progress thread of this process while a transport is open."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ....core.errors import PeerTimeout
from ...context import WhenFailed
from .abort_at_exit import ending_with
from .channel import MpiChannel
from .progress import Progress

_CHANNELS = 2
#: Distinguishes our creation of a communicator from one that the program may create of the same ranks, at the same time, in
#: another thread.
_TAG = 29_600


class Communicators:
    """One communicator for each channel. Closing all channels closes it.

    Args:
        MPI: ``mpi4py.MPI``.
        ranks: the ranks in ``COMM_WORLD``, in the order of our ranks.
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
