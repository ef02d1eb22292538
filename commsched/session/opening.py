"""The composition root: settings, control channel, transport and session, put together in this order."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..control.events import Listener
from ..control.rendezvous import (
    Endpoint,
    Reached,
    find,
    job_name,
    own_host,
    publish,
    reached_at,
    rendezvous_path,
    require_reachable,
    where_to_listen,
)
from ..core.config import SchedulerConfig
from ..core.errors import ConfigError
from ..core.interfaces import Transport
from ..core.manifest import Manifest
from ..core.world import World
from ..settings import Settings
from ..transports import load_backend, require_transport, without_effect
from ..transports.auto import transport_name
from ..transports.context import TransportContext
from ..tuner.format import size
from .log import say, say_whose_warnings, set_level
from .process_end import tell_launcher
from .processors import steps_between_comparisons
from .session import Control, Session

if TYPE_CHECKING:
    from ..control.server import ControlServer  # which needs gRPC

log = logging.getLogger("commsched")

_opened = False


def open_session(world: World, settings: Settings, device: str = "cpu") -> Session:
    """Open a session with a control channel of its own, independent of the session of ``commsched.init``. Collective.

    Raises:
        ConfigError, PeerTimeout: see ``commsched.init``.
    """
    global _opened
    require_transport(settings.transport)
    say_whose_warnings()
    if settings.log is not None:
        set_level(settings.log)
    _opened = True
    if world.world_size == 1 or settings.disable:
        _tell_joined(world, settings)
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
                **{name: getattr(settings, name) for name in Settings.names("same_on_all_ranks")},
                "tune": str(settings.tune),
                "whether there is a tuned file": settings.tuned is not None,
            },
            trace_directory=settings.trace,
            check_weights=settings.check_weights,
            warn_after_seconds=settings.fail_after,
            stall_after_seconds=settings.stall_after,
        )
        session.cleanup.enter_context(stack.pop_all())
    if world.rank == 0:
        session.on_register(FirstLine(say, lambda manifest: opening.first_lines(session, manifest)).on_register)
    if settings.tune is not None:
        opening.start_tuning(session)
    return session


def has_opened() -> bool:
    """Whether this process has opened a session or tried to open one."""
    return _opened


def quiet_grpc() -> None:
    """Silence gRPC's log; call it before gRPC is imported. gRPC would log to stderr what we report as errors of our own."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _tell_joined(world: World, settings: Settings) -> None:
    if settings.launcher_file is not None:
        tell_launcher(settings.launcher_file, "joined", world.rank)


def _open_alone(world: World, settings: Settings) -> Session:
    from .local import local_sessions  # here: it imports the shared parts of all transports

    if settings.tune is not None and world.rank == 0:
        say(f"there is nothing to tune with {'disable=1' if settings.disable else 'one rank'}")
    elif not settings.disable and world.launcher == "none":
        say(alone_line(os.environ))
    [alone] = local_sessions(1, settings.scheduler)
    alone.disabled = settings.disable
    return alone


