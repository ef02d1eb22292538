"""One rank's membership in a job, as plugins see it, and the ways in which it ends."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from ..control.end import ControlEnd
from ..core.comparison import Comparison
from ..core.core import Core
from ..core.device import Device
from ..core.errors import (
    FORKED,
    ClosedError,
    CommschedError,
    PeerLost,
    RanksDiverged,
    TransportError,
    UnsupportedError,
    error_text,
)
from ..core.group import TensorGroup, require_buffer, require_buffers
from ..core.interfaces import Buffer, Observer, SessionObserver, Transport
from ..core.interrupted import INTERRUPTED, is_own_thread
from ..core.manifest import Manifest, TensorSpec, require_equal
from ..core.norms import ROW_DTYPE
from ..core.plan import Plan
from ..core.scheduler import SchedulerConfig
from ..tuner.paced import FullWait
from .events import COMPARE, TUNER, SessionListener, Tuner
from .log import say
from .stats import Statistics, scalars

if TYPE_CHECKING:
    from ..control.elastic_messages import Place
    from .membership import ElasticMember
    from .norms import Norms

log = logging.getLogger("commsched")


@contextmanager
def starting(control: ControlEnd) -> Iterator[ExitStack]:
    """Opens the parts of a session, after the job was joined by ``control``. If that fails, it reports to every rank why this
    one cannot start, and closes ``control`` and what was entered into the stack.

    Raises:
        CommschedError: another rank failed first, and this rank's error is only a consequence.
    """
    with ExitStack() as undo:
        undo.callback(control.close)
        try:
            yield undo
        except BaseException as error:
            ours = could_not_start(control, error)
            failure = control.failure
            if isinstance(error, TransportError) and failure is not None and str(failure) != str(ours):
                raise failure from error  # another rank failed first, and then closed its connections
            raise
        undo.pop_all()


def could_not_start(control: ControlEnd, error: BaseException) -> CommschedError:
    """Report to every rank why this rank cannot start, wait until the job knows, and return the reported error."""
    # A broken connection to a rank is likely a consequence of that rank's own failure: see ``ControlClient``.
    kind = PeerLost if isinstance(error, PeerLost) else TransportError
    ours = kind(f"rank {control.rank} could not start: {error}", rank=control.rank)
    control.report_and_wait(ours)
    return ours


class Session:
    """One rank's membership in a job. Plugins get it from ``commsched.init``.

    ``register``, ``broadcast``, ``average``, ``gather`` and ``close`` are collective: every rank calls them, in the same order,
    from one engine thread. A collective call may raise on one rank before the other ranks are notified (a wrong argument, an
    exception in a callback). The other ranks then wait until that rank closes its session. So let the exception end the
    training, or the ``with`` block of the session.

    Attributes:
        world_size: number of ranks. It is 1 for a process that is alone, and with the setting ``disable``, where there may be
            other ranks that this session ignores.
        disabled: the setting ``disable`` is on; a plugin then leaves the engine unchanged.
        observer: records the timeline, or the steps of a rank that is alone (``recording.py``); a plugin reports the engine's
            activity to its ``on_span``. ``None`` means that nobody wants to know it.
        is_recorded: this rank is alone, and its steps are to be recorded: a plugin submits gradients as it does with several
            ranks, although there is nothing to average.
        check_weights: steps between two comparisons of weights (see ``plugins/common/weights_check.py``); 0 means none.
        statistics: what this rank knows of its steps.
        own_groups: the groups that hold no data of the user: in them ranks report their actions, and norms.
        cleanup: closed last, however the session ends; for the threads of a plugin.
        membership, place: of an elastic job, whose session lasts for one generation; otherwise None.
    """

    def __init__(
        self,
        control: ControlEnd,
        transport: Transport,
        core: Core,
        *,
        trace: SessionObserver | None = None,
        check_weights: int = 0,
    ) -> None:
        self.rank = transport.rank
        self.world_size = transport.world_size
        self._control = control
        self._transport = transport
        self._core = core
        self._has_raised = False
        self._close_callbacks: list[Callable[[], None]] = []
        self._register_callbacks: list[Callable[[int, Manifest], None]] = []
        self._first_sizes: Callable[[Manifest], SchedulerConfig | None] | None = None
        self.closed = False
        self.disabled = False
        self.is_recorded = False
        self.membership: ElasticMember | None = None
        self.place: Place | None = None
        self._ended_itself = False
        self._aborts = threading.RLock()  # a signal handler may abort a session whose end it has interrupted
        self.cleanup = ExitStack()
        self._pid = os.getpid()
        self.check_weights = check_weights
        self.statistics = Statistics(core)
        self.own_groups: set[int] = set()
        self._comparison = Comparison(self.world_size)
        self._diverged: RanksDiverged | None = None
        self.observer: SessionObserver | None = trace
        self._observers_lock = threading.Lock()
        self._listener = SessionListener(core, self._on_compared)
        control.listen(self._listener)

    @property
    def core(self) -> Core:
        """The scheduler of this rank.

        Raises:
            ClosedError: the session is closed.
        """
        if self.closed:
            raise ClosedError("this session is closed")
        return self._core

    @property
    def transport(self) -> Transport:
        """The transport that carries this rank's gradients.

        Raises:
            ClosedError: the session is closed.
        """
        if self.closed:
            raise ClosedError("this session is closed")
        return self._transport

    @property
    def failed_elsewhere(self) -> bool:
        """Whether the job failed because of another process, and not because of an exception on this rank."""
        return isinstance(self.failure, TransportError) and not self._ended_itself

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the rank's process. The session's threads and connections are not in it."""
        return os.getpid() != self._pid

    @property
    def device(self) -> str:
        """Where averages are made: "cpu", or a device as PyTorch names it. Flat buffers lie there, or, if it is "cpu", on any
        device. A device is given with them."""
        return self.transport.device

    @property
    def root(self) -> int:
        """The rank whose values all ranks begin with. It is 0, but for a later generation of an elastic job."""
        return 0 if self.place is None else self.place.root

    # --- interface for plugins ---

    def gather(self, value: Any, what: str = "") -> list[Any]:
        """Return the value of every rank, in rank order. Blocks until every rank has called. Collective.

        ``what`` states the purpose in errors ("to make an optimizer"); it must be the same on all ranks.
        Values are small JSON values: tuples come back as lists, keys as strings, and arrays and tensors are refused. Equal
        values may come back as one object.

        Raises:
            TypeError, ValueError, RecursionError: ``value`` cannot be written as JSON; on this rank only.
            UnsupportedError: ``value`` is longer than the control channel takes; on this rank only.
            CommschedError: a rank failed, left or was lost meanwhile; or the session is closed.
        """
        if self.closed:
            raise ClosedError("this session is closed")
        if self.is_forked:
            raise ClosedError(FORKED)
        try:
            return self._control.gather_next(value, what)
        except CommschedError:
            self._has_raised = True
            raise

    def register(
        self,
        manifest: Manifest,
        buffers: Mapping[str, Buffer],
        device: Device | None = None,
        *,
        may_freeze: bool = False,
    ) -> TensorGroup:
        """Announce tensors, in forward order, and the flat buffer of each dtype. Collective; moves no data.

        A buffer has ``manifest.buffer_bytes[dtype]`` writable bytes. In the host's memory it is a ``memoryview`` of format
        ``B``. With ``device`` it is memory of that device. If averages are made in the host's memory, gradients are copied to
        the host and averages back, through pinned memory of the same size; ranks may have different devices then. The buffers
        belong to the session until ``release`` of the returned group, so the engine must neither move nor free them. The engine
        writes each gradient into the tensor's place in its flat buffer, and the average replaces it there. uint8 is summed;
        every other dtype is averaged.

        ``may_freeze``: the order of launches may become static with ``order=auto``, because on each rank all gradients of a
        step are notified before anything waits for an average of that step, and before the user's code can wait for another
        rank. If a step turns out not to be like that, call ``TensorGroup.keep_agreed``. It must be the same on all ranks.

        Raises:
            ManifestMismatch: ranks disagree; names the tensor and both values, on every rank, before any data moves.
            ValueError: a buffer does not meet these requirements; on this rank only.
            UnsupportedError: averages are made on another device than ``device``; on this rank only.
            CommschedError: see :meth:`gather`.
        """
        device = self._on_device(device)
        require_buffers(manifest, buffers, self.device if device is None else device.name)
        # Plugins also register tensors of their own, in which each rank reports its actions.
        has_gradients = any(not spec.name.startswith("commsched.") for spec in manifest.tensors)
        if self._first_sizes is not None and has_gradients:
            self._use_first_sizes(self._first_sizes, manifest)
        plan, collective = self._agree_on(manifest)
        try:
            for callback in self._register_callbacks if has_gradients else ():
                callback(self.core.group_count, manifest)
        except BaseException:
            self._core.cancel_reservation()
            raise
        group = self._add_group(plan, buffers, collective, device, may_freeze)
        if has_gradients:  # not earlier: another thread may ask for statistics at any time
            self.statistics.add_group(group)
        else:
            self.own_groups.add(group.index)
        return group

    def _on_device(self, device: Device | None) -> Device | None:
        """``device``; None if its memory is the host's, which is averaged where it is."""
        if device is None or (device.name == "host" and self.device == "cpu"):
            return None
        if self.device not in ("cpu", device.name):
            raise UnsupportedError(f"averages are made on {self.device}, but the memory given is on {device.name}")
        return device

    def _use_first_sizes(self, choose: Callable[[Manifest], SchedulerConfig | None], manifest: Manifest) -> None:
        """Make all ranks use the configuration that ``choose`` returns on rank 0, if it returns one."""
        config, agreed_before = choose(manifest), self.core.agreed_count
        if self.gather(config is not None, "to choose sizes")[0]:
            if config is not None and self.rank == 0:
                self.reconfigure(config)
            # The change is agreed on by messages of its own, so a rank may not have it with the first answers. Another change
            # may be agreed on behind it, so ranks count changes instead of looking for this one.
            while not all(self.gather(self.core.agreed_count > agreed_before, "to choose sizes")):
                pass

    def _agree_on(self, manifest: Manifest) -> tuple[Plan, str]:
        """The plan by which all ranks cut ``manifest``, and the collective that averages it."""
        # When the configuration changes, ranks may be at different steps of other groups. Rank 0's values count for all.
        config = self.core.reserve_group()
        try:
            sizes = {"partition_bytes": config.partition_bytes, "fusion_bytes": config.fusion_bytes}
            record = {"manifest": manifest.to_record(), "sizes": sizes, "collective": config.collective}
            records = self.gather(record, "to register tensors")
            ours = records[0]["manifest"]
            first = Manifest.from_record(ours)  # the others are mostly equal, and need not be built too
            require_equal([first if each["manifest"] == ours else Manifest.from_record(each["manifest"]) for each in records])
            return self.core.cut(manifest, replace(config, **records[0]["sizes"])), records[0]["collective"]
        except BaseException:
            self._core.cancel_reservation()
            raise

    def _add_group(
        self,
        plan: Plan,
        buffers: Mapping[str, Buffer],
        collective: str,
        device: Device | None = None,
        may_freeze: bool = False,
    ) -> TensorGroup:
        if self.observer is not None:
            self.observer.add_group(self.core.group_count, plan.manifest)
        return self.core.add_group(plan, buffers, collective, device, may_freeze)

    @property
    def can_measure_norms(self) -> bool:
        """Whether :meth:`add_norms` is possible with this transport and these settings. It may refuse a certain group still."""
        return self.transport.norm_rows(Manifest(())) > 0

    def add_norms(self, group: TensorGroup, orders: Sequence[float]) -> Norms:
        """From the next step of ``group`` on, tell the norms of its averages, of each of ``orders`` (2, infinity, or any number
        greater than 0), before the averages are there. Collective; every rank calls it between the same two steps of the group.
        The averages of the step before may be outstanding. The norms end with the group.

        Whoever makes averages also adds up the powers of their elements, and one small message from each to every rank carries
        the sums. Over collectives, the averages of this group are made by reduce-scatters and all-gathers from then on, and all
        all-gathers of a step are less urgent than its reduce-scatters.

        Raises:
            UnsupportedError: that is not possible with this transport, these settings or these tensors; raised on every rank.
            ManifestMismatch: ranks disagree, or are between other steps of the group; raised on every rank.
            ValueError: there are no norms of these orders, or the group was released; on this rank only.
            CommschedError: see :meth:`gather`.
        """
        from .norms import Norms, rows_for  # here: it needs numpy, which takes time to import

        if group.is_over:
            raise ValueError(f"group {group.index} was released: it has no further averages")
        manifest = rows_for(group, orders, self.transport)
        plan, collective = self._agree_on(manifest)
        data = bytearray(manifest.nbytes)
        rows = self._add_group(plan, {ROW_DTYPE: memoryview(data)}, collective)
        self.own_groups.add(rows.index)
        return Norms(group, rows, data, self.report)

    def broadcast(self, name: str, data: Buffer, root: int = 0, device: Device | None = None) -> None:
        """Replace ``data`` on every rank by the data of rank ``root``, bit for bit, whatever type it holds. Collective; returns
        when the data have arrived.

        ``data`` is a ``memoryview`` of format ``B``, or uint8 on another :attr:`device`, or memory of ``device`` (see
        :meth:`register`). On another device the data must be complete before the call, and already be zeros on every rank but
        ``root``. The broadcast is a sum to which every other rank contributes zero bytes, so it needs only a transport's sum.
        Each call costs one or two round trips, so join small data.

        Raises:
            ManifestMismatch: names, sizes or roots differ between ranks; on every rank, with ``data`` unchanged.
            ValueError: ``data`` is not such memory, or there is no rank ``root``; on this rank only.
            CommschedError: see :meth:`gather`.
        """
        device = self._on_device(device)
        require_buffer(data, f"the memory to broadcast as '{name}'", self.device if device is None else device.name)
        if not 0 <= root < self.world_size:
            raise ValueError(f"'{name}' cannot be broadcast from rank {root} of {self.world_size}")
        name = name if root == 0 else f"{name} of rank {root}"
        plan, collective = self._agree_on(Manifest((TensorSpec(name, (len(data),), "uint8"),)))
        if self.rank != root and isinstance(data, memoryview):
            data[:] = bytes(len(data))
        self._run_once(plan, data, collective, device)

    def average(self, spec: TensorSpec, data: Buffer, device: Device | None = None) -> None:
        """Replace ``data``, the bytes of ``spec``, on every rank by the average of all ranks. The tensor is averaged once
        and belongs to no group. Collective; returns when the average is complete. ``device`` is as in :meth:`broadcast`.

        Raises:
            ManifestMismatch: ``spec`` differs between ranks; on every rank, with ``data`` unchanged.
            ValueError: ``data`` is not such memory; on this rank only.
            CommschedError: see :meth:`gather`.
        """
        manifest = Manifest((spec,))
        device = self._on_device(device)
        require_buffers(manifest, {spec.dtype: data}, self.device if device is None else device.name)
        plan, collective = self._agree_on(manifest)
        self._run_once(plan, data, collective, device)

    def _run_once(self, plan: Plan, data: Buffer, collective: str, device: Device | None) -> None:
        """Sum or average ``data``, the one tensor of ``plan``."""
        if len(data) == 0:
            self._core.cancel_reservation()
            return
        group = self._add_group(plan, {plan.manifest.tensors[0].dtype: data}, collective, device)
        group.begin_step()
        group.notify_ready(0)
        group.proxies[0].wait()
        group.release()

    def reconfigure(self, config: SchedulerConfig, window: Mapping[str, Any] | None = None) -> None:
        """Ask for another configuration; all ranks switch at one agreed step. Returns before the switch.

        Meant for rank 0 (a tuner). ``config`` replaces the whole configuration, so change the one that is in use:
        ``replace(session.core.next_config, credit_bytes=...)``. ``window`` is passed on to every rank's ``Tuner.on_switch``.
        Never blocks on other ranks.

        Raises:
            UnsupportedError: the transport does not support ``config``.
            CommschedError: the job failed, or the session is closed.
        """
        self.core.require_supported(config)
        self._control.propose(config.to_record(), window)

    def choose_first_sizes(self, choose: Callable[[Manifest], SchedulerConfig | None]) -> None:
        """Before each :meth:`register`, call ``choose`` with the tensors. If it returns a configuration on rank 0, all ranks
        use that. Called on every rank, by the code that opens the session."""
        self._first_sizes = choose

    def use_tuner(self, tuner: Tuner) -> None:
        """Pass the control channel's events for a tuner to ``tuner``. Called once on every rank, by the code that opens the
        session."""
        self._listener.tuner = tuner

    def tell_tuner(self, value: Any) -> None:
        """Send the JSON ``value`` to the tuner of rank 0. Any thread; never blocks. The values of one rank arrive in order.

        Raises:
            CommschedError: the job failed, or the session is closed.
        """
        if self.rank == 0:
            self._listener.on_message(0, TUNER, value)
        else:
            self._control.send_to_rank_0(TUNER, value)

    def compare(self, what: str, step: int, values: Mapping[str, Any], hint: str = "") -> None:
        """Compare the JSON ``values``, by name, of this rank with the values of the other ranks. Every rank calls it for the
        same steps of ``what``, a noun in the plural. Any thread; never blocks: it sends one small message to rank 0.

        A difference ends the job on every rank: the next waits and calls raise ``RanksDiverged``, whose message names the
        difference and ends with ``hint``. If it is found when all ranks have left, only ``close`` of rank 0 raises it.

        Raises:
            UnsupportedError: ``values`` are longer than the control channel takes.
            CommschedError: the job failed, or the session is closed.
        """
        if self.world_size == 1:
            return
        reported = {"what": what, "step": step, "values": dict(values), "hint": hint}
        if self.rank == 0:
            self._on_compared(0, reported)
        else:
            self._control.send_to_rank_0(COMPARE, reported)

    def _on_compared(self, rank: int, reported: Mapping[str, Any]) -> None:
        try:
            self._comparison.add(rank, reported["what"], reported["step"], reported["values"], reported["hint"])
        except RanksDiverged as error:
            self._diverged = self._diverged or error
            self.report(error)

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` at the start of an orderly close, while the session still works, to complete the last updates.

        Callbacks run on the closing thread, in the order of registration. They may use the session, if every rank's do so
        alike. An exception of a callback ends the job and is raised by ``close``. The returned function unregisters the
        callback."""
        self._close_callbacks.append(callback)
        return lambda: self._close_callbacks.remove(callback)

    def on_register(self, callback: Callable[[int, Manifest], None]) -> None:
        """Call ``callback`` with the index and the tensors of each group of gradients that :meth:`register` is about to add,
        once all ranks agree on them. An exception of ``callback`` ends the registration; ``callback`` must raise it on every
        rank."""
        self._register_callbacks.append(callback)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Add an observer of tasks and steps. The returned function removes it."""
        core = self.core
        with self._observers_lock:
            core.observers = (*core.observers, observer)

        def forget() -> None:
            with self._observers_lock:
                core.observers = tuple(each for each in core.observers if each is not observer)

        return forget

    @property
    def is_observed(self) -> bool:
        """Whether an observer of tasks and steps is there: the timeline's, or one of :meth:`observe`."""
        return bool(self.core.observers)

    @property
    def failure(self) -> CommschedError | None:
        """The first failure of the job, the same on every rank; None if there is none. Any thread, also after the end."""
        return self._control.failure

    @property
    def has_raised(self) -> bool:
        """Whether a call or a wait of this rank has raised the failure."""
        return self._has_raised or self._core.has_raised

    @property
    def left(self) -> list[int]:
        """The other ranks that have closed their session or are about to close it. Any thread."""
        return sorted(self._listener.left)

    def when_failed(self, callback: Callable[[CommschedError], None]) -> None:
        """Call ``callback`` with the first failure of the job, from a control thread. If the job has failed already, call it
        now, from this thread. ``callback`` must not wait."""
        self._control.when_failed(callback)

    def await_failure(self, seconds: float) -> CommschedError | None:
        """Wait for the first failure of the job and return it; None if there is none within ``seconds``. The control channel
        decides which failure was the first, and a consequence of it may be noticed sooner. Any thread but that of callbacks."""
        failures: SimpleQueue[CommschedError] = SimpleQueue()
        self.when_failed(failures.put)
        try:
            return failures.get(timeout=seconds)
        except Empty:
            return None

    def report(self, error: CommschedError) -> None:
        """Report a failure on this rank to every rank, which ends the job. Any thread; never blocks. The first failure of all
        ranks is passed to the callbacks of :meth:`when_failed`, and every wait raises it."""
        self._control.report(error)

    # --- statistics ---

    def stats(self) -> dict[str, Any]:
        """Numbers about the training so far, for loggers: JSON values, always with the same keys. None means that a value is
        not known (yet). Any thread; not collective; never waits.

        Every rank knows (medians are of the last 50 steps, of the largest group of gradients that is trained):

        - ``rank``, ``world_size``
        - ``steps``: steps that have begun
        - ``step_seconds``: median time of a step
        - ``compute_seconds``: the median time for which this rank does not wait for averages, and ``exposed_seconds``, the
          rest; None with engines that do not show what they wait for (TensorFlow, MXNet)
        - ``gradient_bytes`` of a step, ``partition_bytes`` and ``credit_bytes`` in use

        Rank 0 also knows, after some 20 steps or when partition and credit are chosen:

        - ``full_wait``: the line of the loop that waits for all averages: ``line`` (``file:line``), ``why``, ``seconds``
        - ``same_gradients``: the ranks whose own gradients were equal, as with the same batches
        - ``slowest_rank``: the rank that computes longest, if it is slower than rank 0, and ``late_seconds``, the part of
          ``exposed_seconds`` that ranks wait for it
        - ``network_bytes_per_second``: bytes of gradient that the network averages per second
        - ``bound_seconds``: the least time of a step with these layers and this network; ``bound_16_bits_seconds``: the same if
          gradients travel in 16 bits; ``bound_with_servers_seconds``: the same with as many parameter servers as ranks, on
          machines of their own
        - ``layers``: for each tensor ``name``, ``bytes``, ``forward_seconds``, ``backward_seconds``, ``waited_seconds``; the
          times of tensors that are not waited for one by one are split in proportion
        """
        return {"rank": self.rank, "world_size": self.world_size, **self.statistics.record()}

    def scalars(self, prefix: str = "commsched/") -> dict[str, float]:
        """The known ones of :meth:`stats` that change while training runs and are plain numbers, with ``prefix`` before each
        name, for a logger: ``wandb.log(session.scalars(), step=step)``."""
        return scalars(self.stats(), prefix)

    def report_full_wait(self, line: str, why: str, seconds: float, step_seconds: float) -> None:
        """Note that the user's code waits for all averages of a step at ``line`` (``file:line``), where the next forward cannot
        overlap. A plugin that finds such lines calls it on rank 0, once for each line.

        Args:
            why: the reason, as a clause.
            seconds, step_seconds: medians of the time that is waited there, and of the whole step.
        """
        self.statistics.add_full_wait(FullWait(line, why, seconds, step_seconds))

    # --- end ---

    def close(self) -> None:
        """Finish all tasks in flight, wait until every rank has closed, and release all resources. Collective; idempotent.

        If other ranks are late by more than ``fail_after`` (one evaluates, or waits for this process to end), it returns as
        soon as none of them waits for an average that this rank took part in.

        Raises:
            CommschedError: a rank failed before the last averages were complete.
            UnsupportedError: a signal handler or a finalizer calls it, and has interrupted its thread within commsched. The
                session is still open.
        """
        if self.closed or self.is_forked:
            return
        if self._interrupts or is_own_thread():
            raise UnsupportedError(INTERRUPTED)
        try:
            self._stop_tuner(wait=True)
            for callback in tuple(self._close_callbacks):  # a callback may unregister itself
                callback()
            self.core.drain()
            self.core.prepare_leave()
            if self.observer is not None:
                self.observer.close()  # every rank's file is written before the last rank has left
            self._control.leave()
            self._control.wait_until_all_left()
            self._control.wait_for_callbacks()  # the last comparisons arrive as callbacks
            if self._diverged is not None:
                raise self._diverged
            for line in self.statistics.last_lines() if self.rank == 0 else ():
                say(line)
        except BaseException as error:
            self.abort(error_text(error))
            raise
        try:
            if self.observer is not None and self.rank == 0:
                self.observer.merge()
        finally:
            with self._aborts:
                if not self.closed:
                    self._tear_down(graceful=True)

    def abort(self, reason: str) -> None:
        """End at once, and report ``reason`` to every rank unless the job has failed. Not collective; idempotent; never
        raises. Called by a signal handler that has interrupted its thread within commsched, it ends the session in another
        thread, as soon as the handler has returned."""
        if self.closed or self.is_forked:
            return
        if self._interrupts:
            try:
                threading.Thread(target=self.abort, args=[reason], name="commsched-abort").start()
            except RuntimeError as error:  # the interpreter or the system starts no thread any more
                log.error("rank %d: a signal handler cannot end the session: %s", self.rank, error)
            return
        with self._aborts:
            if self.closed:
                return
            if self.failure is None:
                self._ended_itself = True
                self._control.report_and_wait(TransportError(f"rank {self.rank} ended: {reason}", rank=self.rank))
            self._tear_down()

    @property
    def _interrupts(self) -> bool:
        """Whether the caller has interrupted its thread where that had a lock which the end of the session needs."""
        return self._core.interrupts or self._control.interrupts

    def _tear_down(self, graceful: bool = False) -> None:
        self.closed = True
        self._stop_tuner(wait=False)
        self._core.close()
        self._transport.close(graceful)
        self._control.close()
        if self.observer is not None:
            self.observer.close()
        self.cleanup.close()

    @property
    def is_settled(self) -> bool:
        """Whether no search for a better configuration is under way or about to begin. On other ranks than 0 always true."""
        tuner = self._listener.tuner
        return tuner is None or tuner.is_settled

    def stop_tuner(self) -> None:
        """End the search for a better configuration on this rank, and begin no other. The configuration stays as it is."""
        self._stop_tuner(wait=True)
        self.core.on_step = None

    def _stop_tuner(self, wait: bool) -> None:
        tuner, self._listener.tuner = self._listener.tuner, None
        if tuner is not None:
            tuner.close(wait)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self.abort(error_text(error))

    def __repr__(self) -> str:
        return f"<Session rank {self.rank} of {self.world_size}{' closed' if self.closed else ''}>"
