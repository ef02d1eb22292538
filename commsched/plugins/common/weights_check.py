"""Compares one part of the weights after another between ranks, so that ranks that diverge are found. Shared by plugins."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import commsched

#: One comparison covers this share of all weights, and at least ``MIN_PART_BYTES``, so 16 of them cover everything.
PARTS = 16
MIN_PART_BYTES = 2**20
#: Advice in the error for a cause that is not a mistake.
HINT = "ranks on different kinds of processors may round updates differently: set check_weights=0 there"
_ALIGNMENT = 16  # bytes of the largest element (complex128): a part begins and ends between two elements

#: By session: how many objects of each kind :func:`number_in` has numbered.
_counts: WeakKeyDictionary[commsched.Session, Counter[str]] = WeakKeyDictionary()


def number_in(session: commsched.Session, what: str = "optimizer") -> tuple[int, str]:
    """Count one more ``what`` that is made in ``session``. Ranks make them in the same order.

    Return its number, from 1, and the words that name it in comparisons between ranks, such as " of optimizer 2". The words are
    empty for the first, since most sessions have no other.
    """
    counts = _counts.setdefault(session, Counter())
    counts[what] += 1
    return counts[what], "" if counts[what] == 1 else f" of {what} {counts[what]}"


def count_in(session: commsched.Session) -> int:
    """How many optimizers :func:`number_in` has numbered."""
    return _counts.get(session, Counter())["optimizer"]


class WeightsCheck:
    """Compares a part of the weights every ``session.check_weights`` steps. Each time it takes the next part, so all weights
    are compared in time. Before the first such step it also compares after 1, 2, 4, ... steps.

    Averages are bitwise equal on all ranks. Weights are therefore equal too, unless a mistake or fault makes them differ: an
    assignment on one rank, a hyper-parameter that differs, a bit that flipped in transfer.

    A plugin calls :meth:`begin` in each step. For each tensor whose update of that step is written, it calls :meth:`add` with
    a digest of the range that :meth:`wanted` returns. The last :meth:`add` sends all digests to rank 0. No method waits. Call
    the methods from one thread at a time.

    Args:
        session: with one rank, or with ``check_weights`` 0, nothing is compared.
        names, nbytes: each tensor's name and size in bytes, equal on all ranks.
        what: names the weights in errors. Each check of a session needs another name, the same on all ranks: digests are
            compared by it.
    """

    def __init__(self, session: commsched.Session, names: Sequence[str], nbytes: Sequence[int], what: str = "weights") -> None:
        self._session = session
        self._names = names
        self._what = what
        self._every = session.check_weights if session.world_size > 1 and sum(nbytes) > 0 else 0
        self._nbytes = nbytes
        self._part_bytes = max(MIN_PART_BYTES, -(-sum(nbytes) // PARTS // _ALIGNMENT) * _ALIGNMENT)
        self._next = 0, 0  # tensor, and byte within it, where the next part begins
        self._step = 0
        self._wanted: dict[int, tuple[int, int]] = {}
        self._digests: dict[int, int] = {}

    def begin(self, step: int) -> bool:
        """Announce the updates of ``step``. Every rank calls it with the same steps. Returns whether any tensor is wanted."""
        self._wanted = {}
        early = step < self._every and step.bit_count() == 1  # 1, 2, 4, ...: most mistakes show at the beginning
        if self._every and (early or step % self._every == 0):
            self._step = step
            self._digests = {}
            self._wanted = self._take_part()
        return bool(self._wanted)

    def wanted(self, tensor: int) -> tuple[int, int] | None:
        """The bytes ``[start, stop)`` of ``tensor`` that belong to this step's part; None if it has none, or was added."""
        return self._wanted.get(tensor)

    def add(self, tensor: int, digest: int) -> None:
        """Add the ``digest`` of the wanted bytes of ``tensor``, computed by :func:`digest_of` or a similar function on the
        device. Raises CommschedError if the job failed, or the session is closed."""
        del self._wanted[tensor]
        self._digests[tensor] = digest
        if not self._wanted:
            digests = {self._names[index]: f"{self._digests[index]:08x}" for index in sorted(self._digests)}
            self._session.compare(self._what, self._step, digests, HINT)

    def _take_part(self) -> dict[int, tuple[int, int]]:
        """The next part. It wraps around after the last tensor, and covers all weights at most once."""
        part: dict[int, tuple[int, int]] = {}
        tensor, start = self._next
        left = self._part_bytes
        while left > 0 and tensor not in part:
            stop = min(self._nbytes[tensor], start + -(-left // _ALIGNMENT) * _ALIGNMENT)
            if stop > start:
                part[tensor] = start, stop
            left -= stop - start
            tensor, start = (tensor, stop) if stop < self._nbytes[tensor] else ((tensor + 1) % len(self._nbytes), 0)
        self._next = tensor, start
        return part


def digest_of(data: memoryview) -> int:
    """CRC-32 of bytes in the host's memory (4 to 5 GB/s)."""
    return zlib.crc32(data)
