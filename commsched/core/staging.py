"""Gradients in a device's memory: those that the transport averages there, and those that travel from the host's memory.

The host queues kernels long before they run. So a gradient is notified with the event behind its kernel, and its tasks are
STAGED until all their gradients are made. If the transport averages on the device, they are READY then, and averages are
complete when they are done. The rest of this page is about staging, for a transport that averages in the host's memory.

A group on a device has a *mirror* of its flat buffers in pinned memory of the host. Its tasks lie there, so transports need
not know of the device. A transport whose ranks share memory has the mirror there (``Transport.mirror``), and may leave
averages in other pinned memory. A task takes this way: all its gradients are notified (STAGED) -> their kernels are done,
which the events behind them say -> copy to the mirror -> READY, as any task -> the average is in the host's memory -> the copy
to the device is queued, and the proxies open at once, with an event behind that copy. Neither the engine's thread nor its
stream waits for a copy that it does not need.

Copies to the host take the order of the policy, among the gradients that are made: the host queues kernels long before they
run, and a copy that waited for one of the last would keep all others waiting. Copies to the device take the order in which
averages arrive, which is that of the network. Credit counts the network only: no copy waits for another rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, NoReturn, Protocol, cast

from .device import Device, DeviceEvent, DeviceStream
from .device_events import NOW, Event, EventWatcher
from .errors import CommschedError, TransportError, error_text
from .group import DependencyProxy, GroupCalls, TensorGroup
from .interfaces import Buffer
from .plan import Plan
from .scheduler import Policy, Scheduler
from .task import REDUCE_SCATTER, CommTask

#: Bytes of copies to the host that may be queued on the device. A more urgent gradient waits for them: 0.7 ms at 12 GB/s. They
#: keep the device busy until a thread of the host has woken up and queued the next ones.
MAX_BYTES_IN_FLIGHT = 8 * 2**20

#: Time limit for kernels and copies that are queued when the core is closed; kernels may still be if it ends in an error.
CLOSE_SECONDS = 5.0

#: What the device did when it failed.
_COMPUTED, _SENT, _RECEIVED = "computed the gradient of", "sent the host the gradient of", "received the average of"


class DeviceCalls(GroupCalls, Protocol):
    """The calls of groups on a device that ``Core`` carries out."""

    def notify_queued(self, group: DeviceGroup, tensors: Sequence[int], after: Event) -> None: ...

    def raise_cause(self, error: CommschedError) -> NoReturn: ...


class Arrival(NamedTuple):
    """A copy of an average to the device. Of two copies, the one with the greater number is behind the other."""

    number: int
    event: DeviceEvent


@dataclass(slots=True, eq=False, repr=False)
class StagedTask(CommTask):
    """A task whose ``data`` are in the mirror of ``owner``. ``there`` are the same bytes on the device."""

    there: Any = None
    owner: StagedGroup = field(init=False)
    arrival: Arrival | None = None


class StagedProxy(DependencyProxy):
    """It is open when the average is in the host's memory and its copy to the device is queued."""

    __slots__ = ("arrival", "owner")

    owner: StagedGroup

    def __init__(self, core: GroupCalls, name: str) -> None:
        super().__init__(core, name)
        self.arrival: Arrival | None = None  # the last copy to the device, of any of the tensor's partitions

    def wait(self, stream: DeviceStream | None = None) -> None:
        super().wait()
        self.owner.wait(self.arrival, stream, self.name)


class DeviceGroup(TensorGroup):
    """A group whose gradients are made on a device, after the events with which they are notified."""

    _when_notified = "stage"

    def __init__(
        self, core: DeviceCalls, index: int, plan: Plan, buffers: Mapping[str, Buffer], splits: bool, kernels: Kernels
    ) -> None:
        super().__init__(core, index, plan, buffers, splits)
        self.kernels = kernels
        self.made = set()
        self._calls = core

    def notify_ready(self, tensor: int, after: Event | None = None) -> None:
        self.notify_all_ready((tensor,), after)

    def notify_all_ready(self, tensors: Sequence[int], after: Event | None = None) -> None:
        self._calls.notify_queued(self, tensors, NOW if after is None else after)

    def open_step(self) -> int:
        step = super().open_step()
        self.made.clear()
        return step


