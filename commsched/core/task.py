"""CommTask: one partition's communication in one step, and the only states it can be in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from .plan import Partition


class State(Enum):
    """The state of a CommTask; see :data:`TRANSITIONS`."""

    PENDING = "pending"  # its gradients are not all computed yet
    STAGED = "staged"  # they are queued on a device, or computed there, and perhaps on their way to the host's memory
    READY = "ready"  # waits in the scheduler for credit and its turn
    STARTED = "started"  # submitted to the transport; holds credit
    SENT = "sent"  # its bytes have left this rank; its credit is returned
    DONE = "done"  # the average is written

    __hash__ = object.__hash__  # that of an Enum is a function of Python, which every transition of every task would call


#: All transitions between a CommTask's states. Any other event is a bug of ours and raises KeyError.
TRANSITIONS: dict[tuple[State, str], State] = {
    (State.PENDING, "notify_ready"): State.READY,
    (State.PENDING, "stage"): State.STAGED,
    (State.STAGED, "notify_ready"): State.READY,
    (State.READY, "start"): State.STARTED,
    (State.STARTED, "notify_sent"): State.SENT,
    (State.SENT, "notify_finish"): State.DONE,
}


#: The verbs of a task. Two tasks can replace one all-reduce: a reduce-scatter, then an all-gather.
ALL_REDUCE: Final = "all_reduce"
REDUCE_SCATTER: Final = "reduce_scatter"
ALL_GATHER: Final = "all_gather"


@dataclass(slots=True, eq=False, repr=False)
class CommTask:
    """One partition in one step (the SubCommTask of ByteScheduler, SOSP'19, section 4).

    ``data`` is the partition's slice of the flat buffer, in bytes. In host memory it is a writable ``memoryview`` of format
    ``B``. The transport reads the gradient from it and writes the average into it. No one else writes to it from the start
    until the task is done. The ``*_at`` times are seconds of the core's clock, for observers.

    ``verb``: an ``all_reduce`` leaves the average in all of ``data``. A ``reduce_scatter`` leaves it in this rank's chunk. The
    ``all_gather`` of the same partition, a later task over the same bytes, distributes the chunks. The chunk of rank ``r`` are
    the elements from ``numel * r // world_size`` to ``numel * (r + 1) // world_size`` of the partition's ``numel`` elements.

    ``channel`` and ``sequence`` are set when a task starts on an ordered transport. The start is number ``sequence`` of that
    channel, counted from 0, and the same task has that number on every rank.
    """

    group: int
    step: int
    partition: Partition
    data: Any
    verb: str = ALL_REDUCE
    channel: int = 0
    sequence: int = -1
    order: int = 0  # the policy's key: every queue sends smaller keys earlier
    state: State = State.PENDING
    nbytes: int = field(init=False)
    missing: int = field(init=False)  # gradients still to come
    ready_at: float = 0.0
    started_at: float = 0.0
    sent_at: float = 0.0
    done_at: float = 0.0
    priority: int = -1  # 0 is most urgent; -1 here means the partition's place in forward order

    def __post_init__(self) -> None:
        self.nbytes = self.partition.nbytes
        self.missing = len(self.partition.tensors)
        if self.priority < 0:
            self.priority = self.partition.index

    def advance(self, event: str) -> None:
        """Follow :data:`TRANSITIONS`; ``event`` is stage, notify_ready, start, notify_sent or notify_finish."""
        self.state = TRANSITIONS[self.state, event]

    def __repr__(self) -> str:
        return f"<CommTask {self.verb} step {self.step} partition {self.partition.index} {self.nbytes} B {self.state.value}>"
