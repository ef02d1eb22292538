"""Ends the MPI job when a process of a failed job ends."""

from __future__ import annotations

import atexit
import os
import time
from functools import cache
from typing import Any

from ....core import process_exit, timeouts
from ....core.standard_streams import flush_all


class AbortAtExit:
    """Ends the whole job by ``MPI_Abort`` when the interpreter ends: after :meth:`arm`, or by an exception after :meth:`fail`.

    Without it an exception on one rank would hang all ranks: ``MPI_Finalize``, which mpi4py calls last, waits for operations
    that will never complete, and ``mpiexec`` waits for ranks that wait for MPI elsewhere. The abort comes after the traceback
    is printed and the session has notified the other ranks. The program's exit handlers that were registered before the session
    was opened do not run then.

    A program that catches the failure and continues with another transport ends as if MPI had not been tried, unless operations
    of ours were left in MPI.
    """

    def __init__(self, MPI: Any) -> None:
        self._MPI = MPI
        self._armed = self._failed = False
        # Registered now, since a handler that is registered while handlers run is not called.
        atexit.register(self._end)
        process_exit.leave_by(self._abort)

    def arm(self) -> None:
        """Abort at exit: an operation of ours may be left in MPI for ever. Thread-safe; may be called repeatedly."""
        self._armed = True

    def fail(self, _: object = None) -> None:
        """Abort at an exit by an exception: the job failed. Thread-safe; may be called repeatedly."""
        self._failed = True

    def _end(self) -> None:
        if not self._armed and not (self._failed and process_exit.error() is not None):
            return
        flush_all()
        self._abort(1)

    def _abort(self, code: int) -> None:
        if self._MPI.Is_finalized():  # by the program: MPI can abort nothing any more
            os._exit(code)
        time.sleep(timeouts.MPI_ABORT_SECONDS)
        self._MPI.COMM_WORLD.Abort(code)


@cache
def ending_with(MPI: Any) -> AbortAtExit:
    """Return the ``AbortAtExit`` of this process."""
    return AbortAtExit(MPI)