class StagedGroup(DeviceGroup):
    """A group whose flat buffers are ``there``, in the memory of a device; ``buffers`` are their mirror."""

    _task_type = StagedTask
    _proxy_type = StagedProxy

    def __init__(
        self,
        core: DeviceCalls,
        index: int,
        plan: Plan,
        there: Mapping[str, Buffer],
        mirror: Mapping[str, memoryview],
        splits: bool,
        staging: Staging,
    ) -> None:
        super().__init__(core, index, plan, mirror, splits, staging)
        self.staging = staging
        self._there = there
        self._arrival: Arrival | None = None  # the last copy to the device
        for proxy in self.proxies:
            cast("StagedProxy", proxy).owner = self

    def begin_step(self, stream: DeviceStream | None = None) -> int:
        step = super().begin_step()
        if self._arrival is not None:
            self.wait(self._arrival, stream, self.proxies[0].name, keep_mirror=True)
        return step

    def wait(self, arrival: Arrival | None, stream: DeviceStream | None, name: str, keep_mirror: bool = False) -> None:
        """Let later work of ``stream`` wait for ``arrival``, of tensor ``name``; without a stream the host waits.
        ``keep_mirror``: so do later copies to the host.

        Raises:
            CommschedError: the device has failed, so the job has; see ``DependencyProxy.wait``.
        """
        if arrival is None:
            return
        try:
            if keep_mirror:
                self.staging.keep_mirror(arrival)
            if stream is not None:
                stream.wait(arrival.event)
            else:
                arrival.event.synchronize()
        except Exception as error:
            self._calls.raise_cause(self.staging.failure(self.step, name, _RECEIVED, error))

    def free_memory(self) -> None:
        self._there = {}
        super().free_memory()

    def open_step(self) -> int:
        step = super().open_step()
        for task in self.tasks:
            at = task.partition
            self._place(task, self._there[at.dtype][at.start : at.stop])
        return step

    def scattered(self, task: CommTask) -> CommTask:
        gather = super().scattered(task)
        self._place(gather, cast("StagedTask", task).there)
        return gather

    def _place(self, task: CommTask, there: Any) -> None:
        staged = cast("StagedTask", task)
        staged.there, staged.owner = there, self

    def task_done(self, task: CommTask) -> bool:
        arrival = cast("StagedTask", task).arrival
        self._arrival = _later(self._arrival, arrival)
        for tensor in task.partition.tensors:
            proxy = cast("StagedProxy", self.proxies[tensor])
            proxy.arrival = _later(proxy.arrival, arrival)
        return super().task_done(task)


def _later(one: Arrival | None, other: Arrival | None) -> Arrival | None:
    return max(one, other, key=lambda arrival: arrival.number) if one is not None and other is not None else one or other


