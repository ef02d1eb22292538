"""Contributions: the pushes of each rank to each key, and the checks of each push. No network, threads or arithmetic.

A key is (group, step, partition). Each rank contributes once to a key, and the caller that brings the last contribution gets
all of them.

A rank begins the next step of a group only when every partition of the step before is complete (``Core`` ensures it). So at
most one step of a group is unfinished, memory is bounded by the manifest, and a rank that breaks the rule can be named at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.errors import FEWER_BATCHES, ManifestMismatch, PeerLost, ProtocolError
from ...core.interfaces import OnFailure
from ...core.least import Least
from ...core.manifest import ITEMSIZE, Manifest
from .reduce import Bytes


class PartitionKey(NamedTuple):
    """Identifies one average on every rank."""

    group: int
    step: int
    partition: int


#: Passes the average of a key to a rank: read-only bytes, the same for all ranks. Called once, without a lock held.
Reply = Callable[[memoryview], None]


class _Range(NamedTuple):
    """The place of a partition in a group's buffers. It is equal on all ranks for one key."""

    dtype: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.dtype} bytes {self.start} to {self.stop}"


@dataclass(slots=True)
class _Entry:
    """One key that some ranks have contributed to. Payloads and replies are dropped when all ranks have contributed."""

    range: _Range
    payloads: dict[int, Bytes] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)
    given: memoryview | None = None
    finished: bool = False

    def complete(self) -> Complete:
        ranks = range(len(self.payloads))
        complete = Complete([self.payloads[rank] for rank in ranks], [self.replies[rank] for rank in ranks], self.given)
        self.payloads, self.replies, self.given, self.finished = {}, {}, None, True
        return complete


@dataclass(slots=True)
class _Group:
    """One manifest, and the entries of the steps that a rank may still be in."""

    manifest: Manifest
    ranks: set[int]  # those that have announced it
    latest: Least  # by rank: the step of its last push; -1 before the first push
    newest: int = -1  # the latest of those steps
    steps: dict[int, dict[int, _Entry]] = field(default_factory=dict)  # step -> partition -> entry
    unfinished: dict[PartitionKey, _Entry] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)  # ranks that are done with it


@dataclass(slots=True)
class Complete:
    """All contributions to one key, in rank order, and every rank's reply.

    ``given`` is the memory of a contribution that the average may be written into, or ``None``.
    """

    payloads: list[Bytes]
    replies: list[Reply]
    given: memoryview | None


