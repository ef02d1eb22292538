"""The MPI library of this process: loads and initialises it, checks that MPI started the ranks as this job needs, and ends the
MPI job when a process of a failed job ends."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

from ....core import process_exit, timeouts
from ....core.errors import ConfigError
from ....core.standard_streams import flush_all
from ....core.world import World

_INSTALL = 'pip install "commsched[mpi]"; and pip install mpich, unless the machine has an MPI'


def require_installed(gather: Callable[[Any], list[Any]]) -> None:
    """Check that all ranks have mpi4py, before any rank waits for the others in ``MPI_Init``. Collective.

    Raises:
        ConfigError: mpi4py is missing on a rank; names the rank.
    """
    for rank, installed in enumerate(gather(find_spec("mpi4py") is not None)):
        if not installed:
            raise ConfigError(f"transport='mpi' needs mpi4py, which rank {rank} does not have: {_INSTALL}")


def load() -> Any:
    """Return ``mpi4py.MPI``, initialised. If the program has not initialised MPI, this function does, together with all other
    ranks. Call it in the main thread.

    Raises:
        ConfigError: no MPI library is found, MPI is finalised, the program keeps mpi4py from initialising it, or several
            threads may not call it.
    """
    try:
        MPI = _imported()
    except (ImportError, RuntimeError) as error:  # mpi4py's wheels look for the library when they are imported
        raise ConfigError(f"transport='mpi' needs an MPI library that mpi4py can load ({error}): {_INSTALL}") from error
    if MPI.Is_finalized():
        raise ConfigError("transport='mpi' needs MPI, which this program has already finalised; open the session before that")
    if not MPI.Is_initialized():
        raise ConfigError(
            "transport='mpi' needs MPI, which this program keeps mpi4py from initialising: "
            "call MPI.Init_thread(MPI.THREAD_MULTIPLE) before commsched.init"
        )
    level = MPI.Query_thread()
    if level != MPI.THREAD_MULTIPLE:  # the program may call MPI beside our thread at any time, so nothing less is safe
        names = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
        raise ConfigError(
            f"transport='mpi' needs MPI with thread level 'multiple', but it was initialised with '{names.get(level, level)}': "
            "leave mpi4py.rc.threads and mpi4py.rc.thread_level as they are, or use an MPI library built with thread support"
        )
    return MPI


def _imported() -> Any:
    import mpi4py

    if "mpi4py.MPI" in sys.modules or not mpi4py.rc.initialize:
        from mpi4py import MPI

        return MPI
    # mpi4py would hold the interpreter's lock while MPI_Init waits for all ranks. No thread of this process could run then, not
    # even the control channel's, which other ranks may need to reach MPI_Init.
    finalize = mpi4py.rc.finalize
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, finalize is None or finalize
    try:
        from mpi4py import MPI
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = True, finalize
    _initialise(MPI, mpi4py.rc.thread_level if mpi4py.rc.threads else "single")
    return MPI


def _initialise(MPI: Any, thread_level: str) -> None:
    """Initialise MPI as importing mpi4py would, but without the interpreter's lock."""
    provided = ctypes.c_int()
    library = ctypes.CDLL(MPI.__file__)  # resolves symbols in the MPI library that the module is linked with
    code = library.MPI_Init_thread(None, None, getattr(MPI, f"THREAD_{thread_level.upper()}"), ctypes.byref(provided))
    if code != MPI.SUCCESS:
        raise RuntimeError(f"MPI_Init_thread failed with code {code}")
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py turns the returned errors into exceptions


def members(MPI: Any, world: World, gather: Callable[[Any], list[Any]]) -> list[int]:
    """Return the rank in ``COMM_WORLD`` of each rank of ``world``. Collective.

    Raises:
        ConfigError: MPI did not start the ranks as one job; says how to start it.
    """
    comm = MPI.COMM_WORLD
    places = gather([comm.rank, comm.size])
    ranks = [rank for rank, _ in places]
    if {size for _, size in places} == {comm.size} and len(set(ranks)) == world.world_size:
        return ranks
    library = MPI.Get_library_version().replace("\x00", "").splitlines()[0].split(",")[0].strip()
    raise ConfigError(
        f"transport='mpi', but MPI ({library}) did not start these {world.world_size} ranks as one job: rank {world.rank} is "
        f"rank {comm.rank} of {comm.size} to it (launcher: {world.launcher}). Start them with the mpiexec of that MPI, such as "
        f"mpiexec -n {world.world_size} python train.py"
    )


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
