"""Every interface that core needs from outside. Where most implementations need only a part of one, it is a base class whose
methods do nothing; all others are protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .errors import CommschedError
from .manifest import Manifest
from .task import ALL_REDUCE, CommTask

if TYPE_CHECKING:
    from .device import Device

#: The callback by which a transport, the control channel or a plugin reports a failure that ends the job. May be called from
#: any thread, repeatedly; the first error counts. Never raises, never blocks.
OnFailure = Callable[[CommschedError], None]


class Buffer(Protocol):
    """A flat buffer of bytes: a ``memoryview`` of format ``B``, or a device's array of uint8."""

    def __getitem__(self, span: slice, /) -> Any: ...

    def __len__(self) -> int: ...


class Completion(Protocol):
    """Callbacks that a transport invokes for a started task. Thread-safe. The transport must not hold a lock when it calls
    them."""

    def on_sent(self, task: CommTask) -> None:
        """The task's bytes have left this rank, so its credit comes back. Called at most once, and not after ``on_done``."""

    def on_done(self, task: CommTask) -> None:
        """The average is in ``task.data`` (see also ``Transport.mirror``). Called exactly once, unless the transport failed.
        Implies ``on_sent``."""


class Calls(NamedTuple):
    """A :class:`Completion` of two functions, for a transport that passes a task of its own to another transport."""

    on_sent: Callable[[CommTask], None]
    on_done: Callable[[CommTask], None]


#: The callback of ``Transport.collect``, with tasks whose contributions are all there. The same one is given with each task.
#: Called from any thread, without a lock held.
Collected = Callable[[Sequence[CommTask]], None]


class Transport:
    """A way to average partitions over all ranks. It reports errors during operation to the ``OnFailure`` given to its
    constructor. Only :meth:`start` must be implemented. The other methods do nothing here, and the attributes other than
    ``rank`` and ``world_size`` have the values of the simplest transport: a transport overrides those that it needs.

    Attributes:
        verbs: the kinds of task that it supports (see ``CommTask``): ``all_reduce``, and either both of ``reduce_scatter`` and
            ``all_gather`` or neither.
        ordered: its messages carry no identity, so every rank must start the same tasks in the same order on each of its
            ``channels``; ``Core`` ensures that (``core/order``). A transport that is not ordered has one channel.
        leaders: if it is ordered and some ranks launch for others: by rank, the rank that launches for it. Only these agree on
            the order of launches; a task that another rank starts is its contribution. Empty: each rank launches for itself.
        device: where ``task.data`` lies: "cpu", or a device as PyTorch names it.
        one_per_host: one rank of each host uses the network, for all ranks of the host.
        servers: how many servers make averages, each those of its partitions (``Partition.server``); 1 if no servers do.
    """

    rank: int
    world_size: int
    verbs: frozenset[str] = frozenset({ALL_REDUCE})
    ordered: bool = False
    channels: int = 1
    leaders: tuple[int, ...] = ()
    device: str = "cpu"
    one_per_host: bool = False
    servers: int = 1

    def add_group(self, group: int, manifest: Manifest) -> None:
        """Announce a group of tensors before its first task. All ranks add equal groups in the same order.

        Raises:
            ManifestMismatch: another rank added other tensors.
            PeerLost: a rank or server is gone.
        """

    def mirror(self, group: int, manifest: Manifest, device: Device) -> Mapping[str, memoryview] | None:
        """Return the memory of the host, pinned for ``device``, that the next group shall use for its gradients: flat buffers
        by dtype, from which this transport takes them without another copy. None: it takes them from any memory. ``Core`` calls
        it before :meth:`add_group` if the gradients lie on ``device`` and travel from the host's memory.

        From then on the transport may leave an average of the group in other memory that is pinned for ``device``: it replaces
        ``task.data`` by that memory before ``on_done``. It writes this memory again only when a contribution of every rank that
        reads it has come for a later step. When a rank contributes, its copies of earlier averages are done.

        Raises:
            TransportError: the system cannot provide the memory.
        """
        return None

    def norm_rows(self, manifest: Manifest) -> int:
        """The number of rows in which the sums of the norms of such a group's averages travel (see ``norms.NormsOf``): one for
        each maker of averages. 0 means that this transport cannot tell norms of them. The same on all ranks.

        A transport that can fills the rows of a group whose manifest has ``norms``. If it has reduce-scatter, that group is one
        tensor, which travels by all-gather tasks only, each row as the chunk of its rank. Otherwise each row is a tensor, and
        its partition has the row's number. ``Core`` starts these tasks when it has started all others of the step, with the
        largest ``order``. The maker of averages must get the request for its row behind the contributions of that rank.
        """
        return 0

    def collect(self, task: CommTask, collected: Collected) -> None:
        """Begin to collect what the ranks for which this one launches contribute to ``task``, which is ready here. Call
        ``collected`` when all of it is there. :meth:`start` follows, possibly before that.

        Called by the dispatcher thread, only on a rank among ``leaders``, and not while the task's order is static. Raises as
        :meth:`start` does."""
        raise NotImplementedError

    def start(self, task: CommTask, completion: Completion) -> None:
        """Begin to average ``task.data`` over all ranks, in place. Must not wait for other ranks.

        Only the dispatcher thread calls it. If the transport is not ``ordered``, ranks may start the partitions of one step in
        different orders. If it is ``ordered``, every rank has the task ready before the first rank starts it, except in a
        static order. ``completion`` may be called from within ``start``. ``averaging.reduce`` has the arithmetic of each dtype,
        and ``context.contributors.divisor`` the number to divide sums by.

        Raises:
            ClosedError: the transport is closed.
            PeerLost: a rank or server is gone.
        """
        raise NotImplementedError

    def release(self, group: int) -> None:
        """Release ``group``, which has no further step and no outstanding task on this rank; other ranks may be behind.
        Called by an engine thread or the dispatcher thread, possibly after ``close``."""

    def leave(self, rank: int) -> None:
        """Note that ``rank``, which may be this one, sends nothing more and has received all it waited for. Any task that still
        needs it must fail with PeerLost instead of waiting. Any thread. Never blocks.

        An ordered transport has nothing to do: a task that one rank will not take part in is not started on any rank, and
        ``Core`` knows which ranks left."""

    def close(self, graceful: bool = True) -> None:
        """Release every thread, port and buffer. Waits for peers to leave only if ``graceful``. Idempotent."""


