"""One rank's membership in a job, as plugins see it, and how it ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from .control.listener import Listener
from .core.buffers import require_buffer, require_buffers
from .core.config import SchedulerConfig
from .core.core import Core
from .core.errors import ClosedError, CommschedError, ConfigError, TransportError
from .core.group import TensorGroup
from .core.manifest import Manifest, TensorSpec, require_equal
from .core.observers import Observers
from .core.plan import Plan, cut
from .core.ports import Messenger, Observer, Sliceable, Transport
from .core.world import World
from .session_listener import SessionListener, Tuner
from .trace import TraceObserver

#: More than the control channel takes to say which failure counts, with or without rank 0.
_VERDICT_SECONDS = 3.0


class Control(Messenger, Protocol):
    """The control channel as a session uses it; see ``control/client.py`` for what each call promises."""

    clock_offset_seconds: float

    def gather(self, tag: str, value: Any) -> list[Any]: ...
    def report(self, error: CommschedError) -> None: ...
    def leave(self) -> None: ...
    def wait_until_all_left(self) -> None: ...
    def close(self) -> None: ...


class Session:
    """One rank's membership in a job. Plugins get it from ``commsched.init``.

    ``register``, ``broadcast``, ``gather`` and ``close`` are collective: every rank calls them, in the same order, from one
    engine thread. A rank on which one of them raises before the others are told so (a wrong argument, an exception in a
    callback) keeps them waiting until it closes: let the exception end the training, or the ``with`` block of the session.

    ``world_size`` is 1 for a process that is alone, and with ``disable``, where there may be other ranks, of which this session
    is not to know: then ``disabled`` is true, and a plugin leaves all as it is in the engine. ``observer`` is where a plugin
    tells what its engine does (``on_span``), for the timeline; None: nobody wants to know. ``cleanup`` is closed last, however
    the session ends: for threads of a plugin.
    """

    def __init__(
        self,
        world: World,
        config: SchedulerConfig,
        *,
        open_control: Callable[[Listener], Control],
        open_transport: Callable[[Session], Transport],
        order: str = "agreed",
        same_on_all_ranks: Mapping[str, Any] | None = None,
        trace_directory: str | None = None,
        warn_after_seconds: float = 10.0,
    ) -> None:
        self.rank = world.rank
        self.world_size = world.world_size
        self._core: Core | None = None
        self._transport: Transport | None = None
        self._gathers = 0
        self._close_callbacks: list[Callable[[], None]] = []
        self._register_callbacks: list[Callable[[int, Manifest], None]] = []
        self.closed = False
        self.disabled = False
        self.cleanup = ExitStack()
        self._pid = os.getpid()
        self._listener = SessionListener()
        self._control = open_control(self._listener)
        self.observer: TraceObserver | None = None
        self._observers: tuple[Observer, ...] = ()
        try:
            self._require_same({**(same_on_all_ranks or {}), **config.to_record()})
            if trace_directory is not None:
                self.observer = TraceObserver(trace_directory, self.rank, self._control.clock_offset_seconds)
                self._observers = (self.observer,)
            self._transport = open_transport(self)
            self._core = Core(
                self._transport,
                config,
                observer=self.observer,
                on_failure=self.report,
                warn_after_seconds=warn_after_seconds,
                messenger=self._control,
                order=order,
            )
            self._listener.use(self._core)
        except BaseException as error:
            ours = TransportError(f"rank {self.rank} could not start: {error}")
            self._report_and_wait(ours)
            self._tear_down()
            failure = self._listener.failure
            if isinstance(error, TransportError) and failure is not None and str(failure) != str(ours):
                raise failure from error  # of another rank, which then closed its connections
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
        """The value of every rank, in rank order; blocks until every rank has called. Collective.

        Small JSON values only: tuples come back as lists, keys as strings, and numbers of numpy are refused.

        Raises:
            TypeError: ``value`` cannot be written as JSON; on this rank only.
            UnsupportedError: it is longer than the control channel takes; on this rank only.
            CommschedError: a rank failed, left or was lost meanwhile; or the session is closed.
        """
        if self.closed:
            raise ClosedError("this session is closed")
        self._gathers += 1
        return self._control.gather(f"gather {self._gathers}", value)

    def register(self, manifest: Manifest, buffers: Mapping[str, Sliceable]) -> TensorGroup:
        """Announce tensors, in forward order, and the flat buffer of each dtype: ``manifest.buffer_bytes[dtype]`` writable
        bytes on :attr:`device`, in the host's memory a ``memoryview`` of format ``B``. Collective; moves no data.

        The buffers belong to the session until ``release`` of the group that is returned, so the engine must neither move nor
        free them. A tensor's place in one is where its gradient is to be written, and where the average then is; uint8 is
        summed, all else averaged.

        Raises:
            ManifestMismatch: ranks disagree; names the tensor and both values, on every rank, before any data moves.
            ValueError: a buffer is not like that; on this rank only.
            CommschedError: see :meth:`gather`.
        """
        require_buffers(manifest, buffers, self.device)
        plan, policy = self._agree_on(manifest)
        for callback in self._register_callbacks:
            callback(self.core.group_count, manifest)
        return self._add_group(plan, buffers, policy)

    def _agree_on(self, manifest: Manifest) -> tuple[Plan, str]:
        """How all ranks cut it, and the policy that says whether its averages are split."""
        # Ranks may be at different steps of other groups when the configuration changes: rank 0's counts for all.
        config = self.core.config
        sizes = {"partition_bytes": config.partition_bytes, "fusion_bytes": config.fusion_bytes}
        records = self.gather({"manifest": manifest.to_record(), "sizes": sizes, "policy": config.policy})
        require_equal([Manifest.from_record(record["manifest"]) for record in records])
        return cut(manifest, **records[0]["sizes"]), records[0]["policy"]

    def _add_group(self, plan: Plan, buffers: Mapping[str, Sliceable], policy: str) -> TensorGroup:
        if self.observer is not None:
            self.observer.add_group(self.core.group_count, plan.manifest)
        return self.core.add_group(plan, buffers, policy)

    def broadcast(self, name: str, data: Sliceable, root: int = 0) -> None:
        """Replace ``data`` on every rank by that of ``root``, bit for bit, whatever type it holds. Collective; returns when it
        is there.

        ``data`` is a ``memoryview`` of format ``B``; or uint8 on another :attr:`device`, then complete there, and zeros already
        on every other rank. It is a sum to which every other rank contributes zero bytes, so it needs nothing of a transport
        but its sum. Each call costs a round trip or two: join what is small.

        Raises:
            ManifestMismatch: names, sizes or roots differ between ranks; on every rank, with ``data`` as it was.
            ValueError: ``data`` is nothing of the kind, or there is no rank ``root``; on this rank only.
            CommschedError: see :meth:`gather`.
        """
        require_buffer(data, f"what is to be broadcast as '{name}'", self.device)
        if not 0 <= root < self.world_size:
            raise ValueError(f"'{name}' cannot be broadcast from rank {root} of {self.world_size}")
        name = name if root == 0 else f"{name} of rank {root}"
        plan, policy = self._agree_on(Manifest((TensorSpec(name, (len(data),), "uint8"),)))
        if self.rank != root and isinstance(data, memoryview):
            data[:] = bytes(len(data))
        self._run_once(plan, data, policy)

    def average(self, spec: TensorSpec, data: Sliceable) -> None:
        """Replace ``data``, the bytes of ``spec``, on every rank by the average of all ranks; for what travels once, and is in
        no group. Collective; returns when it is there.

        Raises:
            ManifestMismatch: ``spec`` differs between ranks; on every rank, with ``data`` as it was.
            ValueError: ``data`` is no such memory; on this rank only.
            CommschedError: see :meth:`gather`.
        """
        manifest = Manifest((spec,))
        require_buffers(manifest, {spec.dtype: data}, self.device)
        plan, policy = self._agree_on(manifest)
        self._run_once(plan, data, policy)

    def _run_once(self, plan: Plan, data: Sliceable, policy: str) -> None:
        """Sum or average ``data``, the one tensor of ``plan``."""
        if len(data) == 0:
            return
        group = self._add_group(plan, {plan.manifest.tensors[0].dtype: data}, policy)
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
        self._listener.tuner = tuner

    def tell_tuner(self, value: Any) -> None:
        """Send the JSON ``value`` to the tuner of rank 0. Any thread; never blocks; what one rank tells arrives in order.

        Raises:
            CommschedError: the job failed, or the session is closed.
        """
        if self.rank == 0:
            self._listener.on_told(0, {"tuner": value})
        else:
            self._control.tell({"tuner": value})

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` first when the session closes in good order, while all still works: to put last updates in place.
        On the thread that closes, in the order of these calls; every rank's may use the session, alike. What it raises ends
        the job, and is raised by ``close``. What is returned takes the callback back."""
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
        """Call ``callback``, which must not wait, with the first failure, from a control thread; now if there was one."""
        self._listener.when_failed(callback)

    def report(self, error: CommschedError) -> None:
        """Tell every rank of a failure here, which ends the job. Any thread; never blocks. The first failure of all ranks comes
        back to who asked by :meth:`when_failed`, and every wait raises it."""
        self._control.report(error)

    # --- end ---

    def close(self) -> None:
        """Finish what is in flight, wait until every rank has closed too, and give everything back. Collective; idempotent.

        Raises:
            CommschedError: a rank failed before the last averages were in place.
        """
        if self.closed or os.getpid() != self._pid:
            return
        try:
            self._stop_tuner(wait=True)
            for callback in tuple(self._close_callbacks):  # which may take itself back
                callback()
            self.core.drain()
            self.core.farewell()
            if self.observer is not None:
                self.observer.close()  # every rank's file is written before the last has left
            self._control.leave()
            self._control.wait_until_all_left()
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise
        try:
            if self.observer is not None and self.rank == 0:
                self.observer.merge()
        finally:
            self._tear_down(graceful=True)

    def abort(self, reason: str) -> None:
        """End at once and tell every rank why, unless the job has failed. Not collective; idempotent; raises nothing."""
        if self.closed or os.getpid() != self._pid:
            return
        if self._listener.failure is None:
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
        tuner, self._listener.tuner = self._listener.tuner, None
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
            self.abort(f"{type(error).__name__}: {error}")

    def __repr__(self) -> str:
        return f"<Session rank {self.rank} of {self.world_size}{' closed' if self.closed else ''}>"
