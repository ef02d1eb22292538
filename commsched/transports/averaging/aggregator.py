"""Aggregator: the averages of a parameter server, without network or threads of its own.

The thread that brings the last contribution to a key computes the average, and passes the same read-only bytes to every rank's
reply. A buffer is never written while a reader may still use it: the result of a key lies in memory that nothing else
refers to, and that memory is used again only when the last reply has dropped it. So the next step of a fast rank cannot
overwrite an average that is still being sent to a slow rank.
"""

from __future__ import annotations

from ...core.interfaces import OnFailure
from ...core.manifest import Manifest
from ..backend import Contributors
from .buffer_pool import BufferPool
from .contributions import Contributions, PartitionKey, Reply
from .reduce import Bytes, average


class Aggregator:
    """Averages what ``contributors`` push. All methods are thread-safe, and none waits for another rank.

    ``on_failure`` is called with errors that concern other ranks than the caller's, without the lock held.
    """

    def __init__(self, contributors: Contributors, on_failure: OnFailure) -> None:
        self.contributors = contributors
        #: Memory for averages, and for contributions that have no memory of their own.
        self.buffers = BufferPool()
        self._contributions = Contributions(contributors.members, on_failure)
        #: See ``Contributions``.
        self.require_fitting = self._contributions.require_fitting

    def add_group(self, rank: int, group: int, manifest: Manifest) -> None:
        """See ``Contributions``."""
        self._contributions.add_group(rank, group, manifest)

    def describe(self, key: PartitionKey, dtype: str, start: int, stop: int) -> str:
        """See ``Contributions``."""
        return self._contributions.describe(key, dtype, start, stop)

    def push(
        self,
        rank: int,
        key: PartitionKey,
        dtype: str,
        start: int,
        stop: int,
        payload: Bytes,
        reply: Reply,
        *,
        given: bool = False,
    ) -> None:
        """``rank`` contributes ``payload`` to ``key``: bytes ``[start, stop)`` of the group's buffer of ``dtype``.

        ``payload`` must not change before ``reply`` is called. ``given`` means that ``payload`` is memory of ``buffers`` that
        nothing else reads, so that the average may be written into it. The last contribution computes the average and calls
        every rank's reply before this method returns.

        Raises:
            CommschedError: see ``Contributions.push``.
        """
        complete = self._contributions.push(rank, key, dtype, start, stop, payload, reply, given=given)
        if complete is None:
            return
        result = self.buffers.take(stop - start) if complete.given is None else complete.given
        average(complete.payloads, dtype, result, self.contributors.divisor)
        complete.payloads.clear()
        shared = result.toreadonly()
        for each in complete.replies:
            each(shared)

    def leave(self, rank: int) -> None:
        """``rank`` will push nothing more. Calls ``on_failure`` with PeerLost if a key waits for it. Idempotent."""
        self._contributions.leave(rank)

    def abandon(self, rank: int) -> None:
        """``rank`` and its memory are gone: like ``leave``, but its payloads of unfinished keys are not read any more."""
        self._contributions.abandon(rank)

    def close(self) -> None:
        """Drop everything. Later pushes are ignored, and outstanding replies are never called."""
        self._contributions.close()
