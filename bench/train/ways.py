"""A session for each way of gradients to travel, all in the same processes. In each rank's process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from commsched.core.config import Settings
from commsched.core.world import detect_world

from ..systems.spec import Way
from .start_line import StartLine

if TYPE_CHECKING:
    from commsched.session import Session


@dataclass(frozen=True)
class OpenWay:
    """``shared`` is what systems of this session have in common, see ``Context``."""

    session: Session
    line: StartLine
    shared: dict[Any, Any] = field(default_factory=dict)


def open_ways(session: Session, own: Way, wanted: Iterable[Way], stack: ExitStack) -> dict[Way, OpenWay]:
    """Open what ``session``, which is that of ``own``, does not serve; ``stack`` closes what was opened. Collective.

    Raises:
        CommschedError: a session could not be opened; see ``commsched.init``.
    """
    ways = {own: OpenWay(session, StartLine(session))}
    for way in wanted:
        if way not in ways:
            opened = stack.enter_context(_open(way, len(ways)))
            ways[way] = OpenWay(opened, StartLine(opened))
    return ways


def _open(way: Way, number: int) -> Session:
    """Where the ``number``-th session beside the job's own meets: the next port, or a file beside the job's."""
    from commsched.opening import open_session

    job = Settings.load({}, os.environ)
    place: dict[str, object] = {}
    if job.control is not None:
        host, port = job.control.rsplit(":", 1)
        place["control"] = f"{host}:{int(port) + number}"
    if job.rendezvous is not None:
        place["rendezvous"] = f"{job.rendezvous}.{number}"
    given = {"transport": way.transport, "order": way.order, **place}
    return open_session(detect_world(os.environ), Settings.load(given, os.environ))
