"""The composition root: settings, control channel, transport and session, put together in this order."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..control.end import ControlEnd
from ..control.rendezvous import (
    Endpoint,
    Reached,
    find,
    job_name,
    own_host,
    publish,
    reached_at,
    read_token,
    rendezvous_path,
    require_reachable,
    require_strong_on,
    where_to_listen,
)
from ..control.torchrun import open_torchrun_store, store_place
from ..core.comparison import require_same
from ..core.core import Core
from ..core.errors import ConfigError, error_text
from ..core.interfaces import OnFailure
from ..core.manifest import Manifest
from ..core.world import World
from ..devices import model_of
from ..net.tls import identity_of
from ..settings import Settings, SettingsKeywords
from ..transports import load_backend, require_transport, without_effect
from ..transports.backend import TransportContext
from ..transports.open import open_named, transport_name
from ..tuner.link import advise_faster, describe_link, faster_networks
from ..tuner.result import ModelCheck, check_tuned, describe_transport
from ..version import __version__
from .log import FirstLine, alone_line, first_line, no_rank_line, say, say_whose_warnings, set_level
from .metrics import require_library, serve_metrics
from .process_end import tell_launcher
from .session import Session, could_not_start, starting
from .trace import TraceObserver

if TYPE_CHECKING:
    from ..control.server import ControlServer  # which needs gRPC

log = logging.getLogger("commsched")

_CPUINFO = Path("/proc/cpuinfo")
#: Libraries choose their kernels by these fields. Others, such as the clock rate, do not change a result.
_CHOOSES_KERNELS = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU architecture", "CPU part", "Features")

_opened = False


class MeetingPlace(Protocol):
    """A place where ranks find rank 0."""

    def where_to_listen(self) -> Endpoint:
        """On rank 0: the address to bind, and the token."""

    def offered(self, endpoint: Endpoint, world_size: int, /) -> AbstractContextManager[None]:
        """On rank 0: within the block, tell the other ranks the endpoint."""

    def find(self, rank: int, /) -> Endpoint:
        """On another rank: find rank 0's endpoint."""


def open_session(
    world: World,
    settings: Settings,
    device: str = "cpu",
    meeting: MeetingPlace | None = None,
    when_lost: Callable[[OnFailure], object] = lambda lost: None,
) -> Session:
    """Open a session with a control channel of its own, independent of the session of ``commsched.init``. Collective.

    Args:
        meeting: where the ranks find each other; None: as the settings and the launcher say.
        when_lost: called once, with a function that ends the session with an error, from any thread, or lets its opening fail.

    Raises:
        ConfigError, PeerTimeout: see ``commsched.init``.
    """
    global _opened
    require_transport(settings.transport)
    if settings.metrics is not None:
        require_library()
    say_whose_warnings()
    if settings.log is not None:
        set_level(settings.log)
    _opened = True
    if world.world_size == 1 or settings.disable:
        _tell_joined(world, settings)
        return _open_alone(world, settings)
    quiet_grpc()
    return _open_joined(world, settings, device, meeting, when_lost)


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
    if settings.record is not None and world.world_size == 1 and not settings.disable:
        from .recording import start_recording  # here: it imports the simulator's dependencies

        start_recording(alone, Path(settings.record))
    return alone