class _Opening:
    """Opens the parts of one rank's session, one after another. ``stack`` closes the control server and the witness, and
    removes the rendezvous file."""

    def __init__(self, world: World, settings: Settings, device: str, stack: ExitStack) -> None:
        self._world = world
        self._settings = settings
        self._stack = stack
        self._device = device
        self._published = stack.enter_context(ExitStack())
        self._job = job_name(world, settings, os.environ)
        self._meeting, self._server = self._meet(stack)
        self._host = own_host(settings, self._meeting.address)
        self._transport = settings.transport  # name; the final one is known once the transport is open
        self._hosts = 1  # number of hosts; known once the transport is open

    def _meet(self, stack: ExitStack) -> tuple[Endpoint, ControlServer | None]:
        """The endpoint of the control channel. On rank 0, open its server too."""
        world, settings = self._world, self._settings
        path = rendezvous_path(settings, os.environ)
        if world.rank != 0:
            return find(world, settings, path), None
        from ..control.server import ControlServer

        wanted = where_to_listen(world, settings)
        server = ControlServer(
            wanted.address,
            wanted.token,
            world.world_size,
            fail_after_seconds=settings.fail_after,
            join_within_seconds=settings.join_within,
            job=self._job,
            servers=len(settings.servers),
        )
        stack.callback(server.close)
        meeting = Endpoint(server.address, wanted.token)
        if settings.control is None:
            publish(path, meeting)
            self._published.callback(path.unlink, missing_ok=True)
        return meeting, server

    def open_control(self, listener: Listener) -> Control:
        from ..control.client import ControlClient, Member
        from ..control.witnessed import Witness

        witness = Witness(self._host)
        self._stack.callback(witness.close)
        control = ControlClient(
            self._meeting.address,
            self._meeting.token,
            Member.rank(self._world.rank, self._world.world_size, self._host, witness.address),
            listener,
            fail_after_seconds=self._settings.fail_after,
            join_within_seconds=self._settings.join_within,
            stall_after_seconds=self._settings.stall_after,
            server=self._server,
            job=self._job,
        )
        _tell_joined(self._world, self._settings)
        # All ranks have joined. If this session fails, a rank that opens another one at once must not find this file.
        self._published.close()
        return control

    def open_transport(self, session: Session) -> Transport:
        from ..transports.open import open_named  # here: it imports the shared parts of all transports

        context = TransportContext(
            world=self._world,
            settings=self._settings,
            host=self._host,
            token=self._meeting.token,
            control_address=self._meeting.address,
            gather=session.gather,
            on_failure=session.report,
            when_failed=session.when_failed,
            job=self._job,
            could_not_start=session.could_not_start,
        )
        self._transport = transport_name(self._world, self._settings, self._device, session.gather)
        self._require_effect()
        self._meet_on_network(session)
        session.check_weights = steps_between_comparisons(self._settings, self._world.rank, session.gather)
        if self._settings.tuned is not None:
            self._require_fitting(session)
        return open_named(context, self._transport)

    def _meet_on_network(self, session: Session) -> None:
        """Exchange the addresses of all ranks, check that they can be reached, and advise if there is a faster network."""
        from ..tuner.link import advise_faster, describe_link, faster_networks

        # The addresses of servers are given.
        chooses = load_backend(self._transport).listens_at_host and not self._settings.servers
        faster = faster_networks(self._host) if chooses else {}
        told = session.gather([*reached_at(self._host), faster], "to reach each other")
        ranks = [Reached(*record[:3]) for record in told]
        if chooses:
            require_reachable(ranks)
        self._hosts = len({reached.host for reached in ranks})
        if self._hosts > 1:
            log.info("rank %d is reached at %s (%s)", session.rank, self._host, describe_link(self._host))
        advice = advise_faster(self._host, [record[3] for record in told]) if session.rank == 0 else None
        if advice is not None:
            log.warning("%s", advice)

    def _require_effect(self) -> None:
        """Refuse settings that the chosen transport does not use; if the user did not choose it, only warn of
        those without which the job can go on."""
        for name, problem in without_effect(self._settings, self._transport).items():
            if self._settings.transport != "auto" or name == "collective":  # which core would refuse
                raise ConfigError(problem)
            if self._world.rank == 0:
                log.warning("%s", problem)

    def _require_fitting(self, session: Session) -> None:
        """Refuse settings that were tuned for another job: now, or when the job's tensors are registered."""
        from ..tuner.link import describe_link
        from ..tuner.result import ModelCheck, check_tuned, describe_transport

        settings, tuned = self._settings, self._settings.tuned
        assert tuned is not None
        if session.rank == 0:
            transport = describe_transport(self._transport, settings)
            check_tuned(tuned, session.world_size, self._hosts, transport, describe_link(self._host, settings.rate))
        session.on_register(ModelCheck(tuned, warn=session.rank == 0).on_register)

    def first_lines(self, session: Session, manifest: Manifest) -> list[str]:
        ordered, config = session.transport.ordered, session.core.config
        line = first_line(self._settings, self._transport, ordered, session.world_size, self._hosts, config, manifest)
        more = no_rank_line(self._world, os.environ)
        return [line] if more is None else [line, more]

    def start_tuning(self, session: Session) -> None:
        from ..tuner.online import start_tuning

        try:
            start_tuning(session, self._settings, self._transport, self._host, say)
        except BaseException as error:
            session.abort(f"{type(error).__name__}: {error}")
            raise


#: Advice to users whose ranks opened no session.
NOTHING_MADE = (
    "Does the script make the ScheduledOptimizer, or the object that your engine's guide names? COMMSCHED_DISABLE=1 turns this "
    "line off."
)

#: Launchers and batch systems set these variables to the number of processes that they started or will start.
_SIZES = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_WORLD_SIZE", "SLURM_NTASKS")


def alone_line(environ: Mapping[str, str]) -> str:
    """The line printed by a process that found no launcher's variables saying that it is one of several."""
    line = "1 process, so nothing is averaged; start more with commsched run -n N -- COMMAND, torchrun, mpirun or srun"
    for name in _SIZES:
        size = environ.get(name, "1")
        if size.isdecimal() and int(size) > 1:
            return f"{line} ({name}={size}, but no launcher that commsched knows gave this process a rank)"
    return line


def no_rank_line(world: World, environ: Mapping[str, str]) -> str | None:
    """A warning to scripts that split their data by torchrun's variables. None if the environment or the launcher sets them."""
    if not world.launcher.startswith(("mpi", "srun")) or "RANK" in environ or "WORLD_SIZE" in environ:
        return None
    return (
        f"{world.launcher} sets no RANK and WORLD_SIZE: a script that shares out its data by them reads the same data on every "
        "rank; let it use the rank and world_size of commsched.init()"
    )


def first_line(
    settings: Settings, transport: str, ordered: bool, ranks: int, hosts: int, config: SchedulerConfig, manifest: Manifest
) -> str:
    """The line that describes the job, for the tensors of ``manifest``, cut and ordered by ``config``. ``ordered``: all ranks
    of ``transport`` launch in one order."""
    way = f"{transport} over {settings.lane}" if transport == "ps" else transport
    if settings.servers:
        way += f" with {_count(len(settings.servers), 'server')}"
    parts = [
        f"{_count(ranks, 'rank')} on {_count(hosts, 'host')}",
        way,
        f"{_count(len(manifest.tensors), 'tensor')} of {size(manifest.nbytes)} per step",
        f"partition {size(config.partition_bytes)}",
        f"credit {size(config.credit_bytes)}",
        config.policy,
    ]
    if config.collective != "all_reduce":
        parts.append(config.collective)
    if ordered:
        parts.append(f"{settings.order} order")
    if settings.wire != "none":
        parts.append(f"{settings.wire} on the wire")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class FirstLine:
    """Prints the first lines of a job once, when the first gradients are registered: the tensors are not known earlier."""

    def __init__(self, say: Callable[[str], None], describe: Callable[[Manifest], list[str]]) -> None:
        self._say = say
        self._describe = describe
        self._said = False

    def on_register(self, group: int, manifest: Manifest) -> None:
        """The callback for ``Session.on_register``."""
        if not self._said:
            self._said = True
            for line in self._describe(manifest):
                self._say(line)
