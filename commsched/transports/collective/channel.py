"""What a backend of collectives has to offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

#: Called once per operation, from any thread of the backend, with what went wrong or None. It may take the time of summing a
#: partition. It raises nothing.
Done = Callable[[BaseException | None], None]


class CannotBegin(Exception):
    """An operation could not begin on this rank; no other need be at fault."""


class Channel(Protocol):
    """One communicator: operations begin in the same order on all ranks, and end in any. Memory is contiguous bytes, the
    backend's from the call until ``done``; nothing of it is copied.

    No method waits for other ranks. Methods may be called from any thread, and from within ``done``; ``all_reduce`` by one
    thread at a time. An operation that cannot begin either raises or calls ``done`` with :class:`CannotBegin`.
    """

    rank: int
    world_size: int

    #: The dtypes that ``all_reduce`` sums. 16-bit floats are not to be among them: backends round each partial sum.
    native: frozenset[str]

    def all_reduce(self, data: memoryview, dtype: str, done: Done) -> None:
        """Replace ``data`` by its sum over the ranks, the same bits on all of them; sums of ``uint8`` wrap."""
        ...

    def exchange(
        self, tag: int, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]], done: Done
    ) -> None:
        """Send to and receive from some (rank, memory); each is met by the same size under the same ``tag`` on that rank.

        ``tag`` is at least 0 and below ``MOST_TAGS``, and not used again while an exchange with it is under way. Nothing
        given is empty; there is something to send or to receive.
        """
        ...

    def close(self, graceful: bool) -> None:
        """Give back every thread and connection. ``graceful``: no operation is under way, here or elsewhere. Unless it is,
        end those that are at once, with an error or without a word. Called once."""
        ...


#: How many different tags an exchange may have: what MPI promises.
MOST_TAGS = 32768
