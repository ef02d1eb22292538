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


class Completion(Protocol):
    """Whom a transport tells about a started task. Thread-safe; called without any lock of the transport held."""

    def on_sent(self, task: CommTask) -> None:
        """The bytes have left this rank: its credit comes back. At most once, and not after ``on_done``."""
        ...

    def on_done(self, task: CommTask) -> None:
        """The average is in ``task.data``. Exactly once, unless the transport failed; implies ``on_sent``."""
        ...


class Transport(Protocol):
    """A way to average partitions over all ranks. Errors during operation go to the ``OnFailure`` given when it was made."""

    rank: int
    world_size: int

    def add_group(self, group: int, manifest: Manifest) -> None:
        """Announce a group of tensors before its first task. All ranks add equal groups in the same order."""
        ...

    def start(self, task: CommTask, completion: Completion) -> None:
        """Begin to average ``task.data`` over all ranks, in place; must not wait for other ranks.

        Called by the dispatcher thread only. Ranks may start different partitions of one step in different orders.
        """
        ...

    def leave(self, rank: int) -> None:
        """``rank`` will send nothing more: what still needs it must fail with PeerLost and not wait. Any thread."""
        ...

    def close(self, graceful: bool = True) -> None:
        """Give back every thread, port and buffer; unless ``graceful``, without waiting for peers to take leave. Idempotent."""
        ...


class Observer(Protocol):
    """Sees what happens, with times in seconds of ``time.monotonic``. Called from any thread; must not block or raise."""

    def on_task(self, task: CommTask) -> None:
        """A task is done; its ``*_at`` fields hold its life."""
        ...

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        """The engine did ``name`` (a layer) on ``track``: ``forward``, ``backward``, ``update`` or ``wait``."""
        ...
