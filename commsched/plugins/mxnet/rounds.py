"""Exchanges of trainers and of kvstores share this module: rounds on which the ranks agree, and their end, all together, when
the session closes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import commsched

from ...core.errors import CommschedError
from ...core.interfaces import TaskObserver
from ...core.manifest import Manifest
from .agreement import Agreement, ComparedWeights, RoundOutcome
from .queued_group import QueuedGroup


class Rounds:
    """The queued averages of one exchange, and what the ranks compare in each round: an agreement on the parameters
    ``flagged``, and all weights. ``what`` names the optimizer in errors, and is unique in the session. ``may_freeze`` is as for
    ``Session.register``. Making one is collective."""

    def __init__(
        self, session: commsched.Session, what: str, manifest: Manifest, flagged: Sequence[str], *, may_freeze: bool
    ) -> None:
        self.queued = QueuedGroup(session, manifest, may_freeze)
        self.agreement = Agreement(session, what, flagged)
        names, nbytes = [spec.name for spec in manifest.tensors], [spec.nbytes for spec in manifest.tensors]
        self.weights = ComparedWeights(session, what, names, nbytes)

    def settle(self) -> None:
        """Require that all ranks did the same up to the last round, and wait for its averages. Raises as ``Agreement.require``
        and ``QueuedGroup.settle``."""
        self.agreement.require()  # first: a rank that has ended instead of beginning that round sends no gradients
        self.queued.settle()
        self.weights.compare()

    def release(self) -> None:
        self.queued.release()
        self.agreement.release()


_exchanges: WeakKeyDictionary[commsched.Session, list[RoundExchange]] = WeakKeyDictionary()


class RoundExchange:
    """Works in rounds, and ends with its session: reports to the other ranks that no round follows."""

    def __init__(self, session: commsched.Session) -> None:
        self.done = RoundOutcome()
        self._session = session
        session.statistics.waits_elsewhere = True  # the engine's operations wait
        self._rounds: Rounds | None = None  # set when averages are queued for the first time

    def end_with_session(self) -> None:
        """End when the session closes."""
        exchanges = _exchanges.get(self._session)
        if exchanges is None:
            exchanges = _exchanges[self._session] = []
            self._session.on_close(partial(_end, self._session, exchanges))
        exchanges.append(self)

    def leave_session(self) -> None:
        """Undo :meth:`end_with_session`."""
        _exchanges[self._session].remove(self)

    def offer(self, rounds: Rounds, done: RoundOutcome) -> None:
        """Submit the record of a round, of what is ``done``."""
        rounds.agreement.offer(done, (), ())

    def offer_end(self) -> None:
        """Report that no round follows on this rank. Waits only for the averages of rounds that were begun."""
        if self._rounds is not None:
            self._rounds.settle()
            self.offer(self._rounds, replace(self.done, ends=True))

    @property
    def end_is_known(self) -> bool:
        """Whether every rank has reported its end or has begun another round instead."""
        return self._rounds is None or self._rounds.agreement.is_known

    def require_end(self) -> None:
        """Wait until the end is known. Raises RanksDiverged if other ranks continue."""
        if self._rounds is not None:
            self._rounds.agreement.require()


def _end(session: commsched.Session, exchanges: list[RoundExchange]) -> None:
    """End all exchanges. Every exchange reports its end before this rank waits for any of them.

    The waits end in the order in which the ends become known. Another rank may continue with one exchange and wait for its
    averages; only the result of that exchange can reach it there.
    """
    for exchange in exchanges:
        exchange.offer_end()
    changed = threading.Event()
    session.observe(TaskObserver(lambda _: changed.set()))
    failures: list[CommschedError] = []

    def fail(error: CommschedError) -> None:
        failures.append(error)
        changed.set()

    session.when_failed(fail)
    waiting = list(exchanges)
    while waiting:
        changed.clear()
        known = [exchange for exchange in waiting if exchange.end_is_known]
        if known or len(waiting) == 1:
            exchange = known[0] if known else waiting[0]
            exchange.require_end()
            waiting.remove(exchange)
        else:
            if failures:
                raise failures[0]
            changed.wait()
