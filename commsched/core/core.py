"""Core: the only lock and the only dispatcher thread.

Decide under the lock, act after releasing it: the transport, the observer and failure callbacks are never called with
the lock held, and nothing here polls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from .config import SchedulerConfig
from .errors import ClosedError, CommschedError, TransportError, UnsupportedError
from .group import TensorGroup
from .order import Order
from .order.agreed import AgreedOrder
from .order.key import Key, range_of
from .plan import Partition, Plan, cut
from .policies import make_policy
from .ports import Messenger, Observer, OnFailure, Sliceable, Transport
from .proxy import DependencyProxy
from .scheduler import Scheduler
from .task import ALL_GATHER, REDUCE_SCATTER, CommTask, State

log = logging.getLogger("commsched")


class _NoMessenger:
    """For transports that need no agreement."""

    def tell(self, value: Any) -> None:
        raise AssertionError(f"nothing is to be told, but {value}")

    announce = propose = tell


@dataclass
class _Switch:
    """An agreed change of configuration: a group applies it before it begins its step. ``number`` counts the changes."""

    number: int
    config: SchedulerConfig
    steps: dict[int, int]


class Core:
    """Takes gradients from engine threads, starts partitions by policy and credit, opens dependency proxies.

    Args:
        transport: averages partitions; ``Core`` calls its ``start`` from the dispatcher thread only.
        config: partition, credit and policy to begin with.
        observer: told of every task, if given.
        on_failure: told, once and from any thread, of the first failure that arose here, which may be the consequence of
            another: it is to have :meth:`fail` called with what counts, at once or a moment later. None: that one counts.
        warn_after_seconds: a wait longer than this is logged, and again each time as long.
        messenger: for an ordered transport of more than one rank: how the ranks agree on the order.
        order: on an ordered transport, ``agreed`` always, or ``static`` once it repeats itself.

    Raises:
        UnsupportedError: the transport cannot do what ``config`` asks for.
    """

    def __init__(
        self,
        transport: Transport,
        config: SchedulerConfig,
        *,
        observer: Observer | None = None,
        on_failure: OnFailure | None = None,
        warn_after_seconds: float = 10.0,
        messenger: Messenger | None = None,
        order: str = "agreed",
    ) -> None:
        self._transport = transport
        self.require_supported(config, order)
        self.config = self._agreed_config = config
        self.observer = observer
        if transport.ordered and messenger is None:
            raise ValueError("an ordered transport needs a messenger")
        self._messenger: Messenger = messenger or _NoMessenger()
        self._on_failure = on_failure or self.fail
        self._warn_after_seconds = warn_after_seconds
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # the dispatcher waits here
        self._progress = threading.Condition(self._lock)  # engines wait here
        self._agreement = self._make_agreement(config, order) if transport.ordered else None
        self._order: Order = self._agreement or Scheduler(make_policy(config.policy), config.credit_bytes)
        self._groups: list[TensorGroup] = []
        self._holds: dict[int, int] = {}
        self._switches: list[_Switch] = []  # agreed, but not yet applied by every group
        self._agreed = self._adopted = 0  # numbers of the last change agreed on, and of the one that config is from
        self._failure: CommschedError | None = None
        self._failed_inside: CommschedError | None = None  # found with the lock held: the dispatcher is to tell it
        self._reported = False  # a failure arose here: nothing starts any more
        self._closed = False
        self._flushing = False  # until all messages are sent
        self._dispatcher = threading.Thread(target=self._dispatch, name="commsched-dispatch", daemon=True)
        self._dispatcher.start()

    def _make_agreement(self, config: SchedulerConfig, order: str) -> AgreedOrder:
        return AgreedOrder(
            self._transport.rank,
            self._transport.world_size,
            make_policy(config.policy),
            config.credit_bytes,
            freeze=order == "static",
            describe=self._describe,
            locate=self._locate,
        )

    def require_supported(self, config: SchedulerConfig, order: str = "agreed") -> None:
        """Check that the transport can do what ``config`` asks for.

        Raises:
            UnsupportedError: it cannot; says what.
        """
        transport = self._transport
        if self._splits(config.policy) and not {REDUCE_SCATTER, ALL_GATHER} <= transport.verbs:
            raise UnsupportedError(
                f"policy={config.policy!r} averages by reduce-scatter and all-gather, which {type(transport).__name__} does "
                "not have; use transport=gloo, mpi or nccl without hierarchy, or policy=priority"
            )
        if order == "static" and transport.ordered and transport.channels < 2:
            raise UnsupportedError(
                f"order='static' needs two channels, and {type(transport).__name__} has one; use order=agreed"
            )

    def _splits(self, policy: str) -> bool:
        return self._transport.world_size > 1 and make_policy(policy).splits  # one rank has nothing to split

    @property
    def is_static(self) -> bool:
        """Whether an order is static now, and not agreed on launch by launch."""
        return self._agreement is not None and self._agreement.is_static

    @property
    def group_count(self) -> int:
        """How many groups were added; the index of the next."""
        return len(self._groups)

    # --- engine threads ---

    def add_group(self, plan: Plan, buffers: Mapping[str, Sliceable], policy: str | None = None) -> TensorGroup:
        """Take over the tensors of ``plan``; ``buffers`` maps each dtype to its flat buffer of bytes.

        Ranks add equal plans in the same order, and with them the same ``policy`` (None: that of ``config``), which says
        whether averages are split; the caller has made sure of it.

        Raises:
            TransportError: the job failed; names the first cause.
            CommschedError: what else ``Transport.add_group`` raises.
        """
        with self._lock:
            self._check()
            splits = self._splits(policy or self.config.policy)
            group = TensorGroup(self, len(self._groups), plan, buffers, splits)
            self._groups.append(group)
            if self._agreement is not None:
                self._agreement.add_group(group.index, sum(plan.manifest.buffer_bytes.values()))
        try:
            self._transport.add_group(group.index, plan.manifest)
        except TransportError as error:  # a peer that is gone may be the consequence of another
            self._report(error)
            with self._lock:
                self._wait_until(lambda: False, lambda: "to be told why the job failed")
        return group

    def release(self, group: TensorGroup) -> None:
        with self._lock:
            if self._agreement is not None:
                self._agreement.release(group.index)
            idle = group.active == 0  # else the job has failed, or is about to: what it has goes with the transport
        if idle:
            self._transport.release(group.index)

    def begin_step(self, group: TensorGroup) -> int:
        with self._lock:
            self._wait_until(
                lambda: group.unfinished == 0 and group.next_step < self._holds.get(group.index, group.next_step + 1),
                lambda: f"to begin step {group.next_step}",
            )
            self._apply_switches(group)
            step = group.open_step()
        if self.observer is not None:
            self.observer.on_step(group.index, step, monotonic())
        return step

    def notify_ready(self, group: TensorGroup, tensor: int) -> None:
        now = monotonic()
        with self._lock:
            self._check()
            for task in group.gradient_written(tensor):
                self._add(task, now)
        if self.observer is not None:
            self.observer.on_ready(group.index, tensor, now)

    def _add(self, task: CommTask, now: float) -> None:
        """Called with the lock held."""
        task.ready_at = now
        try:
            task.order = self._order.add(task)
        except CommschedError as error:
            self._failed_inside = self._failed_inside or error
        self._work.notify()

    def wait_for(self, proxy: DependencyProxy) -> None:
        began = monotonic()
        with self._lock:
            self._wait_until(lambda: proxy.is_open, lambda: f"for the average of tensor '{proxy.name}'")
        if self.observer is not None:
            self.observer.on_span("wait", proxy.name, began, monotonic())

    def drain(self) -> None:
        """Wait until every task that became ready is done.

        Raises:
            CommschedError: the session failed or was closed.
        """
        with self._lock:
            self._wait_until(lambda: not any(map(self._moves, self._groups)), lambda: "for the last averages", drains=True)

    def _moves(self, group: TensorGroup) -> bool:
        """Whether something of it is on its way, or will be without the engine's doing."""
        return group.active > (self._agreement.stuck(group.index) if self._agreement is not None else 0)

    def check(self) -> None:
        """Raise the first failure, if there was one, or ClosedError after close."""
        with self._lock:
            self._check()

    # --- agreed changes of configuration (see control) ---

    def hold_steps(self) -> dict[int, int]:
        """Promise, for each group, not to begin the step returned or a later one before ``switch_at`` is called."""
        with self._lock:
            self._holds = {group.index: group.next_step + 1 for group in self._groups if group.buffers}  # not the released
            return dict(self._holds)

    def switch_at(self, config: SchedulerConfig | None, steps: Mapping[int, int]) -> None:
        """Use ``config`` (None: the one agreed on last) from step ``steps[group]`` of each group on, and release what
        ``hold_steps`` held."""
        with self._lock:
            self._holds = {}
            self._agreed += 1
            self._agreed_config = config or self._agreed_config
            switch = _Switch(self._agreed, self._agreed_config, dict(steps))
            for earlier in self._switches:
                for group, step in steps.items():
                    if earlier.steps.get(group) == step:  # it has no step with that one
                        del earlier.steps[group]
            self._switches = [earlier for earlier in self._switches if earlier.steps]
            if switch.steps:
                self._switches.append(switch)
            else:
                self._adopt(switch)  # no group has steps to come: it is for those to be added
            self._progress.notify_all()

    def _apply_switches(self, group: TensorGroup) -> None:
        # Another rank may be a step ahead, so the next change can be agreed on before this rank has applied the last one.
        for switch in self._switches:
            if group.next_step >= switch.steps.get(group.index, group.next_step + 1):
                del switch.steps[group.index]
                group.plan = cut(group.manifest, switch.config.partition_bytes, switch.config.fusion_bytes)
                group.splits = self._splits(switch.config.policy)
                if self._agreement is not None:
                    self._agreement.recut(group.index)
                self._adopt(switch)
        self._switches = [switch for switch in self._switches if switch.steps]

    def _adopt(self, switch: _Switch) -> None:
        if switch.number <= self._adopted:  # a group that lags behind must not bring back an older credit or policy
            return
        self._adopted = switch.number
        if self.config != switch.config:
            self.config = switch.config
            self._order.reconfigure(make_policy(switch.config.policy), switch.config.credit_bytes)
            self._work.notify()

    # --- the dispatcher thread ---

    def _dispatch(self) -> None:
        while True:
            with self._lock:
                while not (work := self._next_work()):
                    if self._closed:
                        return
                    self._work.wait()
            for act in work:
                act()

    def _next_work(self) -> list[Callable[[], None]]:
        """What to do now, without the lock; called with it held."""
        if self._failure or self._reported or self._closed:
            return []
        if (error := self._failed_inside) is not None:
            return [lambda: self._report(error)]
        try:
            task = self._order.next()
            work = self._messages()
        except Exception as error:  # a bug of ours is a failure too, and not a dispatcher that is gone
            log.exception("the order of launches broke")
            broken = TransportError(f"the order of launches broke: {type(error).__name__}: {error}")
            return [lambda: self._report(broken)]
        if task is not None:
            task.advance("start")
            task.started_at = monotonic()
            work.append(partial(self._start, task))
        return work

    def _start(self, task: CommTask) -> None:
        try:
            self._transport.start(task, self)
        except CommschedError as error:
            self._report(error)
        except Exception as error:
            log.exception("the transport raised")
            self._report(TransportError(f"the transport raised {type(error).__name__}: {error} at {task!r}"))

    # --- agreeing on an order: only the dispatcher sends, so that messages keep theirs ---

    def _messages(self) -> list[Callable[[], None]]:
        if self._agreement is None:
            return []
        send = self._messenger.announce if self._transport.rank == 0 else self._messenger.tell
        work: list[Callable[[], None]] = [partial(self._send, send, message) for message in self._agreement.outgoing()]
        if self._agreement.wants_change():
            # Every agreed change ends a frozen order; this one changes nothing else, whatever is agreed on meanwhile.
            work.append(partial(self._send, self._messenger.propose, {}))
        if self._flushing:
            work.append(self._flushed)
        return work

    def _flushed(self) -> None:
        with self._lock:
            self._flushing = False
            self._progress.notify_all()

    def _send(self, send: Callable[[Any], None], message: Any) -> None:
        try:
            send(message)
        except CommschedError as error:  # the control channel is over
            self._report(error)

    def on_told(self, rank: int, message: Any) -> None:
        """For rank 0: what ``rank`` told; see ``ports.Messenger``. Any thread, one call at a time; never blocks."""
        self._agree(lambda agreement: agreement.told(rank, message))

    def on_announced(self, message: Any) -> None:
        """For the others: what rank 0 announced. Any thread, one call at a time; never blocks."""
        self._agree(lambda agreement: agreement.announced(message))

    def leave(self, rank: int) -> None:
        """``rank`` will send nothing more: what still needs it fails with PeerLost and does not wait. Any thread."""
        self._transport.leave(rank)
        self._agree(lambda agreement: agreement.leave(rank))

    def farewell(self) -> None:
        """This rank will begin no step any more; call it when all is drained, before this rank is said to have left."""
        if self._agreement is not None:
            self._tell_farewell(self._agreement)
        # The others are told by the control channel; what this rank's own transport does for others is told here.
        self._transport.leave(self._transport.rank)

    def _tell_farewell(self, agreement: AgreedOrder) -> None:
        with self._lock:
            # A step that was broken off here is one that this rank completes no more.
            steps = {group.index: group.step if group.unfinished else group.next_step for group in self._groups}
            agreement.farewell(steps)
            self._flushing = True
            self._work.notify()
            self._wait_until(lambda: not self._flushing, lambda: "to take leave", drains=True)

    def _agree(self, event: Callable[[AgreedOrder], None]) -> None:
        with self._lock:
            if self._agreement is None or self._failure or self._closed:
                return
            try:
                event(self._agreement)
            except CommschedError as error:
                self._failed_inside = self._failed_inside or error
            self._work.notify()

    def _describe(self, key: Key) -> str:
        """Called with the lock held; ``key`` may be another rank's, so nothing of it need be known here."""
        what = f"partition {key.partition} of step {key.step}, {key.verb}"
        at = self._partition(key)
        if at is None:
            return f"an unknown tensor ({what}, group {key.group})"
        return f"tensor {self._groups[key.group].manifest.names_in(at.dtype, at.start, at.stop)} ({what})"

    def _locate(self, key: Key) -> str:
        at = self._partition(key)
        return range_of(at) if at is not None else ""

    def _partition(self, key: Key) -> Partition | None:
        group = self._groups[key.group] if 0 <= key.group < len(self._groups) else None
        partitions = group.plan.partitions if group is not None else ()
        return partitions[key.partition] if 0 <= key.partition < len(partitions) else None

    # --- transport threads (Completion) ---

    def on_sent(self, task: CommTask) -> None:
        with self._lock:
            self._sent(task)

    def on_done(self, task: CommTask) -> None:
        with self._lock:
            if task.state is State.STARTED:
                self._sent(task)
            task.advance("notify_finish")
            task.done_at = monotonic()
            group = self._groups[task.group]
            if task.verb == REDUCE_SCATTER:
                self._add(group.scattered(task), task.done_at)
            elif group.task_done(task):
                self._progress.notify_all()
        if self.observer is not None:
            self.observer.on_task(task)

    def _sent(self, task: CommTask) -> None:
        task.advance("notify_sent")
        task.sent_at = monotonic()
        self._order.sent(task)
        self._work.notify()

    # --- failure and end ---

    def fail(self, error: CommschedError) -> None:
        """The first failure sticks, opens every wait and is raised at every later call. Any thread; never blocks."""
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            self._work.notify_all()
            self._progress.notify_all()

    def _report(self, error: CommschedError) -> None:
        """A failure arose here. Who waits goes on to wait for :meth:`fail`: a peer that is gone may have ended because of what
        this rank is about to be told."""
        with self._lock:
            if self._reported or self._failure is not None or self._closed:
                return
            self._reported = True
        self._on_failure(error)

    def close(self) -> None:
        """End the dispatcher; waits and later calls raise ClosedError. Idempotent; any thread but a transport's."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._progress.notify_all()
        self._dispatcher.join()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise ClosedError("this session is closed")

    def _wait_until(self, condition: Callable[[], bool], what: Callable[[], str], drains: bool = False) -> None:
        """Called with the lock held; raises the failure rather than wait for ever. ``drains``: a step that was broken off is
        not waited for."""
        self._check()
        began = monotonic()
        while not condition():
            self._require_hope(drains)
            if not self._progress.wait(self._warn_after_seconds):
                self._warn(f"rank {self._transport.rank} has waited {monotonic() - began:.0f} s {what()}")
            self._check()

    def _require_hope(self, drains: bool) -> None:
        error = self._agreement.in_vain(stuck_too=not drains) if self._agreement is not None else None
        if error is not None:
            self._failed_inside = self._failed_inside or error
            self._work.notify()

    def _warn(self, message: str) -> None:
        """Called with the lock held; log handlers are other people's code and are called without it."""
        self._lock.release()
        try:
            log.warning("%s", message)
        finally:
            self._lock.acquire()
