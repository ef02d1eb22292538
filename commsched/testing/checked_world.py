"""The worlds in which ``check_transport`` runs its checks: ranks as threads of one process, or one rank of a real job."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from ..control.roster import first_common_steps
from ..core.config import SchedulerConfig
from ..core.core import Core
from ..core.errors import CommschedError
from ..core.interfaces import OnFailure, Transport
from ..core.task import REDUCE_SCATTER
from ..session.session import Session
from .world import run_world


class Switchboard:
    """A control channel between Cores of one process. It has only the calls that they need to agree on an order.

    ``tamper(rank, message)`` may change the message that rank 0 announces to ``rank``.
    """

    def __init__(self, tamper: Callable[[int, Any], Any] = lambda rank, message: message) -> None:
        self._tamper = tamper
        self._lock = threading.Lock()
        self._proposing = threading.Lock()
        self._cores: dict[int, Core] = {}
        self._early: list[tuple[int, Callable[[Core], None]]] = []  # messages for Cores that have not joined yet

    def join(self, rank: int, core: Core) -> None:
        with self._lock:
            self._cores[rank] = core
            early = [message for to, message in self._early if to == rank]
            self._early = [(to, message) for to, message in self._early if to != rank]
            for deliver in early:
                deliver(core)

    def messenger(self, rank: int, world_size: int) -> SwitchboardMessenger:
        return SwitchboardMessenger(self, rank, world_size)

    def deliver(self, to: int, message: Callable[[Core], None]) -> None:
        with self._lock:
            core = self._cores.get(to)
            if core is None:
                self._early.append((to, message))
                return
        message(core)

    def agree(self, config: SchedulerConfig | None) -> None:
        """Agree on the step from which all ranks use ``config``. Proposals are handled one after another."""
        with self._proposing:
            steps = first_common_steps([core.hold_steps() for core in self._cores.values()])
            for core in self._cores.values():
                core.switch_at(config, steps)

    def tampered(self, rank: int, value: Any) -> Any:
        return self._tamper(rank, json.loads(json.dumps(value)))  # JSON, as it would arrive over the network


class SwitchboardMessenger:
    """The connection of one rank to the switchboard."""

    def __init__(self, board: Switchboard, rank: int, world_size: int) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size

    def send_to_rank_0(self, value: Any) -> None:
        message = json.loads(json.dumps(value))
        self._board.deliver(0, lambda core: core.on_message(self._rank, message))

    def announce(self, value: Any) -> None:
        for rank in range(1, self._world_size):
            message = self._board.tampered(rank, value)
            self._board.deliver(rank, lambda core, message=message: core.on_announced(message))  # type: ignore[misc]

    def propose(self, config: dict[str, Any]) -> None:
        self._board.agree(SchedulerConfig(**config) if config else None)


#: Opens a transport for every rank, in one process. The n-th transport is rank n and reports its failures to the n-th
#: callback. The number of callbacks is the world size. The context manager closes the transports at the end.
OpenWorld = Callable[[Sequence[OnFailure]], AbstractContextManager[Sequence[Transport]]]

#: Opens the session of this process with a configuration and an order (``agreed`` or ``static``), the same on every rank.
OpenSession = Callable[[SchedulerConfig, str], Session]


class CheckedWorld(Protocol):
    """A world of ranks. ``splits``: reduce-scatter and all-gather exist. ``freezes``: an order may become static."""

    size: int
    splits: bool
    freezes: bool

    def run(self, body: Callable[[CheckedWorld, int], None]) -> None:
        """Call ``body(world, rank)`` for every rank in this process."""
        ...

    def core(self, rank: int, config: SchedulerConfig, order: str = "agreed") -> AbstractContextManager[Core]:
        """Open the Core of a rank. At most one Core per rank may be open. All ranks must use the same arguments."""
        ...

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return the JSON value of every rank, in rank order. The Core of the rank must be open."""
        ...


#: Opens a world for one check.
OpenRanks = Callable[[], AbstractContextManager[CheckedWorld]]


class Threads:
    """Ranks as threads, each with its own Core. A failure that one rank reports ends the waits of all ranks."""

    def __init__(
        self, open_world: OpenWorld, size: int, timeout_seconds: float = 60.0, switchboard: Switchboard | None = None
    ) -> None:
        self.size = size
        self.failures: list[CommschedError] = []
        self.failures_expected = False
        self.transports: Sequence[Transport] = ()
        self.switchboard = switchboard or Switchboard()
        self._timeout_seconds = timeout_seconds
        self._cores: list[Core | None] = [None] * size
        self._failing = threading.Lock()
        self._barrier = threading.Barrier(size)
        self._gathered: list[Any] = [None] * size
        self._opened = open_world([self._listener(rank) for rank in range(size)])

    def __enter__(self) -> Threads:
        self.transports = self._opened.__enter__()
        assert [transport.rank for transport in self.transports] == list(range(self.size)), "ranks are not in order"
        assert {transport.world_size for transport in self.transports} == {self.size}, "a world_size is wrong"
        assert len({transport.verbs for transport in self.transports}) == 1, "ranks have different verbs"
        self.splits = REDUCE_SCATTER in self.transports[0].verbs
        self.freezes = self.transports[0].ordered and self.transports[0].channels > 1
        return self

    def __exit__(self, *exception: Any) -> None:
        self._opened.__exit__(*exception)

    def run(self, body: Callable[[CheckedWorld, int], None]) -> None:
        run_world(self.size, lambda rank: body(self, rank), timeout_seconds=self._timeout_seconds)
        assert self.failures_expected or not self.failures, f"a failure was reported though all went well: {self.failures[0]}"

    @contextmanager
    def core(self, rank: int, config: SchedulerConfig, order: str = "agreed") -> Iterator[Core]:
        transport = self.transports[rank]
        messenger = self.switchboard.messenger(rank, self.size) if transport.ordered else None
        core = Core(transport, config, on_failure=self._tell, messenger=messenger, order=order)
        self._cores[rank] = core
        self.switchboard.join(rank, core)
        try:
            yield core
        finally:
            core.close()

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._gathered[rank] = value
        self._barrier.wait(self._timeout_seconds)
        gathered = list(self._gathered)
        self._barrier.wait(self._timeout_seconds)
        return gathered

    def _listener(self, rank: int) -> OnFailure:
        def on_failure(error: CommschedError) -> None:
            self._tell(error)

        return on_failure

    def _tell(self, error: CommschedError) -> None:
        """Make the first failure the failure of every open Core, as a control channel would.

        A later failure gives that first failure also to Cores that were opened in between.
        """
        with self._failing:
            self.failures.append(error)
            first = self.failures[0]
        for core in self._cores:
            if core is not None:
                core.fail(first)


class CheckedJob:
    """One rank of a job: this process. Each Core belongs to its own session."""

    def __init__(self, open_session: OpenSession, size: int) -> None:
        self.size = size
        self._open_session = open_session
        self._session: Session | None = None
        with open_session(SchedulerConfig(), "agreed") as session:
            transport = session.transport
            self.splits = REDUCE_SCATTER in transport.verbs
            self.freezes = transport.ordered and transport.channels > 1
            self.rank = session.rank

    def __enter__(self) -> CheckedJob:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def run(self, body: Callable[[CheckedWorld, int], None]) -> None:
        body(self, self.rank)

    @contextmanager
    def core(self, rank: int, config: SchedulerConfig, order: str = "agreed") -> Iterator[Core]:
        with self._open_session(config, order) as self._session:
            yield self._session.core

    def gather(self, rank: int, value: Any) -> list[Any]:
        assert self._session is not None
        return self._session.gather(value)
