"""The end of a session: all that is exchanged on it ends together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

import commsched

from ...core.errors import CommschedError
from ...core.observers import TaskObserver


class Ending(Protocol):
    """What has rounds, and tells the other ranks when none comes."""

    def offer_end(self) -> None:
        """Say so. Waits for averages of rounds that were begun, and for nothing else."""
        ...

    @property
    def end_is_known(self) -> bool:
        """Whether all ranks have said so, or have begun another round instead."""
        ...

    def require_end(self) -> None:
        """Waits until the end is known.

        Raises:
            UnsupportedError: other ranks go on.
        """
        ...


_endings: WeakKeyDictionary[commsched.Session, list[Ending]] = WeakKeyDictionary()


def end_with(session: commsched.Session, ending: Ending) -> Callable[[], None]:
    """End when the session closes. What is returned takes it back."""
    endings = _endings.get(session)
    if endings is None:
        endings = _endings[session] = []
        session.on_close(partial(_end, session, endings))
    endings.append(ending)
    return partial(endings.remove, ending)


def _end(session: commsched.Session, endings: list[Ending]) -> None:
    """All say so before any waits, and whichever is known first counts: another rank that goes on with one of them may be
    waiting for its averages where nothing else reaches it."""
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
