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


#: Neighbours with the same group, step and verb in JSON: these, and the list of their partitions.
_Run = tuple[int, int, int, list[int]]


def to_runs(keys: Sequence[LaunchKey]) -> list[_Run]:
    """``keys`` for JSON. Each message of a step has many keys that differ in their partitions only."""
    runs: list[_Run] = []
    last = None
    for group, step, partition, verb in keys:
        if last != (group, step, verb):
            last = group, step, verb
            runs.append((group, step, _VERBS.index(verb), []))
        runs[-1][3].append(partition)
    return runs


def from_runs(runs: Any) -> list[LaunchKey]:
    """The inverse of :func:`to_runs`.

    Raises:
        TypeError, ValueError: ``runs`` is not its result.
    """
    keys: list[LaunchKey] = []
    for group, step, verb, partitions in runs:
        if not 0 <= verb < len(_VERBS):
            raise ValueError(f"verb {verb}")
        keys += [LaunchKey(int(group), int(step), int(partition), _VERBS[verb]) for partition in partitions]
    return keys


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
    """The tasks ``ready`` became ready on this rank, which knew of so many ``freezes``. It has made so many launches
    (``launched``) so far; ``digest`` is their digest."""

    ready: list[LaunchKey]
    freezes: int
    launched: int
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
class KeepAgreed(OrderMessage):
    """On this rank the order of ``group`` must not be static."""

    group: int


@dataclass(slots=True)
class StaticStep(OrderMessage):
    """This rank has launched all tasks of ``step`` in a static order. ``freezes`` is how many static orders there have been,
    with this one; ``digest`` is the digest of these launches."""

    step: int
    digest: str
    freezes: int


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


_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (TasksReady, LaunchRefused, FreezeRefused, KeepAgreed, StaticStep, Launch, Freeze, Leaves)
}


def encode(message: OrderMessage) -> dict[str, Any]:
    """``message`` as a JSON object."""
    kind = type(message)
    record: dict[str, Any] = {"kind": kind.__name__}
    for name, of_keys, _ in _FIELDS[kind.__name__]:
        value = getattr(message, name)
        record[name] = to_runs(value) if of_keys else value
    return record


def decode(record: Any) -> Any:
    """The message that :func:`encode` turned into ``record``.

    Raises:
        KeyError, TypeError, ValueError: ``record`` is not such a message.
    """
    name = record["kind"]
    return _KINDS[name](*[read(record[field]) for field, _, read in _FIELDS[name]])


def _steps(records: Any) -> list[tuple[int, int, int]]:
    return [(int(group), int(step), int(launched)) for group, step, launched in records]


#: The function that checks and reads a field, by the field's annotation.
_READERS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "str": str,
    "list[LaunchKey]": from_runs,
    "list[tuple[int, int, int]]": _steps,
}

#: The fields of each kind of message: the name, whether it holds keys, and the function that reads it.
_FIELDS = {
    name: [(field.name, str(field.type) == "list[LaunchKey]", _READERS[str(field.type)]) for field in fields(kind)]
    for name, kind in _KINDS.items()
}
