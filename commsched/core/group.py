"""TensorGroup: the tensors of one model as its plugin sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .manifest import Manifest
from .plan import Plan
from .ports import Sliceable
from .proxy import DependencyProxy
from .task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask, State

if TYPE_CHECKING:
    from .core import Core


class TensorGroup:
    """One manifest, its flat buffers and, for each tensor, a :class:`DependencyProxy`.

    A step goes: ``begin_step``; for each tensor in any order, write its gradient at ``manifest.offset(tensor)`` of its
    dtype's buffer and call ``notify_ready(tensor)``; when its proxy is open the average over all ranks is there instead.
    Every rank must notify every tensor of every step. Between ``notify_ready`` and the opening of the proxy the tensor's
    bytes belong to commsched.

    Made by ``Core.add_group``. ``begin_step`` and ``release`` are for one engine thread; ``notify_ready`` and the waits of
    proxies may come from any, also side by side. Nothing here need be called at the same time on all ranks.
    """

    def __init__(self, core: Core, index: int, plan: Plan, buffers: Mapping[str, Sliceable], splits: bool = False) -> None:
        self.index = index
        self.plan = plan
        self.splits = splits
        self.proxies = tuple(DependencyProxy(core, spec.name) for spec in plan.manifest.tensors)
        self.buffers = buffers
        self.next_step = 0
        self.tasks: tuple[CommTask, ...] = ()
        self.active = 0  # tasks between ready and done
        self.unfinished = 0  # tasks of this step that are not done
        self.notified: set[int] = set()
        self._core = core

    @property
    def manifest(self) -> Manifest:
        return self.plan.manifest

    @property
    def step(self) -> int:
        """The step begun last; -1 before the first."""
        return self.next_step - 1

    def begin_step(self) -> int:
        """Begin the next step, which closes all proxies, and return its number. Waits until the step before is done: for ever,
        with a warning now and then, if a tensor of it is never notified.

        Raises:
            CommschedError: the session failed or was closed.
            ValueError: it was released.
        """
        return self._core.begin_step(self)

    def notify_ready(self, tensor: int) -> None:
        """The gradient of ``tensor`` (its index in the manifest) is in the buffer. Never waits for the network.

        Raises:
            CommschedError: the session failed or was closed.
            ValueError: it was notified before in this step, or there is no such tensor or step.
        """
        self._core.notify_ready(self, tensor)

    def release(self) -> None:
        """Let go of the buffers after the last step, whose averages must have been waited for; no further step may begin."""
        self.buffers = {}
        self.tasks = ()
        self._core.release(self)

    # What follows is called by Core with its lock held.

    def open_step(self) -> int:
        if self.manifest.tensors and not self.buffers:
            raise ValueError(f"group {self.index} was released: no further step of it may begin")
        step = self.next_step
        self.next_step += 1
        self.notified.clear()
        verb = REDUCE_SCATTER if self.splits else ALL_REDUCE
        self.tasks = tuple(
            CommTask(self.index, step, partition, self.buffers[partition.dtype][partition.start : partition.stop], verb)
            for partition in self.plan.partitions
        )
        self.unfinished = len(self.tasks)
        for proxy, owners in zip(self.proxies, self.plan.by_tensor):
            proxy.close(len(owners))
        return step

    def gradient_written(self, tensor: int) -> list[CommTask]:
        """The tasks that became ready by it."""
        if not 0 <= tensor < len(self.proxies):  # -1 would be another name of the last
            raise ValueError(f"there is no tensor {tensor} among the {len(self.proxies)} of group {self.index}")
        if self.next_step == 0 or tensor in self.notified:
            name = self.manifest.tensors[tensor].name
            raise ValueError(f"tensor '{name}' was notified twice in step {self.step}, or before any step")
        self.notified.add(tensor)
        ready = []
        for index in self.plan.by_tensor[tensor]:
            task = self.tasks[index]
            task.missing -= 1
            if task.missing == 0:
                task.advance("notify_ready")
                ready.append(task)
        self.active += len(ready)
        return ready

    def scattered(self, task: CommTask) -> CommTask:
        """The all-gather, ready, that takes the place of a reduce-scatter that is done."""
        gather = CommTask(task.group, task.step, task.partition, task.data, ALL_GATHER)
        gather.missing = 0
        gather.advance("notify_ready")
        return gather

    def task_done(self, task: CommTask) -> bool:
        """True when a proxy opened by it or the step is done, so that a waiting engine may go on."""
        self.active -= 1
        self.unfinished -= 1
        opened = [self.proxies[tensor].partition_done() for tensor in task.partition.tensors]
        return any(opened) or self.unfinished == 0

    def __repr__(self) -> str:
        waiting = sum(task.state is State.PENDING for task in self.tasks)
        return f"<TensorGroup {self.index} step {self.step}: {waiting} pending, {self.active} active>"
