"""Manifest: the tensors of a model to be communicated, in forward order, equal on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from .comparison import Difference, require_same
from .errors import ManifestMismatch, ProtocolError, UnsupportedError, and_more
from .norms import NormsOf

#: Bytes of one element. Floating-point types are averaged (16-bit types are summed in 32 bits). ``uint8`` is summed, which
#: transfers bytes of any type exactly if every rank but one contributes zeros (see ``Session.broadcast``).
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "uint8": 1}


#: Bounds on a manifest that another process announces: sums and products of arbitrarily long numbers would take seconds.
_MAX_ELEMENTS, _MAX_DIMENSIONS = 2**62, 64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: ``name``, ``shape`` in elements and ``dtype`` (a key of :data:`ITEMSIZE`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise UnsupportedError(f"tensor '{self.name}' has dtype {self.dtype}; commsched communicates {', '.join(ITEMSIZE)}")

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"'{self.name}' {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """Tensors in forward order: index 0 is needed first by the next forward.

    The tensors of each dtype lie one after another in that dtype's flat buffer, in this order; :meth:`offset` is the position.
    ``shares_partitions``: small neighbours share a partition, so each of them waits until all of them are submitted.
    ``norms``: the tensors are rows of sums, for norms of another group's averages (see ``norms.NormsOf``).
    """

    tensors: tuple[TensorSpec, ...]
    shares_partitions: bool = True
    norms: NormsOf | None = None

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        ends: dict[str, int] = {}
        offsets = []
        for spec in self.tensors:
            start = ends.get(spec.dtype, 0)
            offsets.append(start)
            ends[spec.dtype] = start + spec.nbytes
        return tuple(offsets)

    def offset(self, tensor: int) -> int:
        """The position of ``tensor`` in its dtype's flat buffer, in bytes."""
        return self._offsets[tensor]

    @cached_property
    def buffer_bytes(self) -> dict[str, int]:
        """The size of each dtype's flat buffer, in bytes."""
        sizes: dict[str, int] = {}
        for spec in self.tensors:
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
        return sizes

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over every name, shape and dtype in order. Two fingerprints are equal if and only if the tensors are."""
        return hashlib.sha256(json.dumps(self.to_record()).encode()).hexdigest()

    @cached_property
    def model_fingerprint(self) -> str:
        """SHA-256 over the tensors, independent of their order. If a forward skips layers at random, each start of the
        training measures another order."""
        return hashlib.sha256(json.dumps(sorted(self._tensor_records())).encode()).hexdigest()

    def to_record(self) -> list[Any] | dict[str, Any]:
        """The tensors, and what they are norms of, as JSON values, for the control channel and the servers."""
        tensors = self._tensor_records()
        return tensors if self.norms is None else {"tensors": tensors, "norms": self.norms.to_record()}

    def _tensor_records(self) -> list[Any]:
        return [[spec.name, list(spec.shape), spec.dtype] for spec in self.tensors]

    @classmethod
    def from_record(cls, record: Any) -> Manifest:
        """The inverse of :meth:`to_record`.

        Raises:
            ProtocolError: ``record`` is not a valid result of :meth:`to_record`.
        """
        try:
            norms = None
            if type(record) is dict and "norms" in record:
                norms, record = NormsOf.from_record(record["norms"]), record.get("tensors")
            if type(record) is not list:
                raise TypeError(f"{type(record).__name__} instead of a list")
            tensors = []
            for name, shape, dtype in record:
                if type(name) is not str or type(shape) is not list or not all(type(n) is int and n >= 0 for n in shape):
                    raise ValueError(f"tensor {name!r} with shape {shape!r}")
                if len(shape) > _MAX_DIMENSIONS or max(shape, default=0) > _MAX_ELEMENTS or prod(shape) > _MAX_ELEMENTS:
                    raise ValueError(f"tensor {name!r} with over {_MAX_ELEMENTS} elements or {_MAX_DIMENSIONS} dimensions")
                tensors.append(TensorSpec(name, tuple(shape), dtype))
            return cls(tuple(tensors), norms=norms)
        except (TypeError, ValueError, UnsupportedError) as error:
            raise ProtocolError(f"not a manifest: {error}") from error

    def names_in(self, dtype: str, start: int, stop: int) -> str:
        """The names of the tensors that own bytes ``[start, stop)`` of a dtype's buffer, for messages."""
        names = self._names_in(dtype, start, stop)
        return f"'{names[0]}'{and_more(len(names) - 1)}" if names else "no tensor"

    def first_in(self, dtype: str, start: int, stop: int) -> str | None:
        """The name of the first tensor that owns bytes in ``[start, stop)`` of a dtype's buffer, if there is one."""
        return next(iter(self._names_in(dtype, start, stop)), None)

    def _names_in(self, dtype: str, start: int, stop: int) -> list[str]:
        return [
            spec.name
            for index, spec in enumerate(self.tensors)
            if spec.dtype == dtype and max(self.offset(index), start) < min(self.offset(index) + spec.nbytes, stop)
        ]


def require_equal(manifests: Sequence[Manifest]) -> None:
    """Check that every rank has the manifest of rank 0; ``manifests[r]`` is the manifest of rank ``r``.

    Raises:
        ManifestMismatch: two manifests differ; the message names the first rank and tensor that differ, and both values. The
            message is the same on every rank.
    """
    for rank, manifest in enumerate(manifests):
        if manifest.norms != manifests[0].norms:
            first, other = (each.norms or "other tensors" for each in (manifests[0], manifest))
            raise ManifestMismatch(f"rank 0 registers {first}, rank {rank} {other}")

    def describe(different: Difference) -> str:
        if different.on_rank_0 is not None and different.there is not None:
            return f"tensor {different.key} is {different.text()}"
        ours, theirs = (len(manifests[rank].tensors) for rank in (0, different.rank))
        only = different.on_rank_0 or different.there
        return f"rank 0 has {ours} tensors, rank {different.rank} has {theirs}; the first that only one has is {only}"

    require_same([manifest.tensors for manifest in manifests], describe)
