"""TensorGroup: the tensors of one model, as its plugin uses them, with their buffers and proxies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Protocol

from .device import DeviceStream
from .device_events import Event
from .errors import UnsupportedError, and_more
from .interfaces import Buffer
from .manifest import Manifest
from .plan import Plan
from .task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask


def require_buffers(manifest: Manifest, buffers: Mapping[str, Buffer], device: str) -> None:
    """Check that ``buffers`` can receive the averages of ``manifest`` on ``device``. Into other buffers, averages would be
    written to a copy (slices of a ``bytearray`` are copies) or to the wrong elements.

    Raises:
        ValueError: a buffer is missing, has the wrong size, or is not writable contiguous bytes; the message names the buffer
            and the reason.
    """
    for dtype, nbytes in manifest.buffer_bytes.items():
        if dtype not in buffers:
            raise ValueError(f"no buffer was given for {dtype}, of {nbytes} bytes")
        require_buffer(buffers[dtype], f"the buffer for {dtype}", device)
        if len(buffers[dtype]) != nbytes:
            raise ValueError(f"the buffer for {dtype} has {len(buffers[dtype])} bytes; its tensors have {nbytes}")


def require_buffer(buffer: Buffer, name: str, device: str) -> None:
    """Check that ``buffer`` is of a kind that can be averaged on ``device``.

    Raises:
        ValueError: it is not; the message calls it ``name``.
    """
    if device != "cpu":  # only the engine knows the type of the device's arrays
        if isinstance(buffer, memoryview | bytes | bytearray):
            raise ValueError(f"{name} is in the host's memory, not on {device}; transport=ps takes it there")
    elif not isinstance(buffer, memoryview):
        raise ValueError(f"{name} is a {type(buffer).__name__}; give a memoryview of its bytes")
    elif (buffer.format, buffer.ndim) != ("B", 1) or not buffer.c_contiguous:
        what = f"format {buffer.format!r}, shape {buffer.shape}, {'' if buffer.c_contiguous else 'not '}contiguous"
        raise ValueError(f"{name} is not a flat view of bytes ({what}); give contiguous memory, with cast('B')")
    elif buffer.readonly:
        raise ValueError(f"{name} is not writable")


class GroupCalls(Protocol):
    """The calls of groups and proxies that ``Core`` carries out."""

    def begin_step(self, group: TensorGroup) -> int: ...

    def notify_ready(self, group: TensorGroup, tensors: Sequence[int]) -> None: ...

    def wait_for(self, proxy: DependencyProxy) -> None: ...

    def stalled(self, group: TensorGroup, tensor: int, seconds: float) -> None: ...

    def keep_agreed(self, group: TensorGroup) -> None: ...

    def release(self, group: TensorGroup) -> None: ...

    def check(self) -> None: ...


class DependencyProxy:
    """Closed from ``begin_step`` until the averages of all partitions of one tensor are complete.

    Any thread may read ``is_open`` at any time. Any thread may call ``wait``, which raises the session's failure instead of
    waiting for ever. The proxy is open before the first step, although there is no average yet.
    """

    __slots__ = ("_core", "_missing", "is_open", "name")

    def __init__(self, core: GroupCalls, name: str) -> None:
        self._core = core
        self._missing = 0
        self.is_open = True
        self.name = name

    def wait(self, stream: DeviceStream | None = None) -> None:
        """Return when the average is complete. With a ``stream`` of the device that holds the average it may return earlier:
        only work that is queued there from now on finds the average complete."""
        if not self.is_open:
            self._core.wait_for(self)

    # Core calls the two methods below with its lock held.

    def close(self, partitions: int) -> None:
        self._missing = partitions
        self.is_open = partitions == 0

    def partition_done(self) -> bool:
        """Note that one partition's average is complete. True if it was the last, so that the proxy opened."""
        self._missing -= 1
        self.is_open = self._missing == 0
        return self.is_open

    def __repr__(self) -> str:
        return f"<DependencyProxy '{self.name}' {'open' if self.is_open else f'waits for {self._missing} partitions'}>"


