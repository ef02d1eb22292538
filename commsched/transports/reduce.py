"""The arithmetic of a parameter server: averages in rank order, so that every run gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Contiguous bytes; for numpy arrays, their ``.data``.
Bytes = bytes | bytearray | memoryview

#: Elements summed at a time where sums need a wider type: their 32-bit sums stay in the cache.
_BLOCK = 1 << 16


def average(contributions: Sequence[Bytes], dtype: str, out: Bytes) -> None:
    """Put the average of equally long ``contributions`` into ``out``; ``dtype`` is a key of ``core.manifest.ITEMSIZE``.

    Sums run in the order of ``contributions`` (ranks), element by element, so the result depends on nothing else. 32- and
    64-bit floats are summed in their own type; 16-bit ones in float32, divided there, and rounded once, to nearest even. A
    sum of ``uint8`` is not divided: it wraps at 256, and moves bytes exactly when all ranks but one contribute zeros.
    ``out`` may be the first or the second contribution itself; else it must not overlap one. Any thread; long sums are made
    without the interpreter's lock.
    """
    if len(contributions) == 1:
        np.copyto(_array(out, "uint8"), _array(contributions[0], "uint8"))
        return
    # Infinities and NaN are results like others here: training code, not the network, is to judge them.
    with np.errstate(all="ignore"):
        _AVERAGES[dtype](contributions, out)


def _array(data: Bytes, dtype: str) -> NDArray[Any]:
    return np.frombuffer(data, dtype=dtype)


def _sum(contributions: Sequence[Bytes], out: Bytes, dtype: str) -> NDArray[Any]:
    total = _array(out, dtype)
    np.add(_array(contributions[0], dtype), _array(contributions[1], dtype), out=total)
    for contribution in contributions[2:]:
        np.add(total, _array(contribution, dtype), out=total)
    return total


def _average_native(dtype: str) -> Callable[[Sequence[Bytes], Bytes], None]:
    def average_native(contributions: Sequence[Bytes], out: Bytes) -> None:
        total = _sum(contributions, out, dtype)
        np.divide(total, total.dtype.type(len(contributions)), out=total)

    return average_native


def _sum_bytes(contributions: Sequence[Bytes], out: Bytes) -> None:
    _sum(contributions, out, "uint8")


def _average_wide(
    storage: str,
    widen: Callable[[NDArray[Any], NDArray[np.float32]], None],
    narrow: Callable[[NDArray[np.float32], NDArray[Any]], None],
) -> Callable[[Sequence[Bytes], Bytes], None]:
    """Averages of a 16-bit type, block by block in float32."""

    def average_wide(contributions: Sequence[Bytes], out: Bytes) -> None:
        arrays = [_array(contribution, storage) for contribution in contributions]
        result = _array(out, storage)
        total_block, addend_block = np.empty((2, min(_BLOCK, result.size)), np.float32)
        for start in range(0, result.size, _BLOCK):
            block = slice(start, min(start + _BLOCK, result.size))
            total, addend = total_block[: block.stop - start], addend_block[: block.stop - start]
            widen(arrays[0][block], total)
            for array in arrays[1:]:
                widen(array[block], addend)
                np.add(total, addend, out=total)
            np.divide(total, np.float32(len(arrays)), out=total)
            narrow(total, result[block])

    return average_wide


def _copy(source: NDArray[Any], target: NDArray[Any]) -> None:
    np.copyto(target, source, casting="same_kind")


def _widen_bfloat16(source: NDArray[np.uint16], target: NDArray[np.float32]) -> None:
    # A bfloat16 is the upper half of the float32 of the same value.
    np.left_shift(source, np.uint32(16), out=target.view(np.uint32), dtype=np.uint32)


def _narrow_bfloat16(source: NDArray[np.float32], target: NDArray[np.uint16]) -> None:
    bits = source.view(np.uint32)
    # Adding just under half of the lost part, and one more if the kept part is odd, carries exactly when nearest-even does.
    # A NaN cannot carry: what it lost is zero, since it comes from operands that were bfloat16.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    np.right_shift(rounded, np.uint32(16), out=target, casting="unsafe")


_AVERAGES: dict[str, Callable[[Sequence[Bytes], Bytes], None]] = {
    "float16": _average_wide("float16", _copy, _copy),
    "bfloat16": _average_wide("uint16", _widen_bfloat16, _narrow_bfloat16),
    "float32": _average_native("float32"),
    "float64": _average_native("float64"),
    "uint8": _sum_bytes,
}