class Kernels:
    """The thread that waits for the kernels that make gradients on one device of one rank.

    Args:
        ready: called with each task that the transport may have. It is called by one thread at a time.
        made: called with a group, tensors and a time when their kernels are done, and before their tasks are ready.
        report: called with a failure of the device. Any thread.
    """

    def __init__(
        self,
        device: Device,
        rank: int,
        *,
        ready: Callable[[CommTask], None],
        made: Callable[[DeviceGroup, Sequence[int], float], None],
        report: Callable[[CommschedError], None],
    ) -> None:
        self.device = device
        self._rank = rank
        self._ready, self._made, self._report = ready, made, report
        self._kernels = EventWatcher("commsched-gradients")

    def notified(self, group: DeviceGroup, tensors: Sequence[int], tasks: Sequence[CommTask], after: Event) -> None:
        """Note that the gradients of ``tensors`` are made ``after`` an event, and those of ``tasks`` after this and all earlier
        events. Never waits. The core calls it with its lock held, so in the order of the notifications."""
        step, name = group.step, group.proxies[tensors[0]].name if tensors else ""
        self._kernels.call_after(
            after,
            lambda: self._kernels_done(group, step, tensors, tasks),
            lambda error: self._report(self.failure(step, name, _COMPUTED, error)),
        )

    def _kernels_done(self, group: DeviceGroup, step: int, tensors: Sequence[int], tasks: Sequence[CommTask]) -> None:
        now = monotonic()
        if group.step == step:  # a tensor without elements does not keep the step open
            group.made.update(tensors)
        self._made(group, tensors, now)
        for task in tasks:
            task.ready_at = now
        self._begin(tasks)

    def _begin(self, tasks: Sequence[CommTask]) -> None:
        """All gradients of ``tasks`` are made."""
        for task in tasks:
            self._ready(task)

    def failure(self, step: int, tensor: str, did: str, error: Exception) -> CommschedError:
        """The failure of the job that follows from ``error``, which the device raised for what it did in a step."""
        if isinstance(error, CommschedError):
            return error
        cause = error_text(error)
        text = f"rank {self._rank}: {self.device.name} failed while it {did} '{tensor}' in step {step}: {cause}"
        return TransportError(text, rank=self._rank, step=step, tensor=tensor)

    def use(self, policy: Policy) -> None:
        """Continue with another policy."""

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call ``call`` when all averages that are there are on the device."""
        call()

    def close(self) -> None:
        """Queue no further copy, and wait for those that are queued. Idempotent."""
        self._kernels.close(CLOSE_SECONDS)


class Staging(Kernels):
    """The copies between one device and the host of one rank, and the threads that wait for the device. A task is ready when
    its gradients are in the mirror. ``policy`` is the order of copies to the host; the other arguments are as before."""

    def __init__(self, device: Device, rank: int, policy: Policy, **calls: Any) -> None:
        super().__init__(device, rank, **calls)
        self._lock = threading.Lock()  # guards all below, and the two streams
        self._to_host, self._to_device = device.stream(), device.stream()
        self._waiting: Scheduler[StagedTask] = Scheduler(policy, MAX_BYTES_IN_FLIGHT)
        self._arrivals = 0
        self._closed = False
        # Each of the three waits for events of streams that do not wait for those of the others.
        self._out, self._back = EventWatcher("commsched-copies-out"), EventWatcher("commsched-copies-back")

    def mirror(self, there: Mapping[str, Buffer]) -> dict[str, memoryview]:
        """Return new memory of the host for the bytes of buffers on the device."""
        return {dtype: self.device.allocate_host(len(buffer)) for dtype, buffer in there.items()}

    def use(self, policy: Policy) -> None:
        with self._lock:
            self._waiting.use(policy)

    # --- to the host ---

    def _begin(self, tasks: Sequence[CommTask]) -> None:
        with self._lock:
            for task in tasks:
                self._waiting.add(cast("StagedTask", task))
            self._queue_copies()

    def _queue_copies(self) -> None:
        """Called with the lock held."""
        while not self._closed and (task := self._waiting.next()) is not None:
            try:
                self._to_host.copy(task.data, task.there)
                event: Event = self._to_host.record()
            except Exception as error:
                event = _Failed(error)
            self._out.call_after(event, partial(self._sent, task), partial(self._task_failed, task, _SENT))

    def _sent(self, task: StagedTask) -> None:
        self._ready(task)
        with self._lock:
            self._waiting.sent(task)
            self._queue_copies()

    # --- to the device ---

    def copy_back(self, task: StagedTask) -> bool:
        """Queue the copy of the average of ``task`` to the device, if it is complete. False if the task must not end, because
        the core is closed or the device has failed. Never waits."""
        if task.verb == REDUCE_SCATTER:
            return True
        with self._lock:
            if self._closed:
                return False
            try:
                self._to_device.copy(task.there, task.data)
                event = self._to_device.record()
            except Exception as error:
                failed = error
            else:
                self._arrivals += 1
                task.arrival = Arrival(self._arrivals, event)
                # It keeps the task, and with it both memories, until the copy is done.
                self._back.call_after(event, partial(_keep, task), partial(self._task_failed, task, _RECEIVED))
                return True
        self._task_failed(task, _RECEIVED, failed)
        return False

    def keep_mirror(self, arrival: Arrival) -> None:
        """Let copies to the host that are queued from now on wait for ``arrival``, which reads the mirror."""
        with self._lock:
            self._to_host.wait(arrival.event)

    # --- failure and end ---

    def _task_failed(self, task: StagedTask, did: str, error: Exception) -> None:
        self._report(self.failure(task.step, task.owner.proxies[task.partition.tensors[0]].name, did, error))

    def when_settled(self, call: Callable[[], None]) -> None:
        self._back.when_settled(call)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        deadline = monotonic() + CLOSE_SECONDS
        for watcher in (self._out, self._back, self._kernels):
            watcher.close(max(0.0, deadline - monotonic()))


class _Failed:
    """The event behind a copy that could not be queued."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def synchronize(self) -> None:
        raise self._error


def _keep(task: StagedTask) -> None:
    pass