class TensorGroup:
    """One manifest, its flat buffers and, for each tensor, a :class:`DependencyProxy`.

    The plugin calls ``begin_step`` for each step. Then, for each tensor in any order, it writes the gradient at
    ``manifest.offset(tensor)`` of its dtype's buffer and calls ``notify_ready(tensor)``, or ``notify_all_ready`` for several
    tensors at once. When the tensor's proxy is open, the average over all ranks has replaced the gradient. Every rank must
    notify every tensor of every step. Between ``notify_ready`` and the opening of the proxy the tensor's bytes belong to
    commsched.

    On a device the host runs ahead: by the arguments ``after`` and ``stream`` it notifies a gradient with the event behind its
    kernel, and lets a stream wait for averages. Groups in the host's memory need neither.

    ``begin_step``, the notifications and the waits of proxies raise the session's failure, or ClosedError after its close.

    ``Core.add_group`` makes groups. ``begin_step`` and ``release`` are for one engine thread. ``notify_ready`` and the waits
    of proxies may come from any thread, also concurrently. Ranks need not make any of these calls at the same time.
    """

    _task_type: ClassVar[type[CommTask]] = CommTask
    _proxy_type: ClassVar[type[DependencyProxy]] = DependencyProxy
    _when_notified: ClassVar[str] = "notify_ready"  # the event of a task when all its gradients are notified

    def __init__(self, core: GroupCalls, index: int, plan: Plan, buffers: Mapping[str, Buffer], splits: bool = False) -> None:
        self.index = index
        self.plan = plan
        self.splits = splits
        self.proxies = tuple(self._proxy_type(core, spec.name) for spec in plan.manifest.tensors)
        self.buffers = buffers
        self.next_step = 0
        self.tasks: tuple[CommTask, ...] = ()
        self.active = 0  # tasks between ready and done
        self.unfinished = 0  # tasks of this step that are not done
        self.notified: set[int] = set()
        self.made = self.notified  # gradients that are there, of those that are notified
        self.on_hand: set[int] = set()  # gradients that the engine has made, and that the plugin notifies later
        self.is_released = False
        self.norms: tuple[TensorGroup, ...] = ()  # the groups that carry the norms of this group's averages
        self.measured: TensorGroup | None = None  # the group whose norms this group carries
        self.unmeasured = 0  # tasks of this step whose averages its norms do not yet include for certain
        self._core = core

    @property
    def manifest(self) -> Manifest:
        return self.plan.manifest

    @property
    def step(self) -> int:
        """The current step, which is the one begun last; -1 before the first."""
        return self.next_step - 1

    def begin_step(self, stream: DeviceStream | None = None) -> int:
        """Begin the next step, which closes all proxies, and return its number. Waits until the previous step is done. If one
        of that step's tensors is never notified, it warns now and then, and waits until the job ends (``stall_after``).

        On a device the averages of the previous step may still be on their way into the flat buffers. This method waits for
        them. With a ``stream`` it does not, and only work that is queued there from now on may write gradients.

        Raises:
            ValueError: the group was released.
        """
        return self._core.begin_step(self)

    def notify_ready(self, tensor: int, after: Event | None = None) -> None:
        """Report that the gradient of ``tensor`` (its index in the manifest) is in the buffer, or will be there when the event
        ``after`` has happened. Never waits for the network.

        Raises:
            ValueError: the tensor was already notified in this step, or there is no such tensor, or no step has begun.
        """
        if after is not None:
            after.synchronize()
        self._core.notify_ready(self, (tensor,))

    def notify_all_ready(self, tensors: Sequence[int], after: Event | None = None) -> None:
        """Do what :meth:`notify_ready` does for each of ``tensors``, but take the core's lock once.

        A plugin that collects tensors for this call adds them to ``on_hand`` meanwhile, so that this rank is not said to be
        late with them.

        Raises:
            ValueError: see :meth:`notify_ready`; the tensors before the wrong one count as ready.
        """
        if after is not None:
            after.synchronize()
        self._core.notify_ready(self, tensors)

    def stalled(self, tensor: int, seconds: float) -> None:
        """Log which ranks have not sent ``tensor``, for a reader that has waited ``seconds`` for its average in the engine
        instead of at its proxy. The waits of a proxy log this themselves. Never blocks."""
        self._core.stalled(self, tensor, seconds)

    def keep_agreed(self) -> None:
        """Say that ``may_freeze`` of ``Session.register`` does not hold any more. From one of the next steps to the end, ranks
        agree on each launch of this group, unless the job was opened with ``order=static``. Never waits. Any thread."""
        self._core.keep_agreed(self)

    @property
    def is_over(self) -> bool:
        """Whether the group was released, so that no further step may begin."""
        return self.is_released or (not self.buffers and bool(self.manifest.tensors))

    def missing(self) -> list[int]:
        """The tensors that are not yet notified in the current step; none before the first step."""
        return [tensor for tensor in range(len(self.proxies)) if tensor not in self.notified] if self.next_step else []

    def require_whole_step(self) -> None:
        """Require that all tensors of the current step are notified. Other ranks wait for them, so another step would hang.

        Raises:
            UnsupportedError: backward was broken off on this rank; names a tensor.
            CommschedError: the session's failure, which has broken it off.
        """
        if missing := self.missing():
            self._core.check()
            raise UnsupportedError(
                f"step {self.step} was broken off: this rank has no gradient of '{self.manifest.tensors[missing[0]].name}'"
                f"{and_more(len(missing) - 1)}, for which other ranks wait"
            )

    def release(self) -> None:
        """Release the buffers; no further step may begin. All tensors of the last step must have been notified. The caller need
        not wait for their averages, but cannot use them: the memory is kept only until the transport is done with it. Ranks
        may release a group at different times.
        """
        self.free_memory()
        self._core.release(self)

    def free_memory(self) -> None:
        """The part of :meth:`release` that frees memory. It takes no lock, so a finalizer may call it in any thread."""
        self.buffers = {}
        self.tasks = ()
        for norms in self.norms:
            norms.buffers = {}  # its tasks become ready after this group's, and other ranks may wait for them

    # Core calls the methods below with its lock held.

    @property
    def is_between_steps(self) -> bool:
        """Whether the last step is done, and its norms are there."""
        return self.unfinished == 0 and not any(norms.unfinished for norms in self.norms)

    def add_norms(self, norms: TensorGroup) -> None:
        """Let ``norms`` carry the norms of this group's averages from the next step on. It has the same steps as this group."""
        self.norms += (norms,)
        norms.measured, norms.next_step = self, self.next_step

    def open_step(self) -> int:
        if self.is_over:
            raise ValueError(f"group {self.index} was released: no further step of it may begin")
        step = self.next_step
        self.next_step += 1
        self.notified.clear()
        self.on_hand.clear()
        verb, priority = REDUCE_SCATTER if self.splits else ALL_REDUCE, -1
        if self.measured is not None:  # every rank waits for all rows, and they are small
            verb, priority = ALL_GATHER if self.splits else ALL_REDUCE, 0
        self.tasks = tuple(
            self._task_type(
                self.index,
                step,
                partition,
                self.buffers[partition.dtype][partition.start : partition.stop],
                verb,
                priority=priority,
            )
            for partition in self.plan.partitions
        )
        self.unfinished = self.unmeasured = len(self.tasks)
        for proxy, owners in zip(self.proxies, self.plan.by_tensor):
            proxy.close(len(owners))
        return step

    def gradients_written(self, tensors: Sequence[int]) -> Iterator[CommTask]:
        """Note that the gradients of ``tensors`` are notified. Yields the tasks of which that was the last missing one."""
        tasks, by_tensor, notified = self.tasks, self.plan.by_tensor, self.notified
        for tensor in tensors:
            if not 0 <= tensor < len(self.proxies):  # a negative index would mean another tensor
                raise ValueError(f"there is no tensor {tensor} among the {len(self.proxies)} of group {self.index}")
            if self.next_step == 0 or tensor in notified:
                name = self.manifest.tensors[tensor].name
                raise ValueError(f"tensor '{name}' was notified twice in step {self.step}, or before any step")
            notified.add(tensor)
            for index in by_tensor[tensor]:
                task = tasks[index]
                task.missing -= 1
                if task.missing == 0:
                    task.advance(self._when_notified)
                    self.active += 1
                    yield task

    def scattered(self, task: CommTask) -> CommTask:
        """Return the ready all-gather that follows ``task``, a reduce-scatter that is done."""
        # The norms need all reduce-scatters of the step, and no update is made before them.
        behind = len(self.plan.partitions) if self.norms else 0
        priority = behind + task.partition.index
        gather = self._task_type(task.group, task.step, task.partition, task.data, ALL_GATHER, priority=priority)
        gather.missing = 0
        gather.advance("notify_ready")
        return gather

    def task_done(self, task: CommTask) -> bool:
        """Note that ``task`` is done. True if this opened a proxy or ended the step, so that a waiting engine may continue."""
        self.active -= 1
        self.unfinished -= 1
        continues = self.unfinished == 0
        for tensor in task.partition.tensors:
            if self.proxies[tensor].partition_done():
                continues = True
        return continues
