"""``transport="mpi"``: collectives of MPI, by mpi4py, with the MPI library that mpi4py finds.

The ranks must be started by that MPI's ``mpiexec``. While a transport is open, one thread, ``commsched-mpi``, makes all our MPI
calls, on communicators of our own, so the program may use MPI at the same time. The thread that opens a transport, which must
be the main thread, initialises MPI first. The thread that closes it frees the communicators, once ``commsched-mpi`` has ended.
"""

from __future__ import annotations

from typing import Any

from ....core.interfaces import Transport
from ...backend import Backend, TransportContext
from ...collective import COLLECTIVE_SETTINGS, CollectiveTransport


def prepare(context: TransportContext) -> tuple[Any, list[int]]:
    """Initialise MPI. Returns ``mpi4py.MPI``, and the rank in ``COMM_WORLD`` of each rank of ``context.world``. Collective.

    If only some ranks of a job open a transport, every rank of the job must call this first: ``MPI_Init`` waits for all ranks.

    Raises:
        ConfigError: mpi4py or an MPI is missing, several threads may not call MPI, or MPI did not start this job.
    """
    from ...collective.failures import exit_if_job_fails
    from . import library
    from .library import ending_with

    library.require_installed(context.gather)
    with exit_if_job_fails(context.when_failed):
        MPI = library.load()
    context.when_failed(ending_with(MPI).fail)
    return MPI, library.members(MPI, context.world, context.gather)


def open_transport(context: TransportContext) -> Transport:
    """Open the transport of this rank. Collective: every rank of ``context.world`` calls it, in the main thread.

    Raises:
        ConfigError: see :func:`prepare`.
        CommschedError: the job failed meanwhile, or a rank did not come in time.
    """
    from .communicators import Communicators

    membership = Communicators(*prepare(context))
    channels = membership.open(context.when_failed, context.settings.join_within)
    return CollectiveTransport(context, channels)


BACKEND = Backend(open_transport, settings=COLLECTIVE_SETTINGS, prepare=prepare, library=("mpi4py", "mpi"))
