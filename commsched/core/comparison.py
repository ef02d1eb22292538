"""Values that must be equal on all ranks: compared when ranks gather them, and on rank 0 while training runs."""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .errors import CommschedError, ManifestMismatch, RanksDiverged, ranks_text

#: The most reports of one rank that may wait for reports of the others: far more than synchronous ranks can be apart.
MAX_WAITING = 1000


class Difference(NamedTuple):
    """The first item in which a rank differs from rank 0: the items of both; None where a rank has no such item."""

    rank: int
    key: Any  # the item's key in a mapping, its index in a list
    on_rank_0: Any
    there: Any

    def text(self, describe: Callable[[Any], str] = str) -> str:
        """Both items for an error: "1 on rank 0 but 2 on rank 3"."""
        return f"{describe(self.on_rank_0)} on rank 0 but {describe(self.there)} on rank {self.rank}"


def first_difference(records: Sequence[Any]) -> Difference | None:
    """The first difference from rank 0's record; None if all records are equal.

    Args:
        records: one record for each rank, as ``Session.gather`` returns them: lists, mappings, or other values, each of which
            counts as one item.
    """
    ours = _items(records[0])
    for rank, record in enumerate(records):
        if record is records[0]:  # a gather returns equal values as one object
            continue
        theirs = _items(record)
        for key in {**ours, **theirs}:  # rank 0's keys come first, in its order
            if ours.get(key) != theirs.get(key):
                return Difference(rank, key, ours.get(key), theirs.get(key))
    return None


def _items(record: Any) -> Mapping[Any, Any]:
    if isinstance(record, Mapping):
        return record
    return dict(enumerate(record if isinstance(record, list | tuple) else [record]))


def require_same(
    records: Sequence[Any], describe: Callable[[Difference], str], error: type[CommschedError] = ManifestMismatch
) -> None:
    """Require the same record of all ranks, see :func:`first_difference`.

    Raises:
        CommschedError: ``error``, with the message that ``describe`` makes of the first difference; the same on
            all ranks.
    """
    if (different := first_difference(records)) is not None:
        raise error(describe(different))


class Comparison:
    """Compares the values that ranks report: the first report of each rank with the first of the others, and so on.

    ``what`` names the compared thing ("weights"); different things are compared separately. Thread-safe.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._waiting: defaultdict[str, list[deque[tuple[int, dict[str, str]]]]] = defaultdict(
            lambda: [deque() for _ in range(world_size)]
        )
        self._missing: dict[str, int] = {}  # by thing: how many ranks have no report waiting
        self._lock = threading.Lock()

    def add(self, rank: int, what: str, step: int, values: Mapping[str, Any], hint: str = "") -> None:
        """Add the report that ``rank`` has ``values`` (JSON, by name) after ``step``. The reports are compared when all ranks
        have made theirs. The message about values that differ ends with ``hint``.

        Raises:
            RanksDiverged: ranks differ; the message names the first value and the ranks. Or a rank has made no report while
                another made more than :data:`MAX_WAITING`.
        """
        with self._lock:
            waiting = self._waiting[what]
            waiting[rank].append((step, {name: json.dumps(value, sort_keys=True) for name, value in values.items()}))
            if len(waiting[rank]) > MAX_WAITING:
                missing = [other for other in range(self._world_size) if not waiting[other]]
                raise RanksDiverged(f"{ranks_text(missing)} compared no {what} while rank {rank} did so {MAX_WAITING} times")
            if len(waiting[rank]) == 1:
                self._missing[what] = self._missing.get(what, self._world_size) - 1
            if self._missing[what]:
                return
            heads = [queue.popleft() for queue in waiting]
            self._missing[what] = sum(not queue for queue in waiting)
            if self._missing[what] == self._world_size:
                # Each optimizer of a session is a thing of its own, so the names would accumulate.
                del self._waiting[what], self._missing[what]
        _require_equal(what, heads, hint)


def _require_equal(what: str, reported: list[tuple[int, dict[str, str]]], hint: str) -> None:
    """Check that all reports are equal; ``reported[rank]`` is a step and the values after it."""
    step, values = reported[0]
    for rank, (other_step, other_values) in enumerate(reported):
        if other_step != step:
            raise RanksDiverged(f"{what} are compared after step {step} on rank 0 but after step {other_step} on rank {rank}")
        if other_values.keys() != values.keys():
            name = min(other_values.keys() ^ values.keys())
            has, lacks = ("rank 0", f"rank {rank}") if name in values else (f"rank {rank}", "rank 0")
            raise RanksDiverged(f"{what} after step {step}: {has} has '{name}' but {lacks} does not")
    different = [name for name in values if any(other[name] != values[name] for _, other in reported)]
    if not different:
        return
    name = different[0]
    by_value: defaultdict[str, list[int]] = defaultdict(list)
    for rank, (_, other_values) in enumerate(reported):
        by_value[other_values[name]].append(rank)
    listed = " but ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in by_value.items())
    more = f" ({len(different) - 1} more differ)" if len(different) > 1 else ""
    raise RanksDiverged(f"{what} differ between ranks after step {step}: '{name}' is {listed}{more}{hint and '; '}{hint}")
