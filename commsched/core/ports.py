"""Every interface that core needs from outside. Implementations do not inherit; they fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .errors import CommschedError
from .manifest import Manifest
from .task import CommTask

#: How a transport, the control channel or a plugin says that the world broke. May be called from any thread, repeatedly;
#: the first error counts. Never raises, never blocks.
OnFailure = Callable[[CommschedError], None]


class Sliceable(Protocol):
    """A flat buffer of bytes: a ``memoryview`` of format ``B``, or a device's array of uint8."""

    def __getitem__(self, span: slice, /) -> Any: ...

    def __len__(self) -> int: ...


class Completion(Protocol):
    """Whom a transport tells about a started task. Thread-safe; called without any lock of the transport held."""

    def on_sent(self, task: CommTask) -> None:
        """The bytes have left this rank: its credit comes back. At most once, and not after ``on_done``."""
        ...

    def on_done(self, task: CommTask) -> None:
        """The average is in ``task.data``. Exactly once, unless the transport failed; implies ``on_sent``."""
        ...


class Transport(Protocol):
    """A way to average partitions over all ranks. Errors during operation go to the ``OnFailure`` given when it was made.

    ``verbs`` are what its tasks may be, see ``CommTask``: ``all_reduce``, and ``reduce_scatter`` with ``all_gather`` or
    neither. ``ordered``: what it sends carries no identity, so every rank must start the same tasks in the same order on each
    of its ``channels``; ``Core`` sees to it (``core/order``). A transport that is not ordered has one channel.
    """

    rank: int
    world_size: int
    verbs: frozenset[str]
    ordered: bool
    channels: int

    def add_group(self, group: int, manifest: Manifest) -> None:
        """Announce a group of tensors before its first task. All ranks add equal groups in the same order."""
        ...

    def start(self, task: CommTask, completion: Completion) -> None:
        """Begin to average ``task.data`` over all ranks, in place; must not wait for other ranks.

        Called by the dispatcher thread only. Unless ``ordered``, ranks may start different partitions of one step in different
        orders. If it is, every rank has the task ready by the time it starts on the first.
        """
        ...

    def release(self, group: int) -> None:
        """No step of ``group`` follows, and nothing of it is outstanding on this rank; other ranks may be a little behind.
        An engine's thread; after ``close`` too."""
        ...

    def leave(self, rank: int) -> None:
        """``rank``, which may be this one, will send nothing more, and got all it waited for: what still needs it must fail
        with PeerLost and not wait. Any thread; never blocks."""
        ...

    def close(self, graceful: bool = True) -> None:
        """Give back every thread, port and buffer; unless ``graceful``, without waiting for peers to take leave. Idempotent."""
        ...


class Messenger(Protocol):
    """The control channel as ``Core`` uses it to agree on an order. Values are JSON. Never blocks; what one rank sends arrives
    in order, at ``Core.on_told`` of rank 0 and ``Core.on_announced`` of all others."""

    def tell(self, value: Any) -> None:
        """To rank 0, from another."""
        ...

    def announce(self, value: Any) -> None:
        """To all others, from rank 0."""
        ...

    def propose(self, config: dict[str, Any]) -> None:
        """Ask that all ranks switch to ``config`` at one agreed step."""
        ...


class Observer(Protocol):
    """Sees what happens, with times in seconds of ``time.monotonic``. Called from any thread; must not block or raise."""

    def on_step(self, group: int, step: int, at: float) -> None:
        """The engine began ``step`` of ``group``."""
        ...

    def on_ready(self, group: int, tensor: int, at: float) -> None:
        """The engine has written the gradient of ``tensor`` (its index in the manifest) in the step begun last."""
        ...

    def on_task(self, task: CommTask) -> None:
        """A task is done; its ``*_at`` fields hold its life."""
        ...

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        """The engine did ``name`` (a layer) on ``track``: ``forward``, ``backward``, ``update`` or ``wait``."""
        ...
