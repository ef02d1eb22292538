"""The interface of a module in ``backends``: its ``BACKEND`` says how the transport of that name opens, and what it uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.interfaces import Transport
from .context import TransportContext


@dataclass(frozen=True, slots=True)
class Backend:
    """A transport that a user can choose by the name of its module.

    Attributes:
        open: opens the transport of this rank. Collective: every rank of ``context.world`` calls it.
        settings: the names of the settings for some transports only (see ``Settings``) that have an effect with this one. A job
            that sets another one of them is refused. ``wire`` and ``hierarchy`` need nothing but partitions in the host's
            memory.
        prepare: called on every rank of the job before ``open``, also if only the leaders of hosts open the transport.
            Collective.
        listens_at_host: whether the other ranks connect to ``context.host``. They check first that they can.
    """

    open: Callable[[TransportContext], Transport]
    settings: frozenset[str] = frozenset()
    prepare: Callable[[TransportContext], object] = lambda context: None
    listens_at_host: bool = False
