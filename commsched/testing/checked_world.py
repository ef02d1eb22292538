"""The worlds in which ``check_transport`` runs its checks: ranks as threads of one process, or one rank of a real job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

from ..core.core import Core
from ..core.device import Device
from ..core.errors import CommschedError
from ..core.interfaces import OnFailure, Transport
from ..core.scheduler import SchedulerConfig
from ..core.task import REDUCE_SCATTER
from ..core.world import World
from ..session.events import SessionListener
from ..session.local import LocalControl, LocalControlWorld
from ..session.session import Session
from ..settings import Settings
from ..transports.backend import TransportContext
from ..transports.collective import CollectiveTransport
from .world import run_world

#: Opens a transport for every rank, in one process. The n-th transport is rank n and reports its failures to the n-th
#: callback. The number of callbacks is the world size. The context manager closes the transports at the end.
OpenWorld = Callable[[Sequence[OnFailure]], AbstractContextManager[Sequence[Transport]]]

#: Opens the session of this process with a configuration, the same on every rank.
OpenSession = Callable[[SchedulerConfig], Session]

#: Opens the device of a rank.
OpenDevice = Callable[[int], Device]


class Meeting:
    """The connection of ranks that are threads, while they open a transport: it stands in for the control channel, and a host
    of the same name for all ranks. A failure is reported to nobody but the rank's own ``on_failure``."""

    TOKEN = "a secret of the tests"

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._controls = LocalControlWorld(world_size).ends

    def context(self, rank: int, on_failure: OnFailure, **settings: Any) -> TransportContext:
        """The arguments of ``Backend.open`` on ``rank``."""
        return TransportContext(
            world=World(rank, self._world_size, rank, self._world_size, "threads"),
            settings=Settings(**settings),
            host="127.0.0.1",
            token=self.TOKEN,
            control_address="127.0.0.1:1",
            gather=self._controls[rank].gather_next,
            on_failure=on_failure,
            when_failed=lambda callback: None,
        )


def world_of(open_transport: Callable[[TransportContext], Transport], **settings: Any) -> OpenWorld:
    """Return an :data:`OpenWorld` for ``open_transport``, the ``Backend.open`` of a transport."""

    @contextmanager
    def open_world(listeners: Sequence[OnFailure]) -> Iterator[Sequence[Transport]]:
        size, meeting = len(listeners), Meeting(len(listeners))
        transports = run_world(size, lambda rank: open_transport(meeting.context(rank, listeners[rank], **settings)))
        try:
            yield transports
        finally:
            run_world(size, lambda rank: transports[rank].close())

    return open_world


