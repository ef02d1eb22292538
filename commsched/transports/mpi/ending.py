"""How a process of a failed job ends: with MPI."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from functools import cache
from typing import Any

from ...core import process_exit

#: Before it ends all ranks, one that fails leaves the others time to have said why. They have heard of it already.
GRACE_SECONDS = 2.0


class Ending:
    """Ends the whole job by ``MPI_Abort`` when the interpreter ends, after :meth:`arm`, or by an exception after :meth:`fail`.

    Else an exception on one rank would hang all: ``MPI_Finalize``, which mpi4py calls last, waits for what will never be
    complete, and ``mpiexec`` for ranks that wait for MPI elsewhere. It comes after the traceback is printed and the session has
    told the others; of the program's exit handlers, those registered before the session was opened do not run then.

    A program that catches the failure and goes on by another transport ends as if MPI had not been tried, unless something of
    ours was left there.
    """

    def __init__(self, MPI: Any) -> None:
        self._MPI = MPI
        self._armed = self._failed = False
        # Now, since one that is registered while handlers run is not called.
        atexit.register(self._end)
        process_exit.leave_by(self._abort)

    def arm(self) -> None:
        """Something of ours may be left in MPI for ever. Any thread, repeatedly."""
        self._armed = True

    def fail(self, _: object = None) -> None:
        """The job failed. Any thread, repeatedly."""
        self._failed = True

    def _end(self) -> None:
        raised = getattr(sys, "last_value", None) is not None  # set by the interpreter when it printed an exception
        if not self._armed and not (self._failed and raised):
            return
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # there is none, or it is closed
                pass
        self._abort(1)

    def _abort(self, code: int) -> None:
        if self._MPI.Is_finalized():  # the program's doing: there is no MPI left to tell
            os._exit(code)
        time.sleep(GRACE_SECONDS)
        self._MPI.COMM_WORLD.Abort(code)


@cache
def ending_with(MPI: Any) -> Ending:
    """The one of this process."""
    return Ending(MPI)