def _open_joined(
    world: World,
    settings: Settings,
    device: str,
    meeting: MeetingPlace | None,
    when_lost: Callable[[OnFailure], object],
) -> Session:
    """Open the session of one of several ranks, part after part."""
    if (token := read_token(settings)) is not None:
        require_strong_on(settings.hosts, token, settings.text_of("host"))
    job = job_name(world, settings, os.environ)
    with ExitStack() as around:  # what outlives the session's other parts: the control server and the witness
        published = around.enter_context(ExitStack())
        endpoint, server = _meet(world, settings, job, meeting, around, published)
        host = own_host(settings, endpoint.address)
        control = _join(world, settings, job, endpoint, server, host, when_lost, around)
        with starting(control) as undo:
            _tell_joined(world, settings)
            # All ranks have joined. If this session fails, a rank that opens another one at once must not find this file.
            published.close()
            _require_same_settings(control, settings)
            trace = None
            if settings.trace is not None:
                trace = TraceObserver(settings.trace, world.rank, control.clock_offset_seconds, steps=settings.trace_steps)
                undo.callback(trace.close)
            name = transport_name(world, settings, device, control.gather_next)
            _require_effect(settings, name, world.rank)
            hosts = _meet_on_network(control, settings, name, host)
            if trace is not None:
                trace.about = _about(world, settings, name, hosts)
            check_weights = steps_between_comparisons(settings, world.rank, control.gather_next, device)
            if settings.tuned is not None and world.rank == 0:
                # The tensors are checked when they are registered.
                described = describe_transport(name, settings), describe_link(host, settings.rate)
                check_tuned(settings.tuned, world.world_size, hosts, *described)
            context = TransportContext(
                world=world,
                settings=settings,
                host=host,
                token=endpoint.token,
                control_address=endpoint.address,
                gather=control.gather_next,
                on_failure=control.report,
                when_failed=control.when_failed,
                job=job,
                device=device,
                could_not_start=partial(could_not_start, control),
            )
            transport = open_named(context, name)
            undo.callback(transport.close, graceful=False)
            config = settings.scheduler if transport.ordered else replace(settings.scheduler, order="agreed")
            core = Core(
                transport,
                config,
                observer=trace,
                on_failure=control.report,
                warn_after_seconds=settings.fail_after,
                stall_after_seconds=settings.stall_after,
                messenger=control,
            )
            undo.callback(core.close)
            session = Session(control, transport, core, trace=trace, check_weights=check_weights)
        session.cleanup.enter_context(around.pop_all())
    try:
        if settings.metrics is not None:
            session.cleanup.callback(serve_metrics(settings.metrics, world.local_rank, session.stats))
        if settings.tuned is not None:
            session.on_register(ModelCheck(settings.tuned, warn=world.rank == 0).on_register)
        if world.rank == 0:
            session.on_register(FirstLine(say, partial(_first_lines, session, world, settings, name, hosts)).on_register)
        _start_tuner(session, settings, name, host, hosts)
    except BaseException as error:
        session.abort(error_text(error))
        raise
    return session


def _meet(
    world: World, settings: Settings, job: str, meeting: MeetingPlace | None, around: ExitStack, published: ExitStack
) -> tuple[Endpoint, ControlServer | None]:
    """The endpoint of the control channel. On rank 0, open its server too, and publish where it listens."""
    path = rendezvous_path(settings, os.environ)
    place = store_place(world, settings, os.environ) if meeting is None else None
    if place is not None:
        meeting = open_torchrun_store(place, settings)
    if world.rank != 0:
        return find(world, settings, path) if meeting is None else meeting.find(world.rank), None
    from ..control.server import ControlServer

    wanted = where_to_listen(world, settings) if meeting is None else meeting.where_to_listen()
    server = ControlServer(
        wanted.address,
        wanted.token,
        world.world_size,
        fail_after_seconds=settings.fail_after,
        join_within_seconds=settings.join_within,
        job=job,
        servers=len(settings.servers),
        identity=identity_of(settings.security, wanted.token, settings.certificates),
    )
    around.callback(server.close)
    endpoint = Endpoint(server.address, wanted.token)
    if meeting is not None:
        published.enter_context(meeting.offered(endpoint, world.world_size))
    elif settings.control is None:
        publish(path, endpoint)
        published.callback(path.unlink, missing_ok=True)
    return endpoint, server


def _join(
    world: World,
    settings: Settings,
    job: str,
    endpoint: Endpoint,
    server: ControlServer | None,
    host: str,
    when_lost: Callable[[OnFailure], object],
    around: ExitStack,
) -> ControlEnd:
    from ..control.client import ControlClient
    from ..control.messages import Member
    from ..control.witnessed import Witness

    witness = Witness(host)
    around.callback(witness.close)
    return ControlClient(
        endpoint.address,
        endpoint.token,
        Member.rank(world.rank, world.world_size, host, witness.address),
        fail_after_seconds=settings.fail_after,
        join_within_seconds=settings.join_within,
        stall_after_seconds=settings.stall_after,
        server=server,
        job=job,
        identity=None if server is not None else identity_of(settings.security, endpoint.token, settings.certificates),
        when_lost=when_lost,
    )


def _require_same_settings(control: ControlEnd, settings: Settings) -> None:
    """Refuse settings that differ between ranks."""
    same = {name: getattr(settings, name) for name in Settings.names("same_on_all_ranks")}
    # The names that users write: partition, not partition_bytes.
    schedule = {name.removesuffix("_bytes"): value for name, value in settings.scheduler.to_record().items()}
    schedule |= {name: "auto" for name in ("partition", "credit") if getattr(settings, name) is None}
    tuning = {"tune": str(settings.tune), "whether there is a tuned file": settings.tuned is not None}
    records = control.gather_next({**tuning, **schedule, **same})
    require_same(records, lambda first: f"{first.key} is {first.text()}; give all the same", ConfigError)