class Contributions:
    """The pushes of several ranks. All methods are thread-safe, and none waits for another rank.

    Args:
        members: the number that names each rank in messages, indexed by the rank's number among the contributing ranks.
        on_failure: called with errors that concern other ranks than the caller's; called without the lock held.
    """

    def __init__(self, members: Sequence[int], on_failure: OnFailure) -> None:
        self.members = tuple(members)
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._groups: dict[int, _Group] = {}
        self._left: set[int] = set()
        self._closed = False

    def add_group(self, rank: int, group: int, manifest: Manifest) -> None:
        """``rank`` announces the tensors of ``group`` before its first push.

        Raises:
            ManifestMismatch: another rank announced other tensors; names the tensor and both ranks.
            ProtocolError: ``rank`` announced this group before.
        """
        with self._lock:
            known = self._groups.get(group)
            if known is None:
                self._groups[group] = _Group(manifest, {rank}, Least(range(len(self.members)), -1))
                return
            if rank in known.ranks:
                raise ProtocolError(f"rank {self.members[rank]} announced group {group} twice")
            _require_same(known.manifest, self.members[min(known.ranks)], manifest, self.members[rank])
            known.ranks.add(rank)

    def release(self, rank: int, groups: Sequence[int]) -> list[int]:
        """``rank`` pushes nothing more to ``groups``, and has all their averages. Forgets and returns those that every rank has
        released.

        Raises:
            ProtocolError: ``rank`` has not announced such a group.
        """
        over = []
        with self._lock:
            if self._closed:
                return []
            for number in groups:
                group = self._groups.get(number)
                if group is None or rank not in group.ranks:
                    raise ProtocolError(f"rank {self.members[rank]} released group {number} without announcing the group")
                group.released.add(rank)
                if len(group.released) == len(self.members) and not group.unfinished:
                    del self._groups[number]
                    over.append(number)
        return over

    def manifest_of(self, rank: int, group: int) -> Manifest:
        """The tensors of ``group``, which ``rank`` has announced.

        Raises:
            ProtocolError: ``rank`` has not announced that group.
        """
        with self._lock:
            known = self._groups.get(group)
            if known is None or rank not in known.ranks:
                raise ProtocolError(f"rank {self.members[rank]} asks for norms of group {group} without announcing the group")
            return known.manifest

    def require_fitting(self, rank: int, key: PartitionKey, dtype: str, start: int, stop: int) -> None:
        """Check that ``rank`` may push such a range, before memory is taken for it.

        Raises:
            ProtocolError: the rank has not announced the group, or the range is outside the manifest or not on element
                borders; names the rank and the step.
        """
        with self._lock:
            if not self._closed:
                self._group_of(rank, key, _Range(dtype, start, stop))

    def describe(self, key: PartitionKey, dtype: str, start: int, stop: int) -> str:
        """Name that range of ``key`` in a message: partition, step, and tensor if its group is known."""
        with self._lock:
            group = self._groups.get(key.group)
        if group is None:
            return f"partition {key.partition} of step {key.step}"
        return _name(group, key, _Range(dtype, start, stop))

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
    ) -> Complete | None:
        """``rank`` contributes ``payload`` to ``key``: bytes ``[start, stop)`` of the group's buffer of ``dtype``.

        ``given`` means that nothing else reads the memory of ``payload``, so that the average may be written into it. Returns
        all contributions, and drops them, if this is the last one.

        Raises:
            ProtocolError: the range is outside the manifest or differs from another rank's range, the rank pushed this key
                before, or the rank pushes out of step; names rank, tensor and step.
            PeerLost: a rank whose contribution is needed has left.
        """
        range_ = _Range(dtype, start, stop)
        with self._lock:
            if self._closed:
                return None
            group = self._group_of(rank, key, range_)
            if (nbytes := memoryview(payload).nbytes) != stop - start:
                raise ProtocolError(f"{_pushed(group, self.members[rank], key, range_)} with {nbytes} bytes of payload")
            entry = self._entry(group, rank, key, range_)
            if self._left:
                self._require_present(group, key, entry, adding=rank)
            entry.payloads[rank] = payload
            entry.replies[rank] = reply
            if given and rank < 2:  # ``average`` may write its result only into the first two
                entry.given = memoryview(payload)
            if len(entry.payloads) < len(self.members):
                return None
            del group.unfinished[key]
            return entry.complete()

    def leave(self, rank: int) -> None:
        """``rank`` will push nothing more. Calls ``on_failure`` with PeerLost if a key waits for it. Idempotent."""
        with self._lock:
            self._left.add(rank)
            waiting = [
                (group, key, entry)
                for group in self._groups.values()
                for key, entry in group.unfinished.items()
                if rank not in entry.payloads
            ]
            error = self._left_behind(*waiting[0], rank) if waiting else None
        if error is not None:
            self._on_failure(error)

    def abandon(self, rank: int) -> None:
        """``rank`` and its memory are gone: like ``leave``, but its payloads of unfinished keys are not read any more."""
        with self._lock:
            for group in self._groups.values():
                for entry in group.unfinished.values():
                    if entry.payloads.pop(rank, None) is not None:
                        entry.given = None
                    entry.replies.pop(rank, None)
        self.leave(rank)

    def close(self) -> None:
        """Drop everything. Later pushes are ignored, and outstanding replies are never called."""
        with self._lock:
            self._closed = True
            self._groups.clear()

    # --- called with the lock held ---

    def _group_of(self, rank: int, key: PartitionKey, range_: _Range) -> _Group:
        """Return the group of ``key`` after checking that the range fits its manifest."""
        group = self._groups.get(key.group)
        if group is None or rank not in group.ranks:
            raise ProtocolError(
                f"rank {self.members[rank]} pushed step {key.step} of group {key.group} without announcing the group"
            )
        dtype, start, stop = range_
        size = group.manifest.buffer_bytes.get(dtype, 0)
        if not 0 <= start < stop <= size:
            who = self.members[rank]
            raise ProtocolError(f"rank {who} pushed {range_} of step {key.step}, but that buffer has {size} bytes")
        if start % ITEMSIZE[dtype] or stop % ITEMSIZE[dtype]:
            raise ProtocolError(f"{_pushed(group, self.members[rank], key, range_)} not on element borders")
        return group

    def _entry(self, group: _Group, rank: int, key: PartitionKey, range_: _Range) -> _Entry:
        """Return the entry that ``rank`` contributes to, after checking that it may contribute now."""
        if key.step > group.latest[rank]:
            self._begin_step(group, rank, key.step)
        partitions = group.steps.get(key.step, {})
        entry = partitions.get(key.partition)
        if entry is None:
            self._require_first_push_in_step(group, rank, key, range_)
            entry = partitions[key.partition] = group.unfinished[key] = _Entry(range_)
            group.steps[key.step] = partitions
        elif entry.range != range_:
            raise ProtocolError(
                f"partition {key.partition} of step {key.step}, tensor {_names(group, entry.range)}, is {entry.range} on "
                f"another rank but {range_} on rank {self.members[rank]}"
            )
        elif entry.finished or rank in entry.payloads:
            raise ProtocolError(f"rank {self.members[rank]} pushed {_name(group, key, range_)} twice")
        return entry

    def _begin_step(self, group: _Group, rank: int, step: int) -> None:
        """``rank`` goes on to ``step``. Earlier steps must be finished; the steps that all ranks have passed are dropped."""
        who = self.members[rank]
        for key, entry in group.unfinished.items():
            if key.step < step and rank not in entry.payloads:
                raise ProtocolError(f"rank {who} pushed step {step} but skipped {_name(group, key, entry.range)}")
            if key.step < step:
                raise ProtocolError(f"rank {who} pushed step {step} before {_name(group, key, entry.range)} was averaged")
        group.latest.raise_to(rank, step)
        group.newest = max(group.newest, step)
        for passed in [step for step in group.steps if step < group.latest.least]:
            del group.steps[passed]

    def _require_first_push_in_step(self, group: _Group, rank: int, key: PartitionKey, range_: _Range) -> None:
        """Check that no rank has gone beyond the step of ``key``, which has no contribution yet."""
        if group.newest <= key.step:
            return
        name, who = _name(group, key, range_), self.members[rank]
        if group.latest[rank] > key.step:
            raise ProtocolError(f"rank {who} pushed {name} after step {group.latest[rank]}: that step is finished")
        for index, other in enumerate(self.members):
            if (latest := group.latest[index]) > key.step:
                raise ProtocolError(f"rank {other} pushed step {latest} but skipped {name} which rank {who} pushed")

    def _require_present(self, group: _Group, key: PartitionKey, entry: _Entry, adding: int) -> None:
        """Check that no rank that ``key`` still needs has left."""
        gone = self._left - entry.payloads.keys() - {adding}
        if gone:
            raise self._left_behind(group, key, entry, min(gone))

    def _left_behind(self, group: _Group, key: PartitionKey, entry: _Entry, rank: int) -> PeerLost:
        last, who = group.latest[rank], self.members[rank]
        when = f"after step {last}" if last >= 0 else "before its first step"
        cure = FEWER_BATCHES if last >= 0 else ""
        waiting = f"the average of tensor {_names(group, entry.range)} of step {key.step}"
        text = f"rank {who} left {when}; {waiting} waits for it{cure}"
        return PeerLost(text, rank=who, step=key.step, tensor=group.manifest.first_in(*entry.range))


def _names(group: _Group, range_: _Range) -> str:
    return group.manifest.names_in(*range_)


def _name(group: _Group, key: PartitionKey, range_: _Range) -> str:
    return f"partition {key.partition} of step {key.step}, tensor {_names(group, range_)},"


def _pushed(group: _Group, who: int, key: PartitionKey, range_: _Range) -> str:
    return f"rank {who} pushed {range_} of step {key.step}, tensor {_names(group, range_)},"


def _require_same(known: Manifest, known_rank: int, manifest: Manifest, rank: int) -> None:
    if known.fingerprint == manifest.fingerprint:
        return
    for index, (a, b) in enumerate(zip(known.tensors, manifest.tensors)):
        if a != b:
            raise ManifestMismatch(f"tensor {index} is {a} on rank {known_rank} but {b} on rank {rank}")
    raise ManifestMismatch(f"rank {known_rank} has {len(known.tensors)} tensors, rank {rank} has {len(manifest.tensors)}")
