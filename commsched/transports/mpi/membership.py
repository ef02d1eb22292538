"""This process's place in MPI while a transport is open: its communicators and its progress thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ...core.errors import CommschedError, PeerTimeout
from .channel import MpiChannel
from .ending import ending_with
from .progress import Progress

_CHANNELS = 2
#: Tells our making of a communicator from one the program may make of the same ranks, at the same time, in another thread.
_TAG = 29_600


class Membership:
    """A communicator for each channel. Closed by closing the channels.

    Args:
        MPI: ``mpi4py.MPI``.
        ranks: of ``COMM_WORLD``, in the order of ours.
    """

    def __init__(self, MPI: Any, ranks: Sequence[int]) -> None:
        self._MPI = MPI
        self._ranks = ranks
        self._comms: list[Any] = []
        self._open_channels = _CHANNELS
        self._progress = Progress(MPI)

    def open(self, when_failed: Callable[[Callable[[CommschedError], None]], None], timeout_seconds: float) -> list[MpiChannel]:
        """The channels, once all ranks are here. Collective.

        Raises:
            CommschedError: the job failed meanwhile, or a rank did not come within the time.
        """
        opened = threading.Event()
        errors: list[BaseException] = []

        def end(error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            opened.set()

        # By the progress thread, as it has to wait for the other ranks in MPI, which nothing but their coming ends.
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
        """With the last channel, end the thread and give the communicators back."""
        self._open_channels -= 1
        if self._open_channels:
            return
        idle = self._progress.stop()
        if idle and graceful:
            for comm in self._comms:
                comm.Free()
        elif not idle or self._progress.used:  # what is complete here may not be on its way to others
            ending_with(self._MPI).arm()