def _require_effect(settings: Settings, transport: str, rank: int) -> None:
    """Refuse settings that the chosen transport does not use; if the user did not choose it, only warn of those without which
    the job can go on."""
    for name, problem in without_effect(settings, transport).items():
        if settings.transport != "auto" or name == "collective":  # which core would refuse
            raise ConfigError(problem)
        if rank == 0:
            log.warning("%s", problem)


def _meet_on_network(control: ControlEnd, settings: Settings, transport: str, host: str) -> int:
    """Exchange the addresses of all ranks, check that they can be reached, and advise if there is a faster network. Returns the
    number of hosts."""
    # The addresses of servers are given.
    chooses = load_backend(transport).listens_at_host and not settings.servers
    faster = faster_networks(host) if chooses else {}
    own = [reached_at(each) for each in (host, *settings.hosts[1:])]
    worst = next((each for each in own if each.loopback), own[0])
    told = control.gather_next([*worst, faster, host], "to reach each other")
    if chooses:
        require_reachable([Reached(*record[:3]) for record in told])
    hosts = len({record[4] for record in told})
    if hosts > 1:
        log.info("rank %d is reached at %s (%s)", control.rank, host, describe_link(host))
    advice = advise_faster(host, [record[3] for record in told]) if control.rank == 0 else None
    if advice is not None:
        log.warning("%s", advice)
    return hosts


def processor_kind() -> str:
    """A digest of the first processor's description. It is equal on machines that compute alike."""
    try:
        first = _CPUINFO.read_text().split("\n\n", 1)[0]
    except OSError:
        return platform.processor()
    fields = dict(line.split(":", 1) for line in first.replace("\t", "").splitlines() if ":" in line)
    return hashlib.sha256(repr([fields.get(name) for name in _CHOOSES_KERNELS]).encode()).hexdigest()[:16]


def steps_between_comparisons(settings: Settings, rank: int, gather: Callable[[Any], list[Any]], device: str = "cpu") -> int:
    """The value of ``check_weights`` for all ranks: 0 if processors, or the models of their ``device``, differ, unless the user
    has set it. Collective.

    Weights are compared bit by bit, so ranks that round differently would end a job that trains well.
    """
    kinds = gather([processor_kind(), device.partition(":")[0], model_of(device)])
    unlike = next((other for other, kind in enumerate(kinds) if kind != kinds[0]), None)
    if unlike is None or not settings.check_weights or "check_weights" in settings.given:
        return settings.check_weights
    if rank == 0:
        log.warning(
            "weights are not compared between ranks, since the processors or devices of ranks 0 and %d are of different kinds "
            "and may round updates differently; check_weights=%d compares them all the same",
            unlike,
            settings.check_weights,
        )
    return 0


def _about(world: World, settings: Settings, transport: str, hosts: int) -> dict[str, Any]:
    """The facts that a timeline gives of its job. The settings are those that a user gives, without a launcher's."""
    given = sorted(settings.given & SettingsKeywords.__annotations__.keys() - {"token", "rendezvous"})
    return {
        "commsched": __version__,
        "ranks": world.world_size,
        "hosts": hosts,
        "transport": transport,
        "settings": ", ".join(settings.text_of(name) for name in given),
        "host": platform.node(),
        "python": platform.python_version(),
    }


def _first_lines(
    session: Session, world: World, settings: Settings, transport: str, hosts: int, manifest: Manifest
) -> list[str]:
    ordered, config = session.transport.ordered, session.core.config
    one_per_host = session.transport.one_per_host
    may_be_static = session.transport.channels > 1 and not (one_per_host and hosts == 1)
    line = first_line(settings, transport, ordered, session.world_size, hosts, config, manifest, one_per_host, may_be_static)
    more = no_rank_line(world, os.environ)
    return [line] if more is None else [line, more]


def _start_tuner(session: Session, settings: Settings, transport: str, host: str, hosts: int) -> None:
    from . import tuning  # here: it imports the simulator's dependencies

    job = tuning.facts_of(session, settings, transport, host, hosts)
    if chooses := tuning.chooses(settings, job):
        tuning.start_choosing(session, settings, job, say)
    if settings.tune is not None:
        tuning.start_tuning(session, settings, job, say)
    elif session.rank == 0 and (job.workers < 2 or not chooses):
        tuning.start_assessing(session, settings, job, say)