class ForwardingTransport(Transport):
    """Passes everything on to ``inner``. A transport around another one overrides what it changes."""

    def __init__(self, inner: Transport) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.verbs = inner.verbs
        self.ordered = inner.ordered
        self.channels = inner.channels
        self.leaders = inner.leaders
        self.device = inner.device
        self.one_per_host = inner.one_per_host
        self.servers = inner.servers
        self._inner = inner

    def add_group(self, group: int, manifest: Manifest) -> None:
        self._inner.add_group(group, manifest)

    def mirror(self, group: int, manifest: Manifest, device: Device) -> Mapping[str, memoryview] | None:
        return self._inner.mirror(group, manifest, device)

    def norm_rows(self, manifest: Manifest) -> int:
        return self._inner.norm_rows(manifest)

    def collect(self, task: CommTask, collected: Collected) -> None:
        self._inner.collect(task, collected)

    def start(self, task: CommTask, completion: Completion) -> None:
        self._inner.start(task, completion)

    def release(self, group: int) -> None:
        self._inner.release(group)

    def leave(self, rank: int) -> None:
        self._inner.leave(rank)

    def close(self, graceful: bool = True) -> None:
        self._inner.close(graceful)


#: The topics of the messages that cores send each other.
ORDER, STALL, PACE, NOT_FINITE = "order", "stall", "pace", "not finite"


class Messenger(Protocol):
    """The control channel as ``Core`` uses it, for example to agree on an order. Values are JSON. Never blocks. The messages of
    one rank arrive in order: at ``Core.on_message`` on rank 0, and at ``Core.on_announced`` on all other ranks."""

    def send_to_rank_0(self, topic: str, value: Any) -> None:
        """Send ``value`` to rank 0, from another rank."""

    def announce(self, topic: str, value: Any, to: Sequence[int] = ()) -> None:
        """Send ``value`` from rank 0 to the other ranks in ``to``, or to all others if it is empty."""

    def propose(self, config: dict[str, Any]) -> None:
        """Ask that all ranks switch to ``config`` at one agreed step."""


class Observer:
    """Is notified of events, with times in seconds of ``time.monotonic``. Called from any thread; must not block or raise.
    Each method does nothing here: an observer overrides those that it needs."""

    def on_step(self, group: int, step: int, at: float) -> None:
        """The engine began ``step`` of ``group``."""

    def on_release(self, group: int, at: float) -> None:
        """The engine begins no further step of ``group``."""

    def on_ready(self, group: int, tensor: int, at: float) -> None:
        """The engine has written the gradient of ``tensor`` (its index in the manifest) in the current step."""

    def on_task(self, task: CommTask) -> None:
        """A task is done; its ``*_at`` fields hold the times of its states."""

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        """The engine worked on ``name`` (a layer) from ``start`` to ``stop``. ``track`` is the kind of work: ``forward``,
        ``backward``, ``update`` or ``wait``."""


class SessionObserver(Observer):
    """An observer that a session has from its beginning to its end; plugins report the engine's activity to it."""

    def add_group(self, index: int, manifest: Manifest) -> None:
        """The tensors of ``manifest`` are group ``index``. Called before its first task is done."""

    def close(self) -> None:
        """The session ends: nothing follows. Idempotent."""

    def merge(self) -> None:
        """All ranks have closed their observers. Called on rank 0."""


class TaskObserver(Observer):
    """Calls ``on_task`` with every task that is done and ignores other events; see :class:`Observer`."""

    def __init__(self, on_task: Callable[[CommTask], None]) -> None:
        self.on_task = on_task  # type: ignore[assignment, method-assign]
