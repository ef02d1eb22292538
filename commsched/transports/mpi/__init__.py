"""``transport="mpi"``: collectives of MPI, by mpi4py, with whatever MPI library it finds.

The ranks must be started by that MPI's ``mpiexec``. While a transport is open, one thread, ``commsched-mpi``, makes all calls
of ours, on communicators of our own: the program may use MPI beside us. Whoever opens a transport initialises MPI before, in
the main thread; whoever closes it frees the communicators, once that thread has ended.
"""

from __future__ import annotations

from typing import Any

from ...core.ports import Transport
from ..collective import CollectiveTransport
from ..context import TransportContext


def prepare(context: TransportContext) -> tuple[Any, list[int]]:
    """``mpi4py.MPI``, and the rank in ``COMM_WORLD`` of each rank of ``context.world``. Collective.

    Where only some ranks of a job open a transport, every rank of the job is to call this first: ``MPI_Init`` waits for all.

    Raises:
        ConfigError: mpi4py or an MPI is missing, MPI may not be called by several threads, or did not start this job.
    """
    from ..stuck import ends_if_failed
    from . import library
    from .ending import ending_with

    library.require_installed(context.gather)
    with ends_if_failed(context.when_failed):
        MPI = library.load()
    context.when_failed(ending_with(MPI).fail)
    return MPI, library.members(MPI, context.world, context.gather)


def open_transport(context: TransportContext) -> Transport:
    """Collective: every rank of ``context.world`` opens one, in the main thread.

    Raises:
        ConfigError: see :func:`prepare`.
        CommschedError: the job failed meanwhile.
    """
    from .membership import Membership

    membership = Membership(*prepare(context))
    channels = membership.open(context.when_failed, context.settings.join_within)
    return CollectiveTransport(context, channels)
