"""The arithmetic of averages. Sums run in rank order, so that every run gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...devices.arithmetic import HALVES, Half

#: Contiguous bytes. A numpy array is passed as its ``.data``.
Bytes = bytes | bytearray | memoryview

#: Elements summed at a time where sums need a wider type. Their 32-bit sums stay in the cache.
_BLOCK = 1 << 16


def average(contributions: Sequence[Bytes], dtype: str, out: Bytes, divisor: int | None = None) -> None:
    """Write the average of equally long ``contributions`` into ``out``. ``dtype`` is a key of ``core.manifest.ITEMSIZE``.

    ``divisor`` is the number that the sum is divided by; ``None`` means the number of contributions. ``divisor`` is greater
    than that number where a contribution is itself the sum of several ranks.

    Sums run in the order of ``contributions`` (ranks), element by element, so the result depends on nothing else. 32- and
    64-bit floats are summed in their own type. 16-bit floats are summed and divided in float32, and rounded once, to nearest
    even. A sum of ``uint8`` is not divided: it wraps at 256, and moves bytes exactly when all ranks but one contribute zeros.
    ``out`` may be the first or the second contribution itself, and must not overlap a contribution otherwise. Callable from any
    thread. Long sums run without the interpreter's lock.
    """
    divisor = len(contributions) if divisor is None else divisor
    if len(contributions) == divisor == 1:
        np.copyto(_array(out, "uint8"), _array(contributions[0], "uint8"))
        return
    # Infinities and NaN are ordinary results here: training code judges them, not the network.
    with np.errstate(all="ignore"):
        _AVERAGES[dtype](contributions, out, divisor)


def total(contributions: Sequence[Bytes], dtype: str, out: Bytes) -> None:
    """Write the sum of equally long ``contributions`` into ``out``, in the order and the types of ``average``.

    So the sum of a 16-bit type is float32, and ``out`` is twice as long as a contribution. For other types ``out`` may be a
    contribution as in ``average``.
    """
    with np.errstate(all="ignore"):
        if dtype in HALVES:
            _total_wide(HALVES[dtype], contributions, out)
        else:
            _sum(contributions, out, dtype)


def widen(data: Bytes, dtype: str, out: Bytes) -> None:
    """Write the elements of ``data``, of a 16-bit ``dtype``, into ``out`` as float32. Exact."""
    half = HALVES[dtype]
    half.widen(_array(data, half.storage), _array(out, "float32"))


def narrow(data: Bytes, dtype: str, out: Bytes) -> None:
    """Write the float32 elements of ``data`` into ``out`` in a 16-bit ``dtype``, rounded to nearest even.

    A value that ``dtype`` cannot hold becomes infinite; for float16 this begins at 65520. NaN stays NaN.
    """
    half = HALVES[dtype]
    source, target = _array(data, "float32"), _array(out, half.storage)
    with np.errstate(all="ignore"):
        for block in _blocks(source.size):
            half.narrow(source[block], target[block])


def _array(data: Bytes, dtype: str) -> NDArray[Any]:
    return np.frombuffer(data, dtype=dtype)


def _sum(contributions: Sequence[Bytes], out: Bytes, dtype: str) -> NDArray[Any]:
    total = _array(out, dtype)
    first = _array(contributions[0], dtype)
    if len(contributions) == 1:
        np.copyto(total, first)
        return total
    np.add(first, _array(contributions[1], dtype), out=total)
    for contribution in contributions[2:]:
        np.add(total, _array(contribution, dtype), out=total)
    return total


def _average_native(dtype: str) -> Callable[[Sequence[Bytes], Bytes, int], None]:
    def average_native(contributions: Sequence[Bytes], out: Bytes, divisor: int) -> None:
        total = _sum(contributions, out, dtype)
        np.divide(total, total.dtype.type(divisor), out=total)

    return average_native


def _sum_bytes(contributions: Sequence[Bytes], out: Bytes, divisor: int) -> None:
    _sum(contributions, out, "uint8")


def _average_wide(dtype: str) -> Callable[[Sequence[Bytes], Bytes, int], None]:
    """Averages of a 16-bit type, block by block in float32."""
    half = HALVES[dtype]

    def average_wide(contributions: Sequence[Bytes], out: Bytes, divisor: int) -> None:
        arrays = [_array(contribution, half.storage) for contribution in contributions]
        result = _array(out, half.storage)
        total_block, scratch = np.empty((2, min(_BLOCK, result.size)), np.float32)
        for block in _blocks(result.size):
            total = total_block[: block.stop - block.start]
            _sum_wide(half, [array[block] for array in arrays], total, scratch[: total.size])
            np.divide(total, np.float32(divisor), out=total)
            half.narrow(total, result[block])

    return average_wide


def _sum_wide(
    half: Half, contributions: Sequence[NDArray[Any]], total: NDArray[np.float32], scratch: NDArray[np.float32]
) -> None:
    half.widen(contributions[0], total)
    for contribution in contributions[1:]:
        half.widen(contribution, scratch)
        np.add(total, scratch, out=total)


def _total_wide(half: Half, contributions: Sequence[Bytes], out: Bytes) -> None:
    arrays = [_array(contribution, half.storage) for contribution in contributions]
    sums = _array(out, "float32")
    scratch = np.empty(min(_BLOCK, sums.size), np.float32)
    for block in _blocks(sums.size):
        _sum_wide(half, [array[block] for array in arrays], sums[block], scratch[: block.stop - block.start])


def _blocks(size: int) -> Iterator[slice]:
    for start in range(0, size, _BLOCK):
        yield slice(start, min(start + _BLOCK, size))


_AVERAGES: dict[str, Callable[[Sequence[Bytes], Bytes, int], None]] = {
    "float16": _average_wide("float16"),
    "bfloat16": _average_wide("bfloat16"),
    "float32": _average_native("float32"),
    "float64": _average_native("float64"),
    "uint8": _sum_bytes,
}
