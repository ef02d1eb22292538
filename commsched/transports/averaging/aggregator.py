"""Aggregator: the averages of a parameter server, without network or threads of its own.

The thread that brings the last contribution to a key computes the average, and passes the same read-only bytes to every rank's
reply. Then it adds the average to the norms of the group, if there are any. A push to a group of norms is answered by a row of
sums instead of an average (see ``core/norms.py``). A rank's pushes are handled one after another, and that push comes behind
its contributions of the step. So when all ranks have made it, all averages of the step are made and added here.

A buffer is never written while a reader may still use it: the result of a key lies in memory that nothing else
refers to, and that memory is used again only when the last reply has dropped it. So the next step of a fast rank cannot
overwrite an average that is still being sent to a slow rank.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ...core.errors import ProtocolError
from ...core.interfaces import OnFailure
from ...core.manifest import Manifest
from ..backend import Contributors
from .buffer_pool import BufferPool
from .contributions import Complete, Contributions, PartitionKey, Reply
from .norms import NormSums
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
        self._lock = threading.Lock()  # guards additions to the two below
        self._sums: dict[int, NormSums] = {}  # by group of norms
        self._measured: dict[int, tuple[NormSums, ...]] = {}  # by the group that is measured

    def add_group(self, rank: int, group: int, manifest: Manifest) -> None:
        """See ``Contributions``."""
        self._contributions.add_group(rank, group, manifest)
        if (norms := manifest.norms) is None:
            return
        with self._lock:
            if group not in self._sums:
                sums = NormSums(self._contributions.manifest_of(rank, norms.group), manifest)
                self._measured[norms.group] = (*self._measured.get(norms.group, ()), sums)
                self._sums[group] = sums

    def release(self, rank: int, groups: Sequence[int]) -> None:
        """See ``Contributions``."""
        for group in self._contributions.release(rank, groups):
            with self._lock:
                self._sums.pop(group, None)
                self._measured.pop(group, None)

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
        result = self._row(key, stop - start) if key.group in self._sums else self._average(complete, dtype, stop - start)
        complete.payloads.clear()
        shared = result.toreadonly()
        for each in complete.replies:
            each(shared)
        for sums in self._measured.get(key.group, ()):  # after the replies, which leave meanwhile
            sums.add(key.step, dtype, start, shared)

    def measured_by(self, group: int) -> int | None:
        """The group whose averages are measured, if pushes to ``group`` are answered by rows of norms."""
        sums = self._sums.get(group)
        return None if sums is None else sums.group

    def _average(self, complete: Complete, dtype: str, nbytes: int) -> memoryview:
        result = self.buffers.take(nbytes) if complete.given is None else complete.given
        average(complete.payloads, dtype, result, self.contributors.divisor)
        return result

    def _row(self, key: PartitionKey, nbytes: int) -> memoryview:
        sums = self._sums[key.group]
        if nbytes != sums.row_bytes:
            raise ProtocolError(f"{nbytes} bytes of group {key.group} were pushed; a row of its norms has {sums.row_bytes}")
        return sums.take_row(key.step).data.cast("B")

    def leave(self, rank: int) -> None:
        """``rank`` will push nothing more. Calls ``on_failure`` with PeerLost if a key waits for it. Idempotent."""
        self._contributions.leave(rank)

    def abandon(self, rank: int) -> None:
        """``rank`` and its memory are gone: like ``leave``, but its payloads of unfinished keys are not read any more."""
        self._contributions.abandon(rank)

    def close(self) -> None:
        """Drop everything. Later pushes are ignored, and outstanding replies are never called."""
        self._contributions.close()
