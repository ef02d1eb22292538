"""The composition root: settings -> control channel -> transport -> session, and what observes it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from .auto import transport_name
from .control.listener import Listener
from .core.config import Settings
from .core.manifest import Manifest
from .core.ports import Transport
from .core.world import World
from .first_line import FirstLine, first_line
from .log import say, set_level
from .rendezvous import Meeting, find, own_host, publish, rendezvous_path, where_to_listen
from .session import Control, Session
from .transports import require_transport
from .transports.context import TransportContext

if TYPE_CHECKING:
    from .control.server import ControlServer  # which needs gRPC

#: Settings that all ranks must agree on, besides those of the scheduler.
_SAME_ON_ALL_RANKS = ("transport", "lane", "servers", "order", "wire", "hierarchy", "fail_after")


def open_session(world: World, settings: Settings, device: str = "cpu") -> Session:
    """A session besides that of this process, which ``commsched.init`` opens; it has a control channel of its own. Collective.

    Raises:
        ConfigError, PeerTimeout: see ``commsched.init``.
    """
    require_transport(settings.transport)
    if settings.log is not None:
        set_level(settings.log)
    if world.world_size == 1 or settings.disable:
        return _open_alone(world, settings)
    quiet_grpc()
    with ExitStack() as stack:
        opening = _Opening(world, settings, device, stack)
        session = Session(
            world,
            settings.scheduler,
            open_control=opening.open_control,
            open_transport=opening.open_transport,
            order=settings.order,
            same_on_all_ranks={
                **{name: getattr(settings, name) for name in _SAME_ON_ALL_RANKS},
                "tune": str(settings.tune),
                "whether there is a tuned file": settings.tuned is not None,
            },
            trace_directory=settings.trace,
            warn_after_seconds=settings.fail_after,
        )
        session.cleanup.enter_context(stack.pop_all())
    if world.rank == 0:
        session.on_register(FirstLine(say, lambda manifest: opening.first_line(session, manifest)).on_register)
    if settings.tune is not None:
        opening.start_tuning(session)
    return session


def quiet_grpc() -> None:
    """Before gRPC is imported: it would log to stderr what we report as errors of our own."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _open_alone(world: World, settings: Settings) -> Session:
    from .local import local_sessions  # with the shared parts of all transports

    if settings.tune is not None and world.rank == 0:
        say(f"there is nothing to tune with {'disable=1' if settings.disable else 'one rank'}")
    [alone] = local_sessions(1, settings.scheduler)
    alone.disabled = settings.disable
    return alone


class _Opening:
    """What the parts of one rank's session are opened with, one after another. ``stack`` closes what is there before them."""

    def __init__(self, world: World, settings: Settings, device: str, stack: ExitStack) -> None:
        self._world = world
        self._settings = settings
        self._device = device
        self._published = stack.enter_context(ExitStack())
        self._meeting, self._server = self._meet(stack)
        self._host = own_host(world, settings, self._meeting.address)
        self._transport = settings.transport  # its name; both are known once it is open
        self._hosts = 1

    def _meet(self, stack: ExitStack) -> tuple[Meeting, ControlServer | None]:
        """Where the control channel is; on rank 0, open its server."""
        world, settings = self._world, self._settings
        path = rendezvous_path(settings, os.environ)
        if world.rank != 0:
            return find(world, settings, path), None
        from .control.server import ControlServer

        wanted = where_to_listen(world, settings)
        server = ControlServer(
            wanted.address,
            wanted.token,
            world.world_size,
            fail_after_seconds=settings.fail_after,
            join_within_seconds=settings.join_within,
        )
        stack.callback(server.close)
        meeting = Meeting(server.address, wanted.token)
        if settings.control is None:
            publish(path, meeting)
            self._published.callback(path.unlink, missing_ok=True)
        return meeting, server

    def open_control(self, listener: Listener) -> Control:
        from .control.client import ControlClient, Member

        control = ControlClient(
            self._meeting.address,
            self._meeting.token,
            Member.rank(self._world.rank, self._world.world_size, self._host),
            listener,
            fail_after_seconds=self._settings.fail_after,
            join_within_seconds=self._settings.join_within,
            server=self._server,
        )
        self._published.close()  # all have joined: a rank that soon opens another session, as this one failed, must not find it
        return control

    def open_transport(self, session: Session) -> Transport:
        from .transports.opening import open_named  # with the shared parts of all transports: not for one rank alone

        context = TransportContext(
            world=self._world,
            settings=self._settings,
            host=self._host,
            token=self._meeting.token,
            control_address=self._meeting.address,
            gather=session.gather,
            on_failure=session.report,
            when_failed=session.when_failed,
        )
        self._transport = transport_name(self._world, self._settings, self._device, session.gather)
        self._hosts = len(set(session.gather(self._host)))
        if self._settings.tuned is not None:
            self._require_fitting(session)
        return open_named(context, self._transport)

    def _require_fitting(self, session: Session) -> None:
        """Refuse settings that were tuned for another job: now, or when its tensors are registered."""
        from .tuner.link import describe_link
        from .tuner.tuned import ModelCheck, check_tuned, describe_transport

        settings, tuned = self._settings, self._settings.tuned
        assert tuned is not None
        if session.rank == 0:
            transport = describe_transport(self._transport, settings)
            check_tuned(tuned, session.world_size, self._hosts, transport, describe_link(self._host, settings.rate))
        session.on_register(ModelCheck(tuned, warn=session.rank == 0).on_register)

    def first_line(self, session: Session, manifest: Manifest) -> str:
        ordered, config = session.transport.ordered, session.core.config
        return first_line(self._settings, self._transport, ordered, session.world_size, self._hosts, config, manifest)

    def start_tuning(self, session: Session) -> None:
        from .transports.host.leader import LeaderTransport
        from .tuner.online import start_tuning

        leads_host = isinstance(session.transport, LeaderTransport)
        try:
            start_tuning(session, self._settings, self._transport, self._host, say, leads_host=leads_host)
        except BaseException as error:
            session.abort(f"{type(error).__name__}: {error}")
            raise