class Threads:
    """Ranks as threads, each with its own Core. A failure that one rank reports ends the waits of all ranks.

    ``splits``: reduce-scatter and all-gather exist. ``freezes``: an order may become static. ``sums``: the transport's channels
    have an all-reduce, which is used in large worlds only.
    """

    def __init__(
        self, open_world: OpenWorld, size: int, timeout_seconds: float = 60.0, open_device: OpenDevice | None = None
    ) -> None:
        self.size = size
        self._devices = None if open_device is None else [open_device(rank) for rank in range(size)]
        self.failures: list[CommschedError] = []
        self.failures_expected = False
        self.transports: Sequence[Transport] = ()
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()  # guards the failures and all below
        self._cores: list[Core | None] = [None] * size
        self._worlds: list[LocalControlWorld] = []  # the n-th Cores of all ranks share one
        self._controls: list[list[LocalControl]] = [[] for _ in range(size)]
        self._gathers = [count() for _ in range(size)]
        self._opened = open_world([self._tell] * size)

    def __enter__(self) -> Threads:
        self.transports = self._opened.__enter__()
        assert [transport.rank for transport in self.transports] == list(range(self.size)), "ranks are not in order"
        assert {transport.world_size for transport in self.transports} == {self.size}, "a world_size is wrong"
        assert len({transport.verbs for transport in self.transports}) == 1, "ranks have different verbs"
        self.splits = REDUCE_SCATTER in self.transports[0].verbs
        self.freezes = self.transports[0].ordered and self.transports[0].channels > 1
        self.sums = isinstance(self.transports[0], CollectiveTransport)
        return self

    def use_all_reduce(self) -> None:
        """Use the all-reduce of the transport's channels, as in a large world."""
        for transport in self.transports:
            _use_all_reduce(transport)

    def __exit__(self, *exception: Any) -> None:
        self._opened.__exit__(*exception)
        for controls in self._controls:
            for control in controls:
                control.close()

    def run(self, body: Callable[[CheckedWorld, int], None]) -> None:
        """Call ``body(world, rank)`` for every rank in this process."""
        run_world(self.size, lambda rank: body(self, rank), timeout_seconds=self._timeout_seconds)
        assert self.failures_expected or not self.failures, f"a failure was reported though all went well: {self.failures[0]}"

    @contextmanager
    def core(self, rank: int, config: SchedulerConfig) -> Iterator[Core]:
        """Open the Core of a rank. At most one Core per rank may be open. All ranks must use the same arguments."""
        transport = self.transports[rank]
        control = self._join(rank)
        messenger = control if transport.ordered else None
        core = Core(transport, config, on_failure=self._tell, messenger=messenger)
        self._cores[rank] = core
        control.listen(SessionListener(core, lambda rank, value: None))
        try:
            yield core
        finally:
            core.close()

    def transport(self, rank: int) -> Transport:
        return self.transports[rank]

    def device(self, rank: int) -> Device | None:
        """The device that holds the tensors of a rank; None is the host."""
        return None if self._devices is None else self._devices[rank]

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return the JSON value of every rank, in rank order. The Core of the rank must be open."""
        return self._controls[rank][-1].gather(str(next(self._gathers[rank])), value)

    def _join(self, rank: int) -> LocalControl:
        with self._lock:
            number = len(self._controls[rank])
            if number == len(self._worlds):
                self._worlds.append(LocalControlWorld(self.size))
            control = self._worlds[number].ends[rank]
            self._controls[rank].append(control)
        return control

    def _tell(self, error: CommschedError) -> None:
        """Make the first failure the failure of every open Core, as a control channel would.

        A later failure gives that first failure also to Cores that were opened in between.
        """
        with self._lock:
            self.failures.append(error)
            first = self.failures[0]
        for core in self._cores:
            if core is not None:
                core.fail(first)


class CheckedJob:
    """One rank of a job: this process, with the methods of :class:`Threads`. Each Core belongs to its own session."""

    def __init__(self, open_session: OpenSession, size: int, open_device: OpenDevice | None = None) -> None:
        self.size = size
        self._open_session = open_session
        self._session: Session | None = None
        self._uses_all_reduce = False
        with open_session(SchedulerConfig()) as session:
            transport = session.transport
            self.splits = REDUCE_SCATTER in transport.verbs
            self.freezes = transport.ordered and transport.channels > 1
            self.sums = isinstance(transport, CollectiveTransport)
            self.rank = session.rank
        self._device = None if open_device is None else open_device(self.rank)

    def __enter__(self) -> CheckedJob:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def run(self, body: Callable[[CheckedWorld, int], None]) -> None:
        body(self, self.rank)

    @contextmanager
    def core(self, rank: int, config: SchedulerConfig) -> Iterator[Core]:
        with self._open_session(config) as self._session:
            if self._uses_all_reduce:
                _use_all_reduce(self._session.transport)
            yield self._session.core

    def use_all_reduce(self) -> None:
        self._uses_all_reduce = True

    def transport(self, rank: int) -> Transport:
        assert self._session is not None
        return self._session.transport

    def device(self, rank: int) -> Device | None:
        return self._device

    def gather(self, rank: int, value: Any) -> list[Any]:
        assert self._session is not None
        return self._session.gather(value)


def _use_all_reduce(transport: Transport) -> None:
    if isinstance(transport, CollectiveTransport):
        transport.exchange_up_to = 0


#: A world of ranks.
CheckedWorld = Threads | CheckedJob

#: Opens a world for one check.
OpenRanks = Callable[[], AbstractContextManager[CheckedWorld]]
