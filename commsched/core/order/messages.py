"""The messages by which ranks agree on an order. On the way each is a JSON object that names its kind. Each launch has a key,
which is the same on every rank, and launches have a rolling digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
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


@dataclass(slots=True)
class OrderMessage:
    """Base of all messages."""


# --- to rank 0 ---


@dataclass(slots=True)
class TasksReady(OrderMessage):
    """The tasks ``ready`` became ready on this rank, which knew of so many ``freezes``. ``launched`` are its launches since its
    last report, from place ``first`` on; ``digest`` is the digest of all its launches so far."""

    ready: list[LaunchKey]
    freezes: int
    first: int
    launched: list[LaunchKey]
    digest: str


@dataclass(slots=True)
class LaunchRefused(OrderMessage):
    """This rank cannot launch ``launched`` from place ``first`` on, although rank 0 announced it."""

    first: int
    launched: list[LaunchKey]


@dataclass(slots=True)
class FreezeRefused(OrderMessage):
    """By this rank's plan the order ``keys``, which it received, has another digest than rank 0's."""

    keys: list[LaunchKey]


@dataclass(slots=True)
class StaticStep(OrderMessage):
    """This rank has launched all tasks of ``step`` in the static order; ``digest`` is the digest of these launches."""

    step: int
    digest: str


# --- from rank 0 to all others ---


@dataclass(slots=True)
class Launch(OrderMessage):
    """All ranks launch ``launch`` from place ``first`` on, on ``channel``; ``digest`` is the digest of all launches up to their
    end."""

    channel: int
    first: int
    launch: list[LaunchKey]
    digest: str


@dataclass(slots=True)
class Freeze(OrderMessage):
    """From now on all ranks launch the tasks of each step in the order ``keys``; ``digest`` is the digest of that order."""

    keys: list[LaunchKey]
    digest: str


# --- to rank 0, which passes it on to all others ---


@dataclass(slots=True)
class Leaves(OrderMessage):
    """``rank`` launches nothing more. ``steps``: for each group, the first step that this rank does not complete, and the
    number of tasks of that step that it has launched in a static order."""

    rank: int
    steps: list[tuple[int, int, int]]


_KINDS = {kind.__name__: kind for kind in (TasksReady, LaunchRefused, FreezeRefused, StaticStep, Launch, Freeze, Leaves)}


def encode(message: OrderMessage) -> dict[str, Any]:
    """``message`` as a JSON object."""
    return {"kind": type(message).__name__, **{field.name: _plain(getattr(message, field.name)) for field in fields(message)}}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [item.to_record() if isinstance(item, LaunchKey) else item for item in value]
    return value


def decode(record: Any) -> Any:
    """The message that :func:`encode` turned into ``record``.

    Raises:
        KeyError, TypeError, ValueError: ``record`` is not such a message.
    """
    kind: Any = _KINDS[record["kind"]]
    return kind(**{field.name: _READERS[str(field.type)](record[field.name]) for field in fields(kind)})


def _keys(records: Any) -> list[LaunchKey]:
    return [LaunchKey.from_record(record) for record in records]


def _steps(records: Any) -> list[tuple[int, int, int]]:
    return [(int(group), int(step), int(launched)) for group, step, launched in records]


#: The function that checks and reads a field, by the field's annotation.
_READERS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "str": str,
    "list[LaunchKey]": _keys,
    "list[tuple[int, int, int]]": _steps,
}
