"""The key that identifies a launch on every rank, and a rolling digest of launches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..plan import Partition
from ..task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask

_VERBS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)


class LaunchKey(NamedTuple):
    """Identifies one task; the key is the same on every rank."""

    group: int
    step: int
    partition: int
    verb: str

    @classmethod
    def of(cls, task: CommTask) -> LaunchKey:
        return cls(task.group, task.step, task.partition.index, task.verb)

    def to_record(self) -> list[int]:
        return [self.group, self.step, self.partition, _VERBS.index(self.verb)]

    @classmethod
    def from_record(cls, record: Sequence[Any]) -> LaunchKey:
        """The inverse of :meth:`to_record`.

        Raises:
            ValueError: ``record`` is not a valid result of :meth:`to_record`.
        """
        group, step, partition, verb = (int(number) for number in record)
        if not 0 <= verb < len(_VERBS):
            raise ValueError(f"verb {verb}")
        return cls(group, step, partition, _VERBS[verb])


#: The channels of an ordered transport. The launches of one channel do not wait for those of the other. The largest group has
#: one of its own, unless the transport has but one. So what is decided ahead there, or static, delays nothing else.
OTHERS, LARGEST = 0, 1

#: The digest of no launches.
EMPTY = ""


def extend_digest(digest: str, task: CommTask, channel: int) -> str:
    """Extend ``digest`` by the launch of ``task`` on ``channel``, including the bytes that it covers."""
    return extend_digest_by_text(digest, f"{channel} {task.group} {task.step} {task.verb} {range_of(task.partition)}")


def extend_digest_by_text(digest: str, text: str) -> str:
    return hashlib.blake2b(f"{digest} {text}".encode(), digest_size=8).hexdigest()


def range_of(partition: Partition) -> str:
    """The dtype and byte range of a partition, for digests and messages."""
    return f"{partition.dtype} {partition.start} {partition.stop}"
