"""The sums of powers of averages, from which norms are made (see ``core/norms.py``). Made where the averages are made."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import ProtocolError
from ...core.manifest import ITEMSIZE, Manifest
from ...core.norms import ROW_DTYPE
from .reduce import Bytes, widen

#: Elements that are widened to 64 bits at a time. Many small calls would take longer, and after each of them a thread may have
#: to wait for the interpreter's lock.
_BLOCK = 1 << 18

#: Elements of one dot product. Longer ones make OpenBLAS start threads, which spin beside the training.
_DOT = 1 << 13


@dataclass(frozen=True, slots=True)
class _TensorSums:
    """The sums over ``count`` elements of ``tensor``, by order."""

    tensor: int
    count: int
    values: list[float]


@dataclass(frozen=True, slots=True)
class _Part:
    """The sums over one range of averages."""

    dtype: str
    start: int
    tensors: list[_TensorSums]


class NormSums:
    """The sums that one maker of averages makes for one group of norms, until their row is taken. Thread-safe.

    The sums of each range are kept apart until then and added in the order of ranges, so every run gives the same bits,
    whichever average is complete first.

    Args:
        manifest: the tensors whose averages are measured.
        rows: the manifest of the rows, which has ``norms``.

    Raises:
        ProtocolError: the rows are not of the size that those tensors need.
    """

    def __init__(self, manifest: Manifest, rows: Manifest) -> None:
        norms = rows.norms
        assert norms is not None
        self._norms = norms
        self.group = norms.group  # whose averages are measured
        self._count = len(manifest.tensors)
        self._elements = norms.row_elements(self._count)
        for spec in rows.tensors:
            if spec.dtype != ROW_DTYPE or spec.numel % self._elements:
                raise ProtocolError(f"{spec} does not hold rows of {self._elements} numbers, as {norms} need")
        self._places: dict[str, list[tuple[int, int, int]]] = {}  # by dtype: first byte, end and number of each tensor
        for index, tensor in enumerate(manifest.tensors):
            if tensor.nbytes > 0:
                start = manifest.offset(index)
                self._places.setdefault(tensor.dtype, []).append((start, start + tensor.nbytes, index))
        self._scratches: list[Scratch] = []  # those that no thread uses now
        self._lock = threading.Lock()
        self._parts: dict[int, list[_Part]] = {}  # by step

    @property
    def row_bytes(self) -> int:
        return self._elements * ITEMSIZE[ROW_DTYPE]

    def add(self, step: int, dtype: str, start: int, data: Bytes) -> None:
        """Add ``data``, the averages of ``step`` from byte ``start`` of the buffer of ``dtype`` on."""
        with self._lock:
            scratch = self._scratches.pop() if self._scratches else Scratch()
        part = _Part(dtype, start, list(self._sums(dtype, start, data, scratch)))
        with self._lock:
            self._scratches.append(scratch)
            self._parts.setdefault(step, []).append(part)

    def _sums(self, dtype: str, start: int, data: Bytes, scratch: Scratch) -> Iterator[_TensorSums]:
        places, view = self._places[dtype], memoryview(data)
        stop = start + len(view)
        for first, end, tensor in places[bisect_right(places, start, key=lambda place: place[0]) - 1 :]:
            if first >= stop:
                return
            part = view[max(first, start) - start : min(end, stop) - start]
            yield _TensorSums(tensor, len(part) // ITEMSIZE[dtype], power_sums(part, dtype, self._norms.orders, scratch))

    def take_row(self, step: int) -> NDArray[np.float64]:
        """Return the row of ``step``, in which nothing is missing that was added before. The sums of that step and of earlier
        ones are dropped."""
        with self._lock:
            parts = self._parts.pop(step, [])
            for earlier in [each for each in self._parts if each < step]:
                del self._parts[earlier]
        row = [0.0] * self._elements
        row[0] = step
        for part in sorted(parts, key=lambda part: (part.dtype, part.start)):
            for sums in part.tensors:
                row[1 + sums.tensor] += sums.count
                for place, (order, value) in enumerate(zip(self._norms.orders, sums.values), 1):
                    at = 1 + sums.tensor + place * self._count
                    row[at] = larger(row[at], value) if math.isinf(order) else row[at] + value
        return np.array(row)


class Scratch:
    """Memory for the sums of one thread at a time. What is not used of it takes no memory."""

    def __init__(self) -> None:
        self.single = np.empty(_BLOCK, np.float32)
        self.wide, self.absolute = np.empty((2, _BLOCK), np.float64)


def power_sums(data: Bytes, dtype: str, orders: Sequence[float], scratch: Scratch) -> list[float]:
    """For each of ``orders``, the sum of ``|x| ** order`` over the elements of ``data``, or the largest ``|x|`` if the order is
    infinite. NaN if an element is NaN.

    The sums are made in 64 bits, so that their last bits hardly depend on how a tensor is cut. Another cut then gives the same
    norm in 32 bits.
    """
    sums = [0.0] * len(orders)
    with np.errstate(all="ignore"):  # infinities and NaN are results here, as in ``reduce.average``
        for block in _blocks(memoryview(data), dtype, scratch):
            wide = absolute = None
            for place, order in enumerate(orders):
                if math.isinf(order):
                    sums[place] = larger(sums[place], larger(float(block.max()), -float(block.min())))
                    continue
                wide = _widened(block, scratch) if wide is None else wide
                if order == 2:
                    sums[place] += _squares(wide)
                    continue
                absolute = np.abs(wide, out=scratch.absolute[: wide.size]) if absolute is None else absolute
                sums[place] += float(np.add.reduce(absolute if order == 1 else np.power(absolute, order)))
    return sums


def _blocks(data: memoryview, dtype: str, scratch: Scratch) -> Iterator[NDArray[Any]]:
    """The elements of ``data`` in blocks of 32 or 64 bits. A block is valid until the next one."""
    for start in range(0, len(data), _BLOCK * ITEMSIZE[dtype]):
        part = data[start : start + _BLOCK * ITEMSIZE[dtype]]
        if dtype in ("float32", "float64"):
            yield np.frombuffer(part, dtype)
            continue
        single = scratch.single[: len(part) // ITEMSIZE[dtype]]
        widen(part, dtype, single.data)
        yield single


def _widened(block: NDArray[Any], scratch: Scratch) -> NDArray[np.float64]:
    if block.dtype == np.float64:
        return block
    wide = scratch.wide[: block.size]
    np.copyto(wide, block)
    return wide


def _squares(block: NDArray[np.float64]) -> float:
    whole = block.size // _DOT * _DOT
    rest = block[whole:]
    total = float(np.dot(rest, rest))
    if whole:
        rows = block[:whole].reshape(-1, _DOT)
        total += float(np.add.reduce(np.matmul(rows[:, None, :], rows[:, :, None]), axis=None))  # a dot product for each row
    return total


def larger(a: float, b: float) -> float:
    """The larger of both; NaN if one is NaN."""
    return a if a >= b or math.isnan(a) else b
