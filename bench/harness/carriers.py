"""One session for each way in which gradients travel, all in the same rank process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from commsched.core.world import detect_world
from commsched.settings import Settings

from ..systems.spec import Way
from .config_barrier import ConfigBarrier

if TYPE_CHECKING:
    from commsched.session.session import Session


@dataclass(frozen=True)
class OpenWay:
    """An open session of a way. ``shared`` holds the objects that systems of this session share; see ``Context``."""

    session: Session
    line: ConfigBarrier
    shared: dict[Any, Any] = field(default_factory=dict)


def open_ways(session: Session, own: Way, wanted: Iterable[Way], stack: ExitStack) -> dict[Way, OpenWay]:
    """Open a session for each wanted way except ``own``, the way of ``session``. ``stack`` closes the opened sessions.
    Collective.

    Raises:
        CommschedError: a session could not be opened; see ``commsched.init``.
    """
    ways = {own: OpenWay(session, ConfigBarrier(session))}
    for way in wanted:
        if way not in ways:
            opened = stack.enter_context(_open(way, len(ways)))
            ways[way] = OpenWay(opened, ConfigBarrier(opened))
    return ways


def _open(way: Way, number: int) -> Session:
    """Open the ``number``-th session beside the job's own. It meets at the port ``number`` higher, or at a file beside the
    job's."""
    from commsched.session.opening import open_session

    job = Settings.load({}, os.environ)
    place: dict[str, object] = {}
    if job.control is not None:
        host, port = job.control.rsplit(":", 1)
        place["control"] = f"{host}:{int(port) + number}"
    if job.rendezvous is not None:
        place["rendezvous"] = f"{job.rendezvous}.{number}"
    if way.transport != "ps":  # the job's servers are for other ways
        place |= {"servers": [], "lane": "tcp"}
    given = {"transport": way.transport, "order": way.order, **place}
    return open_session(detect_world(os.environ), Settings.load(given, os.environ))
