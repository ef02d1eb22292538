"""Core: the scheduler's lock and its only dispatcher thread.

Decisions are made under the lock and carried out after it is released: the transport, the observer and failure callbacks are
never called with the lock held. Nothing here polls.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, NoReturn, cast
from weakref import WeakSet

from .device import Device
from .device_events import Event
from .duplicates import SAMPLED_STEP, Duplicates, GradientSamples
from .errors import (
    FEWER_BATCHES,
    FORKED,
    ClosedError,
    CommschedError,
    ConfigError,
    PeerLost,
    PeerTimeout,
    TransportError,
    UnsupportedError,
    and_more,
    error_text,
)
from .finite import FiniteReport as NotFiniteReport
from .finite import FirstNotFinite, NotFinite, looks_finite
from .group import DependencyProxy, TensorGroup
from .interfaces import NOT_FINITE, ORDER, PACE, STALL, Buffer, Messenger, Observer, OnFailure, Transport
from .interrupted import INTERRUPTED, is_held_here
from .manifest import Manifest
from .order import Order
from .order.agreed import AgreedOrder
from .order.messages import LaunchKey, range_of
from .pace import Pace, PaceReport, Stragglers
from .plan import Partition, Plan, cut
from .policies import make_policy
from .reconfigure import Reconfiguration
from .scheduler import COLLECTIVES, LAST_KEY, LAUNCH_ORDERS, MAX_PARTITION_BYTES, Scheduler, SchedulerConfig, is_key
from .staging import DeviceGroup, Kernels, StagedGroup, StagedTask, Staging
from .stalls import RankProgress, Stalls, StepOfGroup, Wait, progress_of
from .task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask, State

log = logging.getLogger("commsched")


class Core:
    """Takes gradients from engine threads, starts partitions by policy and credit, opens dependency proxies.

    Every call of an engine thread raises the session's failure, or ClosedError after :meth:`close`; none waits for ever.

    Args:
        transport: averages partitions; ``Core`` calls its ``start`` from the dispatcher thread only.
        config: initial partition, credit, policy and order.
        observer: notified of every task, if given.
        on_failure: called once, from any thread, with the first failure that arose here. That failure may be the consequence
            of another one, so the callback must have :meth:`fail` called with the error that counts, at once or a moment
            later. ``None`` means that the first failure counts.
        warn_after_seconds: a longer wait is logged with the ranks that are late, and again after each further such time.
        stall_after_seconds: a longer wait ends the job. ``None`` means no limit.
        messenger: the channel over which ranks agree on an order, ask each other which rank is late, and compare their speed
            and whether their gradients are finite. An ordered transport needs it. ``None`` means that ranks do none of this.

    Raises:
        UnsupportedError: the transport does not support ``config``.
        ValueError: an ordered transport was given without a messenger.
    """

    def __init__(
        self,
        transport: Transport,
        config: SchedulerConfig,
        *,
        observer: Observer | None = None,
        on_failure: OnFailure | None = None,
        warn_after_seconds: float = 10.0,
        stall_after_seconds: float | None = None,
        messenger: Messenger | None = None,
    ) -> None:
        self._transport = transport
        self.require_supported(config)
        self.config = config
        self._changes = Reconfiguration(config)
        self.observers: tuple[Observer, ...] = () if observer is None else (observer,)
        #: Called with the group, the step and the time when a step begins. It is apart from ``observers``, because an observer
        #: of every tensor and task costs each step more than this call. An engine thread calls it; it must not block or raise.
        self.on_step: Callable[[int, int, float], None] | None = None
        if transport.ordered and messenger is None:
            raise ValueError("an ordered transport needs a messenger")
        self._messenger = cast("Messenger", messenger)  # None is not called: ranks need no agreement then
        self._on_failure = on_failure or self.fail
        self.warn_after_seconds = warn_after_seconds
        self._stall_after_seconds = stall_after_seconds
        self._stalls = self._make_stalls() if messenger is not None else None
        self._pace = Pace()
        self._stragglers = Stragglers(transport.world_size)
        self._looks = messenger is not None and transport.world_size > 1  # check that gradients are finite
        self._not_finite = NotFinite()  # used by the dispatcher thread only
        self._first_not_finite = FirstNotFinite(transport.world_size)
        self._samples = GradientSamples()  # a step's tasks are done when they are taken
        self._duplicates = Duplicates(transport.world_size)
        self._waits: list[Callable[[], Wait]] = []  # the current waits of engine threads
        self._draining = 0  # how many of them wait for tasks that need not be the last of a tensor
        self._lock = threading.RLock()  # a signal handler may come here in a thread that has it: see ``interrupts``
        self._wakes: SimpleQueue[None] = (
            SimpleQueue()
        )  # the dispatcher waits for an item; a Condition costs several times as much
        self._is_idle = False  # the dispatcher waits, and has not been woken
        self._progress = threading.Condition(self._lock)  # engine threads wait on it
        self._agreement = self._make_agreement(config) if transport.ordered else None
        self._freezes_all = config.order == "static"
        self._order: Order = self._agreement or Scheduler(make_policy(config.policy), config.credit_bytes)
        self._groups: dict[int, TensorGroup] = {}  # by number, those that may still be asked about
        self._group_count = 0
        self._last_steps: dict[int, int] = {}  # by number of a forgotten group: its steps, if not 1
        self._kernels: dict[Device, Kernels] = {}
        self._failure: CommschedError | None = None
        self.has_raised = False  # the failure was raised to a caller
        self._failed_inside: CommschedError | None = None  # a failure found with the lock held; the dispatcher reports it
        self._released: list[TensorGroup] = []  # released groups whose last task is done; the transport must be notified
        self._reported = False  # a failure arose here: no further task starts
        self._closed = False
        self._flushing = False  # a caller waits until all messages are sent
        self._parted: int | None = None  # the first rank that left and wants to end its process
        self._releases: list[Callable[[], None]] = []  # called once no average is outstanding here
        self._dispatcher = threading.Thread(target=self._dispatch, name="commsched-dispatch", daemon=True)
        self._dispatcher.start()
        _cores.add(self)

    def _make_agreement(self, config: SchedulerConfig) -> AgreedOrder:
        return AgreedOrder(
            self._transport.rank,
            self._transport.leaders or range(self._transport.world_size),
            make_policy(config.policy),
            config.credit_bytes,
            channels=self._transport.channels,
            freeze=config.order == "static",
            describe=self._describe,
            locate=self._locate,
        )

    def _make_stalls(self) -> Stalls:
        transport, messenger = self._transport, self._messenger
        return Stalls(
            transport.rank,
            transport.world_size,
            progress=self._progress_of,
            send=partial(messenger.announce if transport.rank == 0 else messenger.send_to_rank_0, STALL),
            warn=lambda line: log.warning("%s", line),
            fail=self._report,
            stall_after_seconds=self._stall_after_seconds,
        )

    def require_supported(self, config: SchedulerConfig) -> None:
        """Check that the transport supports ``config``. A transport without an order takes any order.

        Raises:
            ConfigError: there is no such collective, order or policy, or a size is out of its bounds.
            UnsupportedError: the transport does not support it; the message names the cause and a remedy.
        """
        transport = self._transport
        if not 1 <= config.partition_bytes <= MAX_PARTITION_BYTES:
            raise ConfigError(f"partition_bytes is {config.partition_bytes}; it must be from 1 to {MAX_PARTITION_BYTES}")
        for name in ("credit_bytes", "fusion_bytes"):
            if (value := getattr(config, name)) is not None and value < 0:
                raise ConfigError(f"{name} is {value}; it must not be negative")
        make_policy(config.policy)
        if config.collective not in COLLECTIVES:
            raise ConfigError(f"collective '{config.collective}' is unknown; there are: {', '.join(COLLECTIVES)}")
        if self._splits(config.collective) and not {REDUCE_SCATTER, ALL_GATHER} <= transport.verbs:
            raise UnsupportedError(
                f"collective={config.collective!r} averages by reduce-scatter and all-gather, which "
                f"{type(transport).__name__} does not have; use transport=gloo, mpi or nccl without hierarchy, or "
                "collective=auto"
            )
        if config.order not in LAUNCH_ORDERS:
            raise ConfigError(f"order '{config.order}' is unknown; there are: {', '.join(LAUNCH_ORDERS)}")
        if config.order == "static" and transport.ordered and transport.channels < 2:
            raise UnsupportedError(
                f"order='static' needs two channels, and {type(transport).__name__} has one; use order=agreed"
            )

    def _splits(self, collective: str) -> bool:
        return self._transport.world_size > 1 and collective == "rsag"  # a single rank has nothing to split

    @property
    def is_static(self) -> bool:
        """Whether a static order is in use now, instead of agreement on each launch."""
        return self.static_group is not None

    @property
    def static_group(self) -> int | None:
        """The group whose launches have a static order now; None if every launch is agreed on."""
        return self._agreement.static_group if self._agreement is not None else None

    def may_freeze(self, group: int) -> bool:
        """Whether the order of launches of ``group`` may become static, as far as this rank knows; see :meth:`add_group`. Any
        thread."""
        with self._lock:
            return self._agreement is not None and self._agreement.may_freeze(group)

    @property
    def next_config(self) -> SchedulerConfig:
        """The configuration agreed on last. Groups that are added from now on use it; others may not have switched yet."""
        return self._changes.latest

    @property
    def agreed_count(self) -> int:
        """The number of changes of configuration that the ranks have agreed on, as far as this rank knows."""
        return self._changes.agreed_count

    @property
    def group_count(self) -> int:
        """The number of groups that were added, which is the index of the next one. No index is used twice, so a late message
        of an old group is never taken for one of a new group."""
        return self._group_count

    # --- engine threads ---

    def cut(self, manifest: Manifest, config: SchedulerConfig) -> Plan:
        """The plan of ``manifest`` by the sizes of ``config``, for the servers of this job. Thread-safe."""
        return cut(manifest, config.partition_bytes, config.fusion_bytes, self._transport.servers)

    def reserve_group(self) -> SchedulerConfig:
        """Return the configuration to cut the next group by. Every later change includes that group, even if it is agreed on
        before the group is added. Waits while a change is being agreed on, since that change may not include the group."""
        with self._lock_to_wait():
            self._wait_until(
                lambda: not self._changes.is_holding, lambda: Wait("for a change of configuration to be agreed on")
            )
            return self._changes.reserve()

    def cancel_reservation(self) -> None:
        """Note that the group for which :meth:`reserve_group` was called is not added."""
        with self._lock:
            self._changes.cancel_reservation()
            self._adopt_config()

    def add_group(
        self,
        plan: Plan,
        buffers: Mapping[str, Buffer],
        collective: str | None = None,
        device: Device | None = None,
        may_freeze: bool = False,
    ) -> TensorGroup:
        """Add the tensors of ``plan`` as a group; ``buffers`` maps each dtype to its flat buffer of bytes. They are memory that
        the transport averages, or memory of ``device``. If that is not where the transport averages, gradients travel from the
        host's memory.

        The caller ensures that all ranks add equal plans in the same order, each with the same ``collective``. ``None`` means
        the collective of ``config``. ``may_freeze`` is as for ``Session.register``. With an order that is static from the
        beginning, that of any group may freeze.

        Raises:
            TransportError: the job failed; the message names the first cause.
            CommschedError: any other error that ``Transport.add_group`` raises.
        """
        kernels = None if device is None else self._kernels_of(device)
        mirror = self._mirror(kernels, plan, buffers) if isinstance(kernels, Staging) else {}
        with self._lock:
            self._check()
            splits, nbytes = self._splits(collective or self.config.collective), plan.manifest.nbytes
            if plan.manifest.norms is not None:
                # Rows are gathered, if there is a gather. They are never the largest group, whose order may be static.
                splits, nbytes = ALL_GATHER in self._transport.verbs, 0
            group: TensorGroup
            if kernels is None:
                group = TensorGroup(self, self._group_count, plan, buffers, splits)
            elif isinstance(kernels, Staging):
                group = StagedGroup(self, self._group_count, plan, buffers, mirror, splits, kernels)
            else:
                group = DeviceGroup(self, self._group_count, plan, buffers, splits, kernels)
            if plan.manifest.norms is not None:
                self._groups[plan.manifest.norms.group].add_norms(group)
            self._groups[group.index] = group
            self._group_count += 1
            self._changes.add_group(group)
            self._adopt_config()
            if self._agreement is not None:
                self._agreement.add_group(group.index, nbytes, may_freeze or self._freezes_all)
        try:
            self._transport.add_group(group.index, plan.manifest)
        except TransportError as error:  # a lost peer may be the consequence of another failure
            self.raise_cause(error)
        return group

    def _mirror(self, staging: Staging, plan: Plan, there: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Return the mirror of the next group, whose flat buffers are ``there``, on a device. Groups are added one after
        another, so no other group takes its number."""
        try:
            mirror = self._transport.mirror(self._group_count, plan.manifest, staging.device)
        except TransportError as error:
            self.raise_cause(error)
        return staging.mirror(there) if mirror is None else mirror

    def raise_cause(self, error: CommschedError) -> NoReturn:
        """Report ``error``, and raise the failure of the job."""
        self._report(error)
        with self._lock_to_wait():
            self._wait_until(lambda: False, lambda: Wait("to learn why the job failed"))
        raise error  # never: the wait ends by raising the failure

    def release(self, group: TensorGroup) -> None:
        """Release ``group``, and the groups of its norms, in the transport: each at once if none of its tasks is outstanding,
        otherwise when the last is done."""
        with self._lock:
            if group.is_released:
                return
            for each in (group, *group.norms):
                each.is_released = True
            self._changes.drop_released()
            self._adopt_config()
            # Norms that are not there yet follow the outstanding averages, because other ranks may wait for them.
            idle = [each for each in group.norms if each.active == 0 and each.unfinished == 0]
            if group.active == 0:
                idle += self._over(group)
            for each in idle:
                self._forget(each)
        for each in idle:
            self._transport.release(each.index)
        for observer in self.observers:
            observer.on_release(group.index, monotonic())

    def _over(self, group: TensorGroup) -> list[TensorGroup]:
        """``group``, released and with its last task done, and the groups of its norms if those never come, because the
        step was broken off. Called with the lock held."""
        return [group, *(norms for norms in group.norms if norms.active == 0 and norms.unfinished > 0)]

    def _forget(self, group: TensorGroup) -> None:
        """Drop all that is kept of the group: a job may average another value in each step. Called with the lock held, when no
        task of the group is outstanding."""
        if self._agreement is not None:
            self._agreement.release(group.index)
        self._changes.forget(group.index)
        self._not_finite.forget(group.index)
        self._samples.take(group.index)
        forgotten = self._pace.end(group.index, group.manifest.nbytes)
        if forgotten is not None:
            self._stragglers.forget(forgotten)
            self._drop(self._groups.get(forgotten))
        if not self._pace.knows(group.index):
            self._drop(group)
        group.tasks = ()

    def _drop(self, group: TensorGroup | None) -> None:
        """Drop ``group``, unless its last step was broken off: ranks that wait for that step ask about it. Called with the lock
        held."""
        if group is None or group.unfinished:
            return
        self._groups.pop(group.index, None)
        if group.next_step != 1:  # most had one step; an order is static only after several: see ``prepare_leave``
            self._last_steps[group.index] = group.next_step

    def begin_step(self, group: TensorGroup) -> int:
        with self._lock_to_wait():
            self._wait_until(
                lambda: group.is_between_steps and not self._changes.is_held(group),
                lambda: self._wait_for_step(group, f"to begin step {group.next_step}"),
            )
            if (config := self._changes.begin_step(group)) is not None:
                self._recut(group, config)
            if group.norms and not group.splits:
                self._split_for_norms(group)
            step = group.open_step()
            now = monotonic()
            for norms in group.norms:
                self._changes.begin_step(norms)  # it begins the same step, and is never cut anew
                norms.open_step()
            if group.norms and group.unmeasured == 0:
                self._norms_ready(group, now)
            report = self._pace.step_begins(group.index, step, now)
            if report is not None and step == SAMPLED_STEP + 1:
                report = report._replace(digest=self._samples.take(group.index))
        for observer in self.observers:
            observer.on_step(group.index, step, now)
        if (on_step := self.on_step) is not None:  # another thread may set it to None
            on_step(group.index, step, now)
        if report is not None and self._stalls is not None and self._transport.world_size > 1:
            self._send_report(PACE, report)
        return step

    def _recut(self, group: TensorGroup, config: SchedulerConfig) -> None:
        """Cut ``group`` anew, between two steps. Called with the lock held."""
        group.plan = self.cut(group.manifest, config)
        group.splits = self._splits(config.collective)
        if self._agreement is not None:
            self._agreement.recut(group.index)
        self._adopt_config()

    def _split_for_norms(self, group: TensorGroup) -> None:
        """Over collectives, norms need reduce-scatters, whatever the configuration. Called with the lock held, between two
        steps."""
        if REDUCE_SCATTER in self._transport.verbs:
            group.splits = True
            if self._agreement is not None:
                self._agreement.recut(group.index)  # a static order has other tasks

    def notify_ready(self, group: TensorGroup, tensors: Sequence[int]) -> None:
        now = monotonic()
        with self._lock:
            if self._failure is not None or self._closed:
                self._check()
            for task in group.gradients_written(tensors):
                self._add(task, now)
        for observer in self.observers:
            for tensor in tensors:
                observer.on_ready(group.index, tensor, now)

    def keep_agreed(self, group: TensorGroup) -> None:
        with self._lock:
            if self._agreement is not None and not self._freezes_all:
                self._agreement.keep_agreed(group.index)
                self._wake()

    def notify_queued(self, group: DeviceGroup, tensors: Sequence[int], after: Event) -> None:
        """Do what :meth:`notify_ready` does, for a group on a device, where the gradients are there ``after`` an event."""
        tasks: list[CommTask] = []
        with self._lock:
            if self._failure is not None or self._closed:
                self._check()
            try:
                tasks += group.gradients_written(tensors)
            finally:
                # With the lock held: no other thread's event may come between the last gradient of a task and those before.
                group.kernels.notified(group, [tensor for tensor in tensors if tensor in group.notified], tasks, after)

    def _add(self, task: CommTask, now: float) -> None:
        """Called with the lock held."""
        task.ready_at = now
        try:
            if self._parted is not None:
                raise self._left_behind(self._parted, task)
            task.order = self._order.add(task)
            if not is_key(task.order):
                raise ConfigError(
                    f"policy={self.config.policy!r} has the key {task.order!r} for {self._describe(LaunchKey.of(task))}; it "
                    "must be an int from 0 to 2^32 - 1"
                )
        except CommschedError as error:
            self._failed_inside = self._failed_inside or error
        self._wake()
        self._look_at_waits()

    def _wake(self) -> None:
        """Wake the dispatcher if it waits and has something to do: a wake-up costs more than most calls that lead here. Called
        with the lock held."""
        if self._is_idle and (self._failed_inside is not None or self._order.has_work()):
            self._rouse()

    def _rouse(self) -> None:
        """Wake the dispatcher if it waits. Called with the lock held."""
        if self._is_idle:
            self._is_idle = False
            self._wakes.put(None)

    def wait_for(self, proxy: DependencyProxy) -> None:
        began = monotonic()
        with self._lock_to_wait():
            self._wait_until(lambda: proxy.is_open, lambda: self._wait_for_proxy(proxy))
        for observer in self.observers:
            observer.on_span("wait", proxy.name, began, monotonic())

    def pace(self, group: int, steps: int) -> PaceReport | None:
        """Medians over the last ``steps`` steps of ``group`` on this rank; None before its first step has ended. Any thread."""
        with self._lock:
            known = self._groups.get(group)
            return None if known is None else self._pace.latest(group, known.step, steps)

    def measures_norms(self, group: int) -> bool:
        """Whether norms of the averages of ``group`` are told before the averages. Any thread."""
        known = self._groups.get(group)
        return known is not None and bool(known.norms)

    @property
    def same_gradients(self) -> tuple[int, ...]:
        """On rank 0: the ranks that were found to have the same gradients, before these were averaged. Any thread."""
        return self._duplicates.ranks

    def own_parts(self, group: int) -> dict[int, tuple[float, ...]]:
        """On rank 0: by rank, the seconds of a step of ``group`` without waiting, in each of the last parts that all ranks have
        reported (see ``core/pace.py``). Empty before that. Any thread."""
        with self._lock:
            return self._stragglers.own_parts(group)

    def drain(self) -> None:
        """Wait until every task that became ready is done, but for those stuck in a static order behind one that is not."""
        with self._lock_to_wait():
            self._wait_until(lambda: not self._is_moving(), self._wait_for_last, drains=True)
            devices = list(self._kernels.values())
        for kernels in devices:
            self.wait_for_call(kernels.when_settled, f"for averages to be on {kernels.device.name}")
        if devices:
            with self._lock_to_wait():  # a copy may have failed
                self._wait_until(lambda: not self._reported, lambda: Wait("to learn why the job failed"))

    def wait_for_call(self, ask: Callable[[Callable[[], None]], None], what: str) -> None:
        """Wait for a call of the function that ``ask`` is given. It may come from any thread. ``what`` completes the sentence
        "rank 0 has waited 6 s ..."."""
        came = False

        def come() -> None:
            nonlocal came
            with self._lock:
                came = True
                self._progress.notify_all()

        ask(come)
        with self._lock_to_wait():
            self._wait_until(lambda: came, lambda: Wait(what), drains=True)

    def _is_moving(self) -> bool:
        return any(map(self._moves, self._groups.values()))

    def _moves(self, group: TensorGroup) -> bool:
        """Whether a task of ``group`` is outstanding and can start and finish without the engine."""
        return group.active > (self._agreement.blocked_count(group.index) if self._agreement is not None else 0)

    def check(self) -> None:
        """Raise the first failure, if there is one, or ClosedError after close."""
        with self._lock:
            self._check()

    # --- agreed changes of configuration (see ``commsched/control``) ---

    def hold_steps(self) -> dict[int, int]:
        """Return a step for each group. The group begins neither that step nor a later one until ``switch_at`` is called. A
        group that is added meanwhile begins only its step 0."""
        with self._lock:
            return self._changes.hold()

    def without_released(self, steps: Mapping[int, int]) -> dict[int, int]:
        """The entries of ``steps`` for groups that may begin a step here, or that are not added yet."""
        return self._changes.without_released(steps)

    def switch_at(self, config: SchedulerConfig | None, steps: Mapping[int, int]) -> None:
        """Use ``config`` from step ``steps[group]`` of each group on, and let the steps held by ``hold_steps`` begin.
        ``config=None`` means the configuration agreed on last. A group in ``steps`` may not be added here yet."""
        with self._lock:
            self._changes.agree(config, steps)
            self._adopt_config()
            self._progress.notify_all()

    def _adopt_config(self) -> None:
        """Called with the lock held, after anything by which a change may have come into use."""
        if self.config != self._changes.current:
            self.config = self._changes.current
            self._order.reconfigure(make_policy(self.config.policy), self.config.credit_bytes)
            if self._agreement is not None:
                self._agreement.let_freeze(self.config.order == "static")
            for kernels in self._kernels.values():
                kernels.use(make_policy(self.config.policy))
            self._rouse()

    # --- the dispatcher thread ---

    def _dispatch(self) -> None:
        while True:
            with self._lock:
                if not (work := self._next_work()):
                    if self._closed:
                        return
                    self._is_idle = True
            if not work:
                self._wakes.get()
                continue
            for act in work:
                try:
                    act()
                except CommschedError as error:
                    self._report(error)
                except Exception as error:
                    self._report(self._bug("the dispatcher", error))
            del act, work  # they hold a task, which must not keep its buffer alive until the next work comes

    def _next_work(self) -> list[Callable[[], None]]:
        """The calls to make now, after the lock is released. Called with the lock held."""
        work: list[Callable[[], None]] = []
        if self._released:
            work += [partial(self._transport.release, group.index) for group in self._released]
            self._released.clear()
        if self._failure or self._reported or self._closed:
            return work
        if (failed := self._failed_inside) is not None:
            return [*work, lambda: self._report(failed)]
        try:
            task = self._order.next()
            if self._agreement is not None:
                work += self._messages(self._agreement)
        except CommschedError as error:  # the ranks differ: the last task of a static step shows it
            return [*work, partial(self._report, error)]
        except Exception as error:
            return [*work, partial(self._report, self._bug("the agreed order of launches", error))]
        if task is not None:
            task.advance("start")
            task.started_at = monotonic()
            work.append(partial(self._start, task))
            if task.verb == ALL_REDUCE and (group := self._groups[task.group]).norms:
                self._measured(group, task.started_at)
        if self._releases and not self._is_moving():
            work += self._releases
            self._releases = []
        return work

    def _bug(self, what: str, error: Exception) -> TransportError:
        """The failure of the job by a bug of ours, or of a transport, which must not silently end the dispatcher."""
        log.error("%s failed", what, exc_info=error)
        rank = self._transport.rank
        return TransportError(f"rank {rank}: {what} failed: {error_text(error)}", rank=rank)

    def _collect(self, task: CommTask) -> None:
        self._call_transport(task, lambda: self._transport.collect(task, self._collected))

    def _collected(self, tasks: Sequence[CommTask]) -> None:
        self._agree(lambda agreement: agreement.collected(tasks))

    def _start(self, task: CommTask) -> None:
        # Data on a device cannot be checked without waiting for the device. An all-gather sends averages, not gradients.
        if self._looks and isinstance(task.data, memoryview) and task.verb != ALL_GATHER:
            if not looks_finite(task.partition.dtype, task.data):
                self._warn_of_not_finite(task)
            if task.step == SAMPLED_STEP:
                self._samples.add(task, self._groups[task.group].manifest)
        self._call_transport(task, lambda: self._transport.start(task, self))

    def _call_transport(self, task: CommTask, call: Callable[[], None]) -> None:
        try:
            call()
        except CommschedError as error:
            self._report(error)
        except Exception as error:
            log.exception("the transport raised")
            rank = self._transport.rank
            with self._lock:
                where, group = self._describe(LaunchKey.of(task)), self._groups.get(task.group)
            tensor = group.manifest.tensors[task.partition.tensors[0]].name if group is not None else None
            said = f"rank {rank}: the transport raised {error_text(error)} at {where}"
            self._report(TransportError(said, rank=rank, step=task.step, tensor=tensor))

    # --- agreement on an order: only the dispatcher sends, so that messages stay in order ---

    def _messages(self, agreement: AgreedOrder) -> list[Callable[[], None]]:
        work: list[Callable[[], None]] = [partial(self._collect, task) for task in agreement.to_collect()]
        announces = self._transport.rank == 0
        for message, to in agreement.outgoing():
            if announces:
                work.append(partial(self._send, partial(self._messenger.announce, ORDER, message, to)))
            else:
                work.append(partial(self._send, partial(self._messenger.send_to_rank_0, ORDER, message)))
        if agreement.wants_change():
            # Every agreed change ends a frozen order. This one changes nothing else, whatever is agreed on meanwhile.
            work.append(partial(self._send, partial(self._messenger.propose, {})))
        if self._flushing:
            work.append(self._flushed)
        return work

    def _flushed(self) -> None:
        with self._lock:
            self._flushing = False
            self._progress.notify_all()

    def _send(self, send: Callable[[], None]) -> None:
        try:
            send()
        except CommschedError as error:  # the control channel is lost or closed
            self._report(error)

    def on_message(self, rank: int, topic: str, value: Any) -> None:
        """Handle a message that ``rank`` sent to rank 0 (see ``interfaces.Messenger``); called on rank 0. Any thread, one call
        at a time. Never blocks."""
        if topic == ORDER:
            self._agree(lambda agreement: agreement.on_message(rank, value))
        elif topic == STALL and self._stalls is not None:
            self._stalls.on_message(rank, value)
        elif topic == PACE:
            report = PaceReport(*value)
            with self._lock:  # a rank may report its last steps of a group that is forgotten here
                lines = self._stragglers.add(rank, report) if self._pace.knows(report.group) else []
                duplicates = self._duplicates.add(rank, report)
            for line in lines if duplicates is None else [*lines, duplicates]:
                log.warning("%s", line)
        elif topic == NOT_FINITE:
            with self._lock:
                first = self._first_not_finite.add(rank, NotFiniteReport(*value))
            if first is not None:
                log.warning("%s", first)

    def on_announced(self, topic: str, value: Any) -> None:
        """Handle a message that rank 0 announced; called on the other ranks. Any thread, one call at a time. Never blocks."""
        if topic == ORDER:
            self._agree(lambda agreement: agreement.on_announced(value))
        elif topic == STALL and self._stalls is not None:
            self._stalls.on_announced(value)

    def leave(self, rank: int) -> None:
        """Note that ``rank`` will send nothing more: any task that still needs it fails with PeerLost instead of waiting. Any
        thread."""
        self._transport.leave(rank)
        if self._stalls is not None:
            self._stalls.leave(rank)
        self._agree(lambda agreement: agreement.leave(rank))

    def part(self, rank: int, release: Callable[[], None]) -> None:
        """Note that ``rank``, which has left, wants to end its process. Calls ``release``, from any thread, once this rank has
        all averages that ``rank`` took part in. Tasks that become ready from now on fail with PeerLost. Any thread; never
        blocks."""
        with self._lock:
            self._parted = rank if self._parted is None else self._parted
            self._releases.append(release)
            self._rouse()

    def _left_behind(self, rank: int, task: CommTask) -> PeerLost:
        at = task.partition
        names = self._groups[task.group].manifest.names_in(at.dtype, at.start, at.stop)
        when, cure = (f"after step {task.step - 1}", FEWER_BATCHES) if task.step > 0 else ("before its first step", "")
        text = f"rank {rank} left {when}; the average of tensor {names} of step {task.step} waits for it{cure}"
        return PeerLost(text, rank=rank, step=task.step, tensor=self._groups[task.group].manifest.tensors[at.tensors[0]].name)

    def prepare_leave(self) -> None:
        """Announce that this rank begins no further step. Call it after :meth:`drain`, before the other ranks are notified
        that this rank has left."""
        if self._agreement is not None:
            self._report_leave(self._agreement)
        # The control channel notifies the other ranks. This notifies the part of this rank's transport that serves others.
        self._transport.leave(self._transport.rank)

    def _report_leave(self, agreement: AgreedOrder) -> None:
        with self._lock_to_wait():
            # This rank never completes a step that was broken off here.
            steps = {index: group.step if group.unfinished else group.next_step for index, group in self._groups.items()}
            steps |= self._last_steps
            agreement.prepare_leave(steps)
            self._flushing = True
            self._rouse()
            self._wait_until(lambda: not self._flushing, lambda: Wait("to leave"), drains=True)

    def _agree(self, event: Callable[[AgreedOrder], None]) -> None:
        with self._lock:
            if self._agreement is None or self._failure or self._closed:
                return
            try:
                event(self._agreement)
            except CommschedError as error:
                self._failed_inside = self._failed_inside or error
            self._wake()
            self._look_at_waits()

    def _look_at_waits(self) -> None:
        """Wake threads that wait if the order of launches may have ended their wait: tasks can never complete, which
        ends the job (:meth:`_fail_if_deadlocked`), or need not be drained. Called with the lock held."""
        if not self._waits or self._agreement is None:
            return
        if self._draining or self._agreement.deadlock_error() is not None:
            self._progress.notify_all()

    def _describe(self, key: LaunchKey) -> str:
        """Called with the lock held. ``key`` may come from another rank, so it may be unknown here."""
        what = f"partition {key.partition} of step {key.step}, {key.verb}"
        at = self._partition(key)
        if at is None:
            return f"an unknown tensor ({what}, group {key.group})"
        return f"tensor {self._groups[key.group].manifest.names_in(at.dtype, at.start, at.stop)} ({what})"

    def _locate(self, key: LaunchKey) -> str:
        at = self._partition(key)
        return range_of(at) if at is not None else ""

    def _partition(self, key: LaunchKey) -> Partition | None:
        group = self._groups.get(key.group)
        partitions = group.plan.partitions if group is not None else ()
        return partitions[key.partition] if 0 <= key.partition < len(partitions) else None

    # --- transport threads (Completion) ---

    def on_sent(self, task: CommTask) -> None:
        with self._lock:
            self._sent(task)

    def on_done(self, task: CommTask) -> None:
        if isinstance(task, StagedTask) and not task.owner.staging.copy_back(task):
            return
        with self._lock:
            if task.state is State.STARTED:
                self._sent(task)
            task.advance("notify_finish")
            task.done_at = monotonic()
            group = self._groups[task.group]
            if task.verb == REDUCE_SCATTER:
                self._add(group.scattered(task), task.done_at)
                if group.norms:
                    self._measured(group, task.done_at)
            elif group.task_done(task) or self._draining:  # a thread that drains waits for tasks, and not for tensors
                self._progress.notify_all()
            if group.is_released and group.active == 0:
                for each in (over := self._over(group)):
                    self._forget(each)
                self._released += over
                self._rouse()
            if self._releases:
                self._rouse()
        for observer in self.observers:
            observer.on_task(task)

    def _sent(self, task: CommTask) -> None:
        task.advance("notify_sent")
        task.sent_at = monotonic()
        self._order.sent(task)
        self._wake()

    def _measured(self, group: TensorGroup, now: float) -> None:
        """Note that the norms of ``group`` include one more task of the step, whatever becomes ready from now on. Called with
        the lock held."""
        group.unmeasured -= 1
        if group.unmeasured == 0:
            self._norms_ready(group, now)

    def _norms_ready(self, group: TensorGroup, now: float) -> None:
        """The norms of ``group`` may be asked for. A reduce-scatter that is done is included here. Contributions that have been
        started come to each server before the request, because every queue sends it behind them, so the server includes their
        averages first. Called with the lock held."""
        for norms in group.norms:
            if norms.unfinished == 0:
                continue  # added during this step, so the next one is its first
            for task in norms.gradients_written(range(len(norms.proxies))):
                self._add(task, now)
                task.order = LAST_KEY

    # --- gradients on a device (see ``staging``) ---

    def _kernels_of(self, device: Device) -> Kernels:
        """Return the object that waits for the kernels of ``device``. Groups are added one after another, so no two threads
        make it."""
        where = self._transport.device
        if where not in ("cpu", device.name):
            kind = type(self._transport).__name__
            raise UnsupportedError(
                f"{kind} averages on {where}: memory of {device.name} would be averaged in the host's memory"
            )
        calls: dict[str, Any] = {"ready": self._made_ready, "made": self._made, "report": self._report}
        with self._lock:
            self._check()
            kernels = self._kernels.get(device)
            if kernels is None:
                if where == "cpu":
                    kernels = Staging(device, self._transport.rank, make_policy(self.config.policy), **calls)
                else:
                    kernels = Kernels(device, self._transport.rank, **calls)
                self._kernels[device] = kernels
            return kernels

    def _made_ready(self, task: CommTask) -> None:
        with self._lock:
            if self._failure is None and not self._closed:
                task.advance("notify_ready")
                self._add(task, task.ready_at)

    def _made(self, group: DeviceGroup, tensors: Sequence[int], now: float) -> None:
        for observer in self.observers:
            for tensor in tensors:
                observer.on_ready(group.index, tensor, now)

    # --- failure and end ---

    def fail(self, error: CommschedError) -> None:
        """End the job with ``error``. The first failure counts: it ends every wait, and every later call raises it. Any thread.
        Never blocks."""
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            if isinstance(error, PeerLost | PeerTimeout) and error.step is None:
                self._say_where(error)
            self._rouse()
            self._progress.notify_all()

    def _say_where(self, error: CommschedError) -> None:
        """Add to ``error`` the step and the first tensor whose average was outstanding here. Called with the lock held."""
        unfinished = [group for group in self._groups.values() if group.unfinished]
        if not unfinished:
            return
        group = max(unfinished, key=lambda group: sum(group.manifest.buffer_bytes.values()))
        closed = [spec.name for spec, proxy in zip(group.manifest.tensors, group.proxies) if not proxy.is_open]
        if not closed:
            return
        error.step, error.tensor = group.step, closed[0]
        where = f"rank {self._transport.rank} was in step {group.step}"
        error.add_note(f"{where}: the average of '{closed[0]}'{and_more(len(closed) - 1)} had not arrived yet")

    def _report(self, error: CommschedError) -> None:
        """Pass on a failure that arose here. Waiting threads continue to wait for :meth:`fail`: a lost peer may have ended
        because of an earlier failure, which this rank is about to be notified of."""
        with self._lock:
            if self._reported or self._failure is not None or self._closed:
                return
            self._reported = True
        self._on_failure(error)

    def close(self) -> None:
        """End the dispatcher. Waits and later calls raise ClosedError. Idempotent. Any thread except a transport's.

        Raises:
            UnsupportedError: the calling thread has the lock, which the dispatcher needs to end. Nothing has changed.
        """
        with self._lock_to_wait():
            self._closed = True
            self._rouse()
            self._progress.notify_all()
        self._dispatcher.join()
        for kernels in self._kernels.values():
            kernels.close()

    def leave_in_child(self) -> None:
        """Make every wait and call raise ClosedError in a forked process, where no thread starts or completes tasks. The locks
        are replaced because threads that do not exist in the child may hold them."""
        self._lock = threading.RLock()  # a signal handler may come here in a thread that has it: see ``interrupts``
        self._wakes = SimpleQueue()
        self._progress = threading.Condition(self._lock)
        self._failure = ClosedError(FORKED)

    def _check(self) -> None:
        if self._failure is not None:
            self.has_raised = True
            raise self._failure
        if self._closed:
            raise ClosedError("this session is closed")

    @property
    def interrupts(self) -> bool:
        """Whether the caller has interrupted its thread while that had the lock; see ``interrupted.py``."""
        return is_held_here(self._lock)

    def _lock_to_wait(self) -> threading.RLock:
        """The lock, for a wait. Raises UnsupportedError: see :attr:`interrupts`."""
        if self.interrupts:
            raise UnsupportedError(INTERRUPTED)
        return self._lock

    def _wait_until(self, condition: Callable[[], bool], wait: Callable[[], Wait], drains: bool = False) -> None:
        """Called with the lock held. Raises the failure instead of waiting for ever. ``drains`` means that the wait does not
        include a step that was broken off."""
        self._check()
        if condition():
            return
        began = monotonic()
        self._pace.wait_begins(began)
        self._waits.append(wait)
        self._draining += drains
        try:
            self._wait(condition, wait, began, drains)
        finally:
            self._waits.remove(wait)
            self._draining -= drains
            self._pace.wait_ends(monotonic())

    def _wait(self, condition: Callable[[], bool], wait: Callable[[], Wait], began: float, drains: bool) -> None:
        warned = 0.0  # seconds of waiting at the last warning
        while not condition():
            self._fail_if_deadlocked(drains)
            left = self.next_warning(warned) - (monotonic() - began)
            if left > 0:
                self._progress.wait(left)
            else:
                warned = monotonic() - began
                self._warn(wait(), warned)
            self._check()

    def next_warning(self, warned: float) -> float:
        """The seconds of waiting after which a warning is due; ``warned`` are the seconds at the last one. Any thread."""
        due, stall = warned + self.warn_after_seconds, self._stall_after_seconds
        return min(due, stall) if stall is not None and warned < stall else due

    def _fail_if_deadlocked(self, drains: bool) -> None:
        error = self._agreement.deadlock_error(include_blocked=not drains) if self._agreement is not None else None
        if error is not None:
            self._failed_inside = self._failed_inside or error
            self._rouse()

    def _warn(self, wait: Wait, seconds: float) -> None:
        """Called with the lock held. Releases it meanwhile, because log handlers and the messenger are other people's code."""
        self._lock.release()
        try:
            self._waits_too_long(wait, seconds)
        finally:
            self._lock.acquire()

    # --- late ranks ---

    def stalled(self, group: TensorGroup, tensor: int, seconds: float) -> None:
        """See ``TensorGroup.stalled``."""
        self._waits_too_long(self._wait_for_tensor(group, tensor), seconds)

    def _waits_too_long(self, wait: Wait, seconds: float) -> None:
        if self._stalls is not None:
            self._stalls.waits(wait, seconds)
        else:
            log.warning("rank %d has waited %.0f s %s", self._transport.rank, seconds, wait.what)

    def _wait_for_proxy(self, proxy: DependencyProxy) -> Wait:
        group = next((group for group in self._groups.values() if proxy in group.proxies), None)
        if group is None:
            return Wait(f"for the average of '{proxy.name}', which was released")
        return self._wait_for_tensor(group, group.proxies.index(proxy))

    def _wait_for_tensor(self, group: TensorGroup, tensor: int) -> Wait:
        if group.measured is not None:
            return self._wait_for_step(group.measured, f"for the norms of the averages of step {group.step}")
        name = group.proxies[tensor].name
        # Plugins add tensors of their own, in which each rank reports its actions in a step.
        what = f"for {'the reports of all ranks in' if name.startswith('commsched.') else 'the average of'} '{name}'"
        what += f" of step {group.step}"
        return Wait(what, StepOfGroup(group.index, group.step, tensor))

    def _wait_for_step(self, group: TensorGroup, what: str) -> Wait:
        return Wait(what, StepOfGroup(group.index, group.step, -1) if not group.is_between_steps else None)

    def _wait_for_last(self) -> Wait:
        group = next((group for group in self._groups.values() if self._moves(group)), None)
        what = "for the last averages"
        return self._wait_for_step(group, what) if group is not None else Wait(what)

    def _progress_of(self, place: StepOfGroup) -> RankProgress:
        """This rank's answer about ``place``, for ``Stalls``."""
        with self._lock:
            group = self._groups.get(place.group)
            if group is None and place.group < self._group_count:
                return RankProgress(begun=place.step < self._last_steps.get(place.group, 1))
            if group is None or group.step < place.step:
                return RankProgress(begun=False, waits=self._waits[0]().what if self._waits else "")
            if group.step > place.step:
                return RankProgress()
            travel = group.plan.by_tensor[place.tensor] if place.tensor >= 0 else range(len(group.plan.partitions))
            together = {tensor for partition in travel for tensor in group.plan.partitions[partition].tensors}
            made = group.made | group.on_hand
            missing = [tensor for tensor in range(len(group.proxies)) if tensor not in made]
            here = [group.proxies[tensor].name for tensor in missing if tensor in together]
            elsewhere = [group.proxies[tensor].name for tensor in missing if tensor not in together]
            return progress_of(here, elsewhere, self.static_group == place.group)

    # --- reports to rank 0 ---

    def _send_report(self, topic: str, report: PaceReport | NotFiniteReport) -> None:
        if self._transport.rank == 0:
            self.on_message(0, topic, report)
            return
        try:
            self._messenger.send_to_rank_0(topic, report)
        except CommschedError:
            pass  # the session ends

    def _warn_of_not_finite(self, task: CommTask) -> None:
        report = self._not_finite.add(task, self._groups[task.group].manifest)
        if report is not None:
            self._send_report(NOT_FINITE, report)


#: All cores of this process, for :func:`_leave_in_child`.
_cores: WeakSet[Core] = WeakSet()


def _leave_in_child() -> None:
    for core in _cores:
        core.leave_in_child()


os.register_at_fork(after_in_child=_leave_in_child)
