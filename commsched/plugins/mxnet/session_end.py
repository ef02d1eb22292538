"""The end of a session: all exchanges of a session end together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

import commsched

from ...core.errors import CommschedError
from ...core.interfaces import TaskObserver


class Ending(Protocol):
    """An exchange that works in rounds, and reports its end to the other ranks."""

    def offer_end(self) -> None:
        """Report that no round follows on this rank. Waits only for the averages of rounds that were begun."""
        ...

    @property
    def end_is_known(self) -> bool:
        """Whether every rank has reported its end or has begun another round instead."""
        ...

    def require_end(self) -> None:
        """Wait until the end is known.

        Raises:
            RanksDiverged: other ranks continue.
        """
        ...


_endings: WeakKeyDictionary[commsched.Session, list[Ending]] = WeakKeyDictionary()


def end_with(session: commsched.Session, ending: Ending) -> Callable[[], None]:
    """End ``ending`` when the session closes. The returned function undoes this."""
    endings = _endings.get(session)
    if endings is None:
        endings = _endings[session] = []
        session.on_close(partial(_end, session, endings))
    endings.append(ending)
    return partial(endings.remove, ending)


def _end(session: commsched.Session, endings: list[Ending]) -> None:
    """End all exchanges. Every exchange reports its end before this rank waits for any of them.

    The waits end in the order in which the ends become known. Another rank may continue with one exchange and wait for its
    averages; only the result of that exchange can reach it there.
    """
    for ending in endings:
        ending.offer_end()
    changed = threading.Event()
    session.observe(TaskObserver(lambda _: changed.set()))
    failures: list[CommschedError] = []

    def fail(error: CommschedError) -> None:
        failures.append(error)
        changed.set()

    session.when_failed(fail)
    waiting = list(endings)
    while waiting:
        changed.clear()
        known = [ending for ending in waiting if ending.end_is_known]
        if known or len(waiting) == 1:
            ending = known[0] if known else waiting[0]
            ending.require_end()
            waiting.remove(ending)
        else:
            if failures:
                raise failures[0]
            changed.wait()
