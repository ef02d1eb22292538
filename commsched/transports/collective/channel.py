"""The interface that a backend of collectives implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

#: Called once per operation, from any thread of the backend, with the error or ``None``. It may take as long as summing a
#: partition. It raises nothing.
Done = Callable[[BaseException | None], None]


class CannotBegin(Exception):
    """An operation could not begin on this rank. No other rank need be at fault."""


class Channel(Protocol):
    """One communicator. Operations begin in the same order on all ranks, and end in any order.

    Memory is contiguous bytes. It belongs to the backend from the call until ``done``, and is not copied.

    No method waits for other ranks. Methods may be called from any thread, and from within ``done``. Only one thread at a time
    may call ``all_reduce``. An operation that cannot begin either raises or calls ``done`` with :class:`CannotBegin`.
    """

    rank: int
    world_size: int

    #: The dtypes that ``all_reduce`` sums. 16-bit floats must not be among them: backends round each partial sum. If there are
    #: none, ``all_reduce`` is never called.
    native: frozenset[str]

    def all_reduce(self, data: memoryview, dtype: str, done: Done) -> None:
        """Replace ``data`` by its sum over the ranks, with the same bits on all ranks. Sums of ``uint8`` wrap."""

    def exchange(
        self, tag: int, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]], done: Done
    ) -> None:
        """Send memory to some ranks and receive memory from some ranks: ``sends`` and ``receives`` hold (rank, memory).

        The other rank makes the matching call with the same size and the same ``tag``. ``tag`` is at least 0 and below
        ``MAX_TAGS``, and not used again while an exchange with it is outstanding. No memory is empty, and ``sends`` and
        ``receives`` are not both empty.
        """

    def close(self, graceful: bool) -> None:
        """Release every thread and connection. Called once.

        ``graceful`` means that no operation is outstanding, on this rank or any other. Otherwise outstanding operations end at
        once: their ``done`` is called with an error, or not at all.
        """


#: The number of different tags that an exchange may have. MPI guarantees as many.
MAX_TAGS = 32768
