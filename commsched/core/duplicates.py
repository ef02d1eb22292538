"""Finds ranks that train on the same batches, as happens when nobody gives each rank its own part of the data. Their gradients
are equal in every bit, and so is each average, so training goes on as with one rank. Ranks sample the gradients of one step
before they are averaged, and rank 0 compares digests of the samples. Pure: no thread, lock or clock.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from .errors import ranks_text
from .manifest import ITEMSIZE, Manifest
from .pace import EARLY_REPORTS, PaceReport
from .task import CommTask

#: The step whose gradients are sampled. The digest travels with the report at the step after it.
SAMPLED_STEP = EARLY_REPORTS[0] - 1

#: Elements that are sampled in each partition, evenly spread.
_ELEMENTS = 64

#: Samples with fewer different values, besides 0, have no digest. So zeros, NaN and tiny models make no rank look like another.
_LEAST_VALUES = 32


@dataclass(slots=True)
class _Sample:
    digest: int = 0  # of all partitions, in whichever order they came
    values: set[bytes] = field(default_factory=set)


class GradientSamples:
    """The samples of one rank. One thread at a time calls it."""

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}  # by group, during the sampled step

    def add(self, task: CommTask, manifest: Manifest) -> None:
        """Sample the data of ``task``, which hold this rank's gradients of :data:`SAMPLED_STEP`."""
        at, data = task.partition, task.data
        if manifest.norms is not None or manifest.tensors[at.tensors[0]].name.startswith("commsched."):
            return  # no gradients: a plugin's own tensors may be equal
        size = ITEMSIZE[at.dtype]
        stride = max(1, len(data) // size // _ELEMENTS) * size
        elements = [bytes(data[start : start + size]) for start in range(0, len(data), stride)]
        sample = self._samples.setdefault(task.group, _Sample())
        sample.values.update(each for each in elements if any(each))
        digest = hashlib.blake2b(b"".join((b"%d " % at.index, *elements)), digest_size=8).digest()
        sample.digest ^= int.from_bytes(digest)

    def take(self, group: int) -> str:
        """The digest of ``group``, of which nothing is kept; empty if too little was sampled."""
        sample = self._samples.pop(group, None)
        return "" if sample is None or len(sample.values) < _LEAST_VALUES else f"{sample.digest:016x}"


class Duplicates:
    """Compares the digests of all ranks, on rank 0. One thread at a time."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._digests: dict[int, dict[int, str]] = {}  # by group and rank, until those of all ranks are there
        self.ranks: tuple[int, ...] = ()  # those that were found to have the same gradients

    def add(self, rank: int, report: PaceReport) -> str | None:
        """Add the report of ``rank``. Returns the line to log, once in a job; otherwise None."""
        if report.step != SAMPLED_STEP + 1 or self.ranks:
            return None
        digests = self._digests.setdefault(report.group, {})
        digests[rank] = report.digest
        if len(digests) < self._world_size:
            return None
        del self._digests[report.group]
        alike: dict[str, list[int]] = {}
        for each, digest in sorted(digests.items()):
            alike.setdefault(digest, []).append(each)
        alike.pop("", None)
        ranks = max(alike.values(), key=len, default=[])
        if len(ranks) < 2:
            return None
        self.ranks = tuple(ranks)
        who = "all ranks" if len(ranks) == self._world_size else ranks_text(ranks, 8)
        return (
            f"{who} had the same gradients in step {SAMPLED_STEP}, as ranks that train on the same batches have, "
            "which learn no more than one rank would; give each rank its own part of the data, by a DistributedSampler, say, "
            "or by a seed that depends on the rank"
        )
