"""Aggregator: the averages of a parameter server, without network or threads of its own.

When the last contribution to a key is in, the thread that brought it makes the average and hands the same read-only bytes to
every rank's reply. Nothing is ever written into a buffer that somebody else may still read: a key's result lies in memory that
nobody else refers to, and that is used again when the last reply has let go of it, so the next step of a fast rank cannot reach
what a slow rank is still being sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.manifest import Manifest
from ..core.ports import OnFailure
from .buffers import BufferPool
from .contributions import Contributions, Key, Reply
from .reduce import Bytes, average


class Aggregator:
    """Averages of ``world_size`` ranks. All methods may be called by any thread, and none waits for another rank.

    Args:
        world_size: how many contributions make an average.
        on_failure: told of errors that concern other ranks than the caller's; called without the lock held.
        members: how messages call each rank; None: by its number.
        divisor: what sums are divided by; None: ``world_size``. See ``TransportContext``.
    """

    def __init__(
        self, world_size: int, on_failure: OnFailure, members: Sequence[int] | None = None, divisor: int | None = None
    ) -> None:
        self.world_size = world_size
        self.divisor = world_size if divisor is None else divisor
        #: Where averages lie; contributions that have no memory of their own may too.
        self.buffers = BufferPool()
        self._contributions = Contributions(range(world_size) if members is None else members, on_failure)

    @property
    def members(self) -> tuple[int, ...]:
        """How messages call each rank."""
        return self._contributions.members

    def add_group(self, rank: int, group: int, manifest: Manifest) -> None:
        """See ``Contributions``."""
        self._contributions.add_group(rank, group, manifest)

    def require_fitting(self, rank: int, key: Key, dtype: str, start: int, stop: int) -> None:
        """See ``Contributions``."""
        self._contributions.require_fitting(rank, key, dtype, start, stop)

    def push(
        self,
        rank: int,
        key: Key,
        dtype: str,
        start: int,
        stop: int,
        payload: Bytes,
        reply: Reply,
        *,
        given: bool = False,
    ) -> None:
        """``rank`` contributes ``payload`` to ``key``: bytes ``[start, stop)`` of the group's buffer of ``dtype``.

        ``payload`` must not change before ``reply`` is called. ``given``: it is memory of ``buffers`` that nobody else reads,
        and the average may be made in it. If this is the last contribution, the average is made and every rank's reply is
        called before this returns.

        Raises:
            CommschedError: see ``Contributions.push``.
        """
        complete = self._contributions.push(rank, key, dtype, start, stop, payload, reply, given=given)
        if complete is None:
            return
        result = self.buffers.take(stop - start) if complete.given is None else complete.given
        average(complete.payloads, dtype, result, self.divisor)
        complete.payloads.clear()
        shared = result.toreadonly()
        for each in complete.replies:
            each(shared)

    def leave(self, rank: int) -> None:
        """``rank`` will push nothing more; ``on_failure`` gets a PeerLost if something waits for it. Idempotent."""
        self._contributions.leave(rank)

    def abandon(self, rank: int) -> None:
        """``rank`` is gone with its memory: what it pushed to unfinished keys is not read any more. Else like ``leave``."""
        self._contributions.abandon(rank)

    def close(self) -> None:
        """Let go of everything; later pushes are ignored, and replies that did not come yet never come."""
        self._contributions.close()
