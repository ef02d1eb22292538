"""The composition root: environment -> control channel -> transport -> Core, closed in reverse order."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from .auto import transport_name
from .core import process_exit
from .core.config import SchedulerConfig, Settings
from .core.core import Core
from .core.errors import ClosedError, CommschedError, ConfigError, TransportError
from .core.group import TensorGroup
from .core.manifest import Manifest, TensorSpec, require_equal
from .core.observers import Observers
from .core.plan import cut
from .core.ports import Observer, Sliceable, Transport
from .core.world import World, detect_world
from .first_line import FirstLine, first_line
from .log import say, set_level
from .rendezvous import Meeting, find, own_host, publish, rendezvous_path, where_to_listen
from .trace import TraceObserver
from .transports import require_transport
from .transports.context import TransportContext

if TYPE_CHECKING:
    from .control.server import ControlServer  # which needs gRPC

log = logging.getLogger("commsched")

#: More than the control channel takes to say which failure counts, with or without rank 0.
_VERDICT_SECONDS = 2.0

#: Settings that all ranks must agree on, besides those of the scheduler.
_SAME_ON_ALL_RANKS = ("transport", "lane", "servers", "order", "wire", "hierarchy", "fail_after")


class Control(Protocol):
    """The control channel as a session uses it; see ``control/client.py`` for what each call promises."""

    clock_offset_seconds: float

    def gather(self, tag: str, value: Any) -> list[Any]: ...

    def report(self, error: CommschedError) -> None: ...

    def tell(self, value: Any) -> None: ...

    def announce(self, value: Any) -> None: ...

    def propose(self, config: dict[str, Any]) -> None: ...

    def leave(self) -> None: ...

    def wait_until_all_left(self) -> None: ...

    def close(self) -> None: ...


class Tuner(Protocol):
    """What a session tells who changes its configuration while training runs; see ``tuner/online.py``. Called from a control
    thread; never blocks."""

    def on_switch(self, window: Any, steps: Mapping[int, int]) -> None:
        """All ranks will use what was proposed with ``window`` from ``steps[group]`` of each group on; none has begun them."""
        ...

    def on_told(self, rank: int, value: Any) -> None:
        """For rank 0: what ``rank`` passed to :meth:`Session.tell_tuner`."""
        ...

    def on_leave(self, rank: int) -> None:
        """``rank``, another one, has begun its last step."""
        ...

    def close(self, wait: bool) -> None:
        """The session closes: propose nothing more. From the thread that closes it. ``wait``: it has time, a few seconds, for
        what is under way."""
        ...


class Session:
    """One rank's membership in a job. Plugins get it from :func:`init`; ``core``, ``rank`` and ``world_size`` are public.

    ``register``, ``broadcast``, ``gather`` and ``close`` are collective: every rank calls them, in the same order, from one
    engine thread.
    """

    def __init__(
        self,
        world: World,
        config: SchedulerConfig,
        *,
        open_control: Callable[[Session], Control],
        open_transport: Callable[[Session], Transport],
        order: str = "agreed",
        same_on_all_ranks: Mapping[str, Any] | None = None,
        trace_directory: str | None = None,
        warn_after_seconds: float = 10.0,
    ) -> None:
        self.rank = world.rank
        self.world_size = world.world_size
        self._failure: CommschedError | None = None
        self._when_failed: list[Callable[[CommschedError], None]] = []
        self._failing = threading.Lock()
        self._core: Core | None = None
        self._early: list[Callable[[Core], None]] = []  # what other ranks, that have opened, want of the core to come
        self._opening = threading.Lock()  # guards both
        self._transport: Transport | None = None
        self._gathers = 0
        self._close_callbacks: list[Callable[[], None]] = []
        self._register_callbacks: list[Callable[[int, Manifest], None]] = []
        self._tuner: Tuner | None = None
        self.closed = False
        self.disabled = False  # ``disable=1``: there may be other ranks, of which this session is not to know
        self.cleanup = ExitStack()  # closed last: what was opened before the session
        self._pid = os.getpid()
        self._control = open_control(self)
        self.observer: TraceObserver | None = None
        self._observers: tuple[Observer, ...] = ()
        try:
            self._require_same({**(same_on_all_ranks or {}), **config.to_record()})
            if trace_directory is not None:
                self.observer = TraceObserver(trace_directory, self.rank, self._control.clock_offset_seconds)
                self._observers = (self.observer,)
            self._transport = open_transport(self)
            core = Core(
                self._transport,
                config,
                observer=self.observer,
                on_failure=self.report,
                warn_after_seconds=warn_after_seconds,
                messenger=self._control,
                order=order,
            )
            self._use(core)
            if self._failure is not None:
                core.fail(self._failure)
        except BaseException as error:
            ours = TransportError(f"rank {self.rank} could not start: {error}")
            self._report_and_wait(ours)
            self._tear_down()
            if isinstance(error, TransportError) and self._failure is not None and str(self._failure) != str(ours):
                raise self._failure from error  # of another rank, which then closed its connections
            raise

    @property
    def core(self) -> Core:
        """The scheduler of this rank.

        Raises:
            ClosedError: the session is closed.
        """
        if self.closed or self._core is None:
            raise ClosedError("this session is closed")
        return self._core

    @property
    def transport(self) -> Transport:
        """What this rank's gradients travel by.

        Raises:
            ClosedError: the session is closed.
        """
        if self.closed or self._transport is None:
            raise ClosedError("this session is closed")
        return self._transport

    @property
    def device(self) -> str:
        """Where the flat buffers given to :meth:`register` must lie: "cpu", or a device as PyTorch names it."""
        return str(getattr(self.transport, "device", "cpu"))

    # --- what plugins use ---

    def gather(self, value: Any) -> list[Any]:
        """The JSON value of every rank, in rank order. Small things only; blocks until every rank has called.

        Raises:
            CommschedError: a rank failed, left or was lost meanwhile; or the session is closed.
        """
        if self.closed:
            raise ClosedError("this session is closed")
        self._gathers += 1
        return self._control.gather(f"gather {self._gathers}", value)

    def register(self, manifest: Manifest, buffers: Mapping[str, Sliceable]) -> TensorGroup:
        """Announce tensors, in forward order, and the flat buffer of each dtype (bytes, writable, on :attr:`device`).

        Raises:
            ManifestMismatch: ranks disagree; names the tensor and both values, on every rank, before any data moves.
        """
        return self._register(manifest, buffers, self._register_callbacks)

    def _register(
        self, manifest: Manifest, buffers: Mapping[str, Sliceable], callbacks: Sequence[Callable[[int, Manifest], None]] = ()
    ) -> TensorGroup:
        # Ranks may be at different steps of other groups when the configuration changes: rank 0's counts for all.
        config = self.core.config
        sizes = {"partition_bytes": config.partition_bytes, "fusion_bytes": config.fusion_bytes}
        records = self.gather({"manifest": manifest.to_record(), "sizes": sizes, "policy": config.policy})
        require_equal([Manifest.from_record(record["manifest"]) for record in records])
        plan = cut(manifest, **records[0]["sizes"])
        for callback in callbacks:
            callback(self.core.group_count, manifest)
        if self.observer is not None:
            self.observer.add_group(self.core.group_count, manifest)
        return self.core.add_group(plan, buffers, records[0]["policy"])

    def broadcast(self, name: str, data: Sliceable, root: int = 0) -> None:
        """Replace ``data`` on every rank by that of ``root``, bit for bit, whatever type it holds.

        ``data`` is a ``memoryview`` of format ``B``; or uint8 on another :attr:`device`, then complete there, and zeros already
        on every other rank. It is a sum to which every other rank contributes zero bytes, so it needs nothing of a transport
        but its sum.

        Raises:
            ManifestMismatch: the sizes differ between ranks.
        """
        if len(data) == 0:
            self.gather(name)
            return
        if self.rank != root and isinstance(data, memoryview):
            data[:] = bytes(len(data))
        group = self._register(Manifest((TensorSpec(name, (len(data),), "uint8"),)), {"uint8": data})
        group.begin_step()
        group.notify_ready(0)
        group.proxies[0].wait()
        group.release()

    def reconfigure(self, config: SchedulerConfig, window: Any = None) -> None:
        """Ask for another partition, credit or policy; all ranks switch at one agreed step. Returns before that.

        Meant for rank 0 (a tuner); ``window`` is passed on to every rank's ``Tuner.on_switch``. Never blocks on other ranks.

        Raises:
            UnsupportedError: the transport cannot do it.
            CommschedError: the job failed, or the session is closed.
        """
        self.core.require_supported(config)
        self._control.propose({**config.to_record(), **({} if window is None else {"window": window})})

    def use_tuner(self, tuner: Tuner) -> None:
        """Have ``tuner`` told of what concerns it. Once, by whoever opens the session, on every rank."""
        self._tuner = tuner

    def tell_tuner(self, value: Any) -> None:
        """Send the JSON ``value`` to the tuner of rank 0. Any thread; never blocks; what one rank tells arrives in order.

        Raises:
            CommschedError: the job failed, or the session is closed.
        """
        if self.rank == 0:
            self.on_told(0, {"tuner": value})
        else:
            self._control.tell({"tuner": value})

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` first when the session closes in good order: to put last updates in place. What is returned takes
        that back."""
        self._close_callbacks.append(callback)
        return lambda: self._close_callbacks.remove(callback)

    def on_register(self, callback: Callable[[int, Manifest], None]) -> None:
        """Call ``callback`` with the index and the tensors of each group that :meth:`register` is about to add, once all ranks
        agree on them. What it raises ends the registration; it must raise it on every rank."""
        self._register_callbacks.append(callback)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Have ``observer`` told of tasks and steps, beside those that are already. What is returned takes that back."""
        core = self.core
        self._observers = (*self._observers, observer)
        core.observer = Observers(*self._observers)

        def forget() -> None:
            self._observers = tuple(each for each in self._observers if each is not observer)
            core.observer = Observers(*self._observers)  # of none too: threads may be about to call what they find

        return forget

    def when_failed(self, callback: Callable[[CommschedError], None]) -> None:
        """Call ``callback`` once with the first failure, from a control thread; at once if there was one."""
        with self._failing:
            failure = self._failure
            if failure is None:
                self._when_failed.append(callback)
        if failure is not None:
            callback(failure)

    def report(self, error: CommschedError) -> None:
        """Tell every rank of a failure here. The verdict, which names the first cause, comes back to ``on_failure``."""
        self._control.report(error)

    # --- what the control channel calls ---

    def on_failure(self, error: CommschedError) -> None:
        with self._failing:
            self._failure = self._failure or error
            callbacks, self._when_failed = self._when_failed, []
        for callback in callbacks:
            callback(self._failure)
        if self._core is not None:
            self._core.fail(error)

    def on_leave(self, rank: int) -> None:
        if (tuner := self._tuner) is not None:
            tuner.on_leave(rank)
        self._on_core(lambda core: core.leave(rank))

    def on_told(self, rank: int, value: Any) -> None:
        if "tuner" in value:
            if (tuner := self._tuner) is not None:
                tuner.on_told(rank, value["tuner"])
            return
        self._on_core(lambda core: core.on_told(rank, value))

    def on_announced(self, value: Any) -> None:
        self._on_core(lambda core: core.on_announced(value))

    def on_end(self) -> None:
        """For servers; a rank waits for it in ``close``."""

    def hold_steps(self) -> dict[int, int]:
        return self._core.hold_steps() if self._core is not None else {}

    def switch_at(self, config: dict[str, Any], steps: dict[int, int]) -> None:
        window = config.pop("window", None)
        if window is not None and (tuner := self._tuner) is not None:
            tuner.on_switch(window, steps)
        self._on_core(lambda core: core.switch_at(SchedulerConfig(**config) if config else None, steps))

    def _on_core(self, call: Callable[[Core], None]) -> None:
        """Call, or have called when the core is there; in order, since one control thread does all this."""
        with self._opening:
            if self._core is None:
                self._early.append(call)
                return
        call(self._core)

    def _use(self, core: Core) -> None:
        with self._opening:
            for call in self._early:
                call(core)
            self._early.clear()
            self._core = core

    # --- end ---

    def close(self) -> None:
        """Finish what is in flight, wait until every rank has closed too, and give everything back. Idempotent.

        Raises:
            CommschedError: a rank failed before the last averages were in place.
        """
        if self.closed or os.getpid() != self._pid:
            return
        graceful = False
        try:
            self._stop_tuner(wait=True)
            for callback in self._close_callbacks:
                callback()
            self.core.drain()
            self.core.farewell()
            if self.observer is not None:
                self.observer.close()  # every rank's file is written before the last has left
            self._control.leave()
            self._control.wait_until_all_left()
            graceful = True
            if self.observer is not None and self.rank == 0:
                self.observer.merge()
        finally:
            self._tear_down(graceful)

    def abort(self, reason: str) -> None:
        """End at once and tell every rank why. Idempotent; raises nothing."""
        if self.closed or os.getpid() != self._pid:
            return
        if self._failure is None:
            self._report_and_wait(TransportError(f"rank {self.rank} ended: {reason}"))
        self._tear_down()

    def _report_and_wait(self, error: CommschedError) -> None:
        """Return when the job knows: else others might hear of our closed connections first, and take them for the cause."""
        decided = threading.Event()
        self.when_failed(lambda _: decided.set())
        self.report(error)
        decided.wait(_VERDICT_SECONDS)

    def _tear_down(self, graceful: bool = False) -> None:
        self.closed = True
        self._stop_tuner(wait=False)
        if self._core is not None:
            self._core.close()
        if self._transport is not None:
            self._transport.close(graceful)
        self._control.close()
        if self.observer is not None:
            self.observer.close()
        self.cleanup.close()

    def _stop_tuner(self, wait: bool) -> None:
        tuner, self._tuner = self._tuner, None
        if tuner is not None:
            tuner.close(wait)

    def _require_same(self, settings: Mapping[str, Any]) -> None:
        records = self.gather(settings)
        for rank, record in enumerate(records):
            for key, value in record.items():
                if value != records[0][key]:
                    raise ConfigError(f"{key} is {records[0][key]} on rank 0 but {value} on rank {rank}; give all the same")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self.abort(_describe(error))

    def __repr__(self) -> str:
        return f"<Session rank {self.rank} of {self.world_size}{' closed' if self.closed else ''}>"


# --- the session of this process ---

_lock = threading.Lock()
_current: Session | None = None


def init(*, device: str = "cpu", world: World | None = None, **settings: Any) -> Session:
    """The session of this process; the first call joins the job and waits until every rank has.

    Rank and world size come from what launched the process (commsched run, torchrun, mpirun, srun). With one rank, or with
    ``disable``, a session that needs no network. ``settings`` are the fields of ``core.config.Settings``; each may also come
    from ``COMMSCHED_<NAME>`` or a TOML file named by ``COMMSCHED_CONFIG``. ``device``: where the gradients lie ("cpu", or as
    PyTorch names it), for ``transport=auto``; plugins say it. ``world``: from plugins of engines that start ranks themselves.

    Raises:
        ConfigError: a setting is wrong or differs between ranks, settings are given after the session was opened, or ``world``
            is not what ``commsched run`` made.
        PeerTimeout: not every rank joined in time; names those missing.
    """
    global _current
    with _lock:
        if _current is not None and not _current.closed:
            given = [*(["world"] if world is not None else []), *settings]
            if given:
                raise ConfigError(f"commsched is already initialised; give {', '.join(given)} at the first call of init")
            return _current
        world = detect_world(os.environ) if world is None else _agreed_with_launcher(world)
        _current = open_session(world, Settings.load(settings, os.environ), device)
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        return _current


def require_world_size(world_size: int, who: str) -> None:
    """For plugins of libraries that count ranks by themselves, before they use that number.

    Raises:
        ConfigError: ``commsched run`` has started another number of ranks than ``who`` says there are.
    """
    if "COMMSCHED_RANK" in os.environ and (launched := detect_world(os.environ)).world_size != world_size:
        raise ConfigError(
            f"{launched.launcher} started {launched.world_size} ranks, but {who} makes {world_size}; let them agree"
        )


def _agreed_with_launcher(world: World) -> World:
    """``world``, unless ``commsched run`` has started this process, or one that started it, as another rank."""
    if "COMMSCHED_RANK" in os.environ:
        launched = detect_world(os.environ)
        if (launched.rank, launched.world_size) != (world.rank, world.world_size):
            raise ConfigError(
                f"{launched.launcher} says that this is rank {launched.rank} of {launched.world_size}, but {world.launcher} "
                f"that it is rank {world.rank} of {world.world_size}; let one of them start the ranks"
            )
    return world


def shutdown() -> None:
    """Close the session of this process, if there is one; see ``Session.close``."""
    global _current
    with _lock:
        session, _current = _current, None
    if session is not None:
        session.close()


def local_sessions(
    world_size: int,
    config: SchedulerConfig | None = None,
    *,
    open_transport: Callable[[int, Session], Transport] | None = None,
    wrap_transport: Callable[[Transport], Transport] | None = None,
    order: str = "agreed",
) -> list[Session]:
    """One session per rank, all in this process: each is to be used, and closed, by a thread of its own.

    ``open_transport(rank, session)``, in a thread per rank, gives another transport than the local one; ``wrap_transport`` one
    around it.
    """
    from .control.local import LocalControlWorld
    from .transports.local import LocalWorld

    controls, transports = LocalControlWorld(world_size), LocalWorld(world_size)

    def open_local(rank: int, session: Session) -> Transport:
        return transports.transport(rank, session.report)

    def open_rank(rank: int) -> Session:
        def open_and_wrap(session: Session) -> Transport:
            transport = (open_transport or open_local)(rank, session)
            return wrap_transport(transport) if wrap_transport is not None else transport

        return Session(
            World(rank, world_size, rank, world_size, "threads"),
            config or SchedulerConfig(),
            open_control=lambda session: controls.join(rank, session),
            open_transport=open_and_wrap,
            order=order,
        )

    with ThreadPoolExecutor(world_size) as pool:  # opening is collective
        return list(pool.map(open_rank, range(world_size)))


def open_session(world: World, settings: Settings, device: str = "cpu") -> Session:
    """A session besides that of this process, which :func:`init` opens; it has a control channel of its own. Collective.

    Raises:
        ConfigError, PeerTimeout: see ``init``.
    """
    require_transport(settings.transport)
    if settings.log is not None:
        set_level(settings.log)
    if world.world_size == 1 or settings.disable:
        if settings.tune is not None and world.rank == 0:
            say(f"there is nothing to tune with {'disable=1' if settings.disable else 'one rank'}")
        alone = local_sessions(1, settings.scheduler)[0]
        alone.disabled = settings.disable
        return alone
    quiet_grpc()
    with ExitStack() as stack:
        withdraw = stack.enter_context(ExitStack())
        meeting, server = _meet(world, settings, stack, withdraw)
        host = own_host(world, settings, meeting.address)
        transport, hosts = settings.transport, 1

        def open_control(session: Session) -> Control:
            from .control.client import ControlClient, Member

            member = Member.rank(world.rank, world.world_size, host)
            control = ControlClient(
                meeting.address,
                meeting.token,
                member,
                session,
                fail_after_seconds=settings.fail_after,
                join_within_seconds=settings.join_within,
                server=server,
            )
            withdraw.close()  # all have joined: a rank that opens another session soon, as this one failed, is not to find it
            return control

        def open_transport(session: Session) -> Transport:
            context = TransportContext(
                world=world,
                settings=settings,
                host=host,
                token=meeting.token,
                control_address=meeting.address,
                gather=session.gather,
                on_failure=session.report,
                when_failed=session.when_failed,
            )
            from .transports.opening import open_named  # with the shared parts of all transports: not for one rank alone

            nonlocal transport, hosts
            transport = transport_name(world, settings, device, session.gather)
            hosts = len(set(session.gather(host)))
            if settings.tuned is not None:
                _require_fitting(session, settings, settings.tuned, transport, host, hosts)
            return open_named(context, transport)

        session = Session(
            world,
            settings.scheduler,
            open_control=open_control,
            open_transport=open_transport,
            order=settings.order,
            same_on_all_ranks={
                **{name: getattr(settings, name) for name in _SAME_ON_ALL_RANKS},
                "tune": str(settings.tune),
                "whether there is a tuned file": settings.tuned is not None,
            },
            trace_directory=settings.trace,
            warn_after_seconds=settings.fail_after,
        )
        session.cleanup = stack.pop_all()
    if world.rank == 0:

        def describe(manifest: Manifest) -> str:
            ordered, config = session.transport.ordered, session.core.config
            return first_line(settings, transport, ordered, world.world_size, hosts, config, manifest)

        session.on_register(FirstLine(say, describe).on_register)
    if settings.tune is not None:
        from .transports.host.leader import LeaderTransport
        from .tuner.online import start_tuning

        try:
            start_tuning(session, settings, transport, host, say, leads_host=isinstance(session.transport, LeaderTransport))
        except BaseException as error:
            session.abort(_describe(error))
            raise
    return session


def _require_fitting(
    session: Session, settings: Settings, tuned: Mapping[str, Any], transport: str, host: str, hosts: int
) -> None:
    """Refuse settings that were tuned for another job: now, or when its tensors are registered."""
    from .tuner.link import describe_link
    from .tuner.tuned import ModelCheck, check_tuned, describe_transport

    if session.rank == 0:
        transport = describe_transport(transport, settings)
        check_tuned(tuned, session.world_size, hosts, transport, describe_link(host, settings.rate))
    session.on_register(ModelCheck(tuned, warn=session.rank == 0).on_register)


def quiet_grpc() -> None:
    """Before gRPC is imported: it would log to stderr what we report as errors of our own."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _meet(world: World, settings: Settings, stack: ExitStack, withdraw: ExitStack) -> tuple[Meeting, ControlServer | None]:
    """Where the control channel is; on rank 0, open its server. ``stack`` closes it, ``withdraw`` what was published."""
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
        withdraw.callback(path.unlink, missing_ok=True)
    return meeting, server


def _at_exit() -> None:
    """The last drain, without being told the number of steps. An exception that ends this rank is told to all."""
    session = _current
    if session is None or session.closed:
        return
    ended_by = getattr(sys, "last_value", None)  # set by the interpreter when it printed an unhandled exception
    if ended_by is not None:
        session.abort(_describe(ended_by))
        return
    try:
        session.close()
    except Exception as error:
        # The training script believes that all went well; the launcher must not. An atexit handler cannot change the exit
        # code in any other way.
        log.error("rank %d: %s: %s", session.rank, type(error).__name__, error)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        process_exit.leave(1)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
