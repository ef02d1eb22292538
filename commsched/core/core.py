"""Core: the only lock and the only dispatcher thread.

Decide under the lock, act after releasing it: the transport, the observer and failure callbacks are never called with
the lock held, and nothing here polls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from .config import SchedulerConfig
from .errors import ClosedError, CommschedError, TransportError
from .group import TensorGroup
from .plan import Plan, cut
from .policies import make_policy
from .ports import Observer, OnFailure, Sliceable, Transport
from .proxy import DependencyProxy
from .scheduler import Scheduler
from .task import CommTask, State

log = logging.getLogger("commsched")


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
        on_failure: told, once and from any thread, of the first failure that arose here.
        warn_after_seconds: a wait longer than this is logged, and again each time as long.
    """

    def __init__(
        self,
        transport: Transport,
        config: SchedulerConfig,
        *,
        observer: Observer | None = None,
        on_failure: OnFailure | None = None,
        warn_after_seconds: float = 10.0,
    ) -> None:
        self.config = config
        self.observer = observer
        self._transport = transport
        self._on_failure = on_failure
        self._warn_after_seconds = warn_after_seconds
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # the dispatcher waits here
        self._progress = threading.Condition(self._lock)  # engines wait here
        self._scheduler: Scheduler[CommTask] = Scheduler(make_policy(config.policy), config.credit_bytes)
        self._groups: list[TensorGroup] = []
        self._holds: dict[int, int] = {}
        self._switches: list[_Switch] = []  # agreed, but not yet applied by every group
        self._agreed = self._adopted = 0  # numbers of the last change agreed on, and of the one that config is from
        self._failure: CommschedError | None = None
        self._closed = False
        self._dispatcher = threading.Thread(target=self._dispatch, name="commsched-dispatch", daemon=True)
        self._dispatcher.start()

    @property
    def group_count(self) -> int:
        """How many groups were added; the index of the next."""
        return len(self._groups)

    # --- engine threads ---

    def add_group(self, plan: Plan, buffers: Mapping[str, Sliceable]) -> TensorGroup:
        """Take over the tensors of ``plan``; ``buffers`` maps each dtype to its flat buffer of bytes.

        Ranks add equal plans in the same order; the caller has made sure of it.
        """
        with self._lock:
            self._check()
            group = TensorGroup(self, len(self._groups), plan, buffers)
            self._groups.append(group)
        self._transport.add_group(group.index, plan.manifest)
        return group

    def begin_step(self, group: TensorGroup) -> int:
        with self._lock:
            self._wait_until(
                lambda: group.unfinished == 0 and group.next_step < self._holds.get(group.index, group.next_step + 1),
                lambda: f"to begin step {group.next_step}",
            )
            self._apply_switches(group)
            return group.open_step()

    def notify_ready(self, group: TensorGroup, tensor: int) -> None:
        now = monotonic()
        with self._lock:
            self._check()
            for task in group.gradient_written(tensor):
                task.ready_at = now
                task.order = self._scheduler.add(task)
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
            self._wait_until(lambda: not any(g.active for g in self._groups), lambda: "for the last averages")

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

    def switch_at(self, config: SchedulerConfig, steps: Mapping[int, int]) -> None:
        """Use ``config`` from step ``steps[group]`` of each group on, and release what ``hold_steps`` held."""
        with self._lock:
            self._holds = {}
            self._agreed += 1
            switch = _Switch(self._agreed, config, dict(steps))
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
                self._adopt(switch)
        self._switches = [switch for switch in self._switches if switch.steps]

    def _adopt(self, switch: _Switch) -> None:
        if switch.number <= self._adopted:  # a group that lags behind must not bring back an older credit or policy
            return
        self._adopted = switch.number
        if self.config != switch.config:
            self.config = switch.config
            self._scheduler.reconfigure(make_policy(switch.config.policy), switch.config.credit_bytes)
            self._work.notify()

    # --- the dispatcher thread ---

    def _dispatch(self) -> None:
        while True:
            with self._lock:
                while (task := self._next()) is None:
                    if self._closed:
                        return
                    self._work.wait()
                task.advance("start")
                task.started_at = monotonic()
            try:
                self._transport.start(task, self)
            except CommschedError as error:
                self.fail(error)
            except Exception as error:
                log.exception("the transport raised")
                self.fail(TransportError(f"the transport raised {type(error).__name__}: {error} at {task!r}"))

    def _next(self) -> CommTask | None:
        return None if self._failure or self._closed else self._scheduler.next()

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
            if self._groups[task.group].task_done(task):
                self._progress.notify_all()
        if self.observer is not None:
            self.observer.on_task(task)

    def _sent(self, task: CommTask) -> None:
        task.advance("notify_sent")
        task.sent_at = monotonic()
        self._scheduler.sent(task)
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
        if self._on_failure is not None:
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

    def _wait_until(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        """Called with the lock held; raises the failure rather than wait for ever."""
        self._check()
        began = monotonic()
        while not condition():
            if not self._progress.wait(self._warn_after_seconds):
                self._warn(f"rank {self._transport.rank} has waited {monotonic() - began:.0f} s {what()}")
            self._check()

    def _warn(self, message: str) -> None:
        """Called with the lock held; log handlers are other people's code and are called without it."""
        self._lock.release()
        try:
            log.warning("%s", message)
        finally:
            self._lock.acquire()
