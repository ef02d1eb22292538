"""Arithmetic of elements in the host's memory: sums, and the conversions of 16-bit floats from and to float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.interfaces import Buffer
from ..core.manifest import ITEMSIZE


@dataclass(frozen=True, slots=True)
class Half:
    """A 16-bit type: numpy's dtype for its storage, and its conversions to float32 and, rounded to nearest even, back."""

    storage: str
    widen: Callable[[NDArray[Any], NDArray[np.float32]], None]
    narrow: Callable[[NDArray[np.float32], NDArray[Any]], None]


def _copy(source: NDArray[Any], target: NDArray[Any]) -> None:
    np.copyto(target, source, casting="same_kind")


def _widen_bfloat16(source: NDArray[np.uint16], target: NDArray[np.float32]) -> None:
    # A bfloat16 is the upper half of the float32 of the same value.
    np.left_shift(source, np.uint32(16), out=target.view(np.uint32), dtype=np.uint32)


def _narrow_bfloat16(source: NDArray[np.float32], target: NDArray[np.uint16]) -> None:
    bits = source.view(np.uint32)
    # Adding just under half of the lost part, and one more if the kept part is odd, carries exactly when nearest-even does.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    np.right_shift(rounded, np.uint32(16), out=target, casting="unsafe")
    # In a NaN the addition would carry into the exponent or the sign.
    lost = np.isnan(source)
    if lost.any():
        target[lost] = (bits[lost] >> np.uint32(16)) | np.uint32(0x40)


HALVES = {"float16": Half("float16", _copy, _copy), "bfloat16": Half("uint16", _widen_bfloat16, _narrow_bfloat16)}


def add_elements(into: NDArray[np.uint8], values: NDArray[np.uint8], dtype: str) -> None:
    """``DeviceStream.add`` for bytes in the host's memory."""
    require_equal_sizes(into, values, ITEMSIZE[dtype])
    with np.errstate(all="ignore"):  # infinities and NaN are ordinary results
        if dtype in HALVES:
            half = HALVES[dtype]
            sums, others = np.empty((2, into.size // 2), np.float32)
            half.widen(into.view(half.storage), sums)
            half.widen(values.view(half.storage), others)
            np.add(sums, others, out=sums)
            half.narrow(sums, into.view(half.storage))
        else:
            total = into.view(dtype)
            np.add(total, values.view(dtype), out=total)


def divide_elements(values: NDArray[np.uint8], by: int, dtype: str) -> None:
    """``DeviceStream.divide`` for bytes in the host's memory."""
    require_quotients(values, dtype)
    numbers = values.view(dtype)
    with np.errstate(all="ignore"):
        np.divide(numbers, by, out=numbers)


def cast_elements(target: NDArray[np.uint8], to: str, source: NDArray[np.uint8], dtype: str) -> None:
    """``DeviceStream.cast`` for bytes in the host's memory."""
    half = require_cast(target, to, source, dtype)
    with np.errstate(all="ignore"):
        if to == "float32":
            half.widen(source.view(half.storage), target.view(to))
        else:
            half.narrow(source.view(dtype), target.view(half.storage))


def require_cast(target: Buffer, to: str, source: Buffer, dtype: str) -> Half:
    """Return the 16-bit type of the two. Raises ValueError if there is no such cast, or the sizes are not of equally many
    elements."""
    half = HALVES.get(to if dtype == "float32" else dtype)
    if half is None or "float32" not in (to, dtype):
        raise ValueError(f"there is no cast from {dtype} to {to}; one is float32, and the other float16 or bfloat16")
    if len(target) * ITEMSIZE[dtype] != len(source) * ITEMSIZE[to] or len(source) % ITEMSIZE[dtype]:
        raise ValueError(f"{len(source)} bytes of {dtype} are not as many elements as {len(target)} bytes of {to}")
    return half


def require_quotients(values: Buffer, dtype: str) -> None:
    """Raise ValueError if these are not elements that can be divided."""
    if dtype not in ("float32", "float64") or len(values) % ITEMSIZE[dtype]:
        raise ValueError(f"{len(values)} bytes of {dtype} are not divided; only whole elements of float32 and float64 are")


def require_equal_sizes(target: Buffer, source: Buffer, itemsize: int = 1) -> None:
    """Raise ValueError if the two do not have equally many bytes, in whole elements."""
    if len(target) != len(source):
        raise ValueError(f"the target has {len(target)} bytes, and the source {len(source)}")
    if len(target) % itemsize:
        raise ValueError(f"{len(target)} bytes are no whole number of elements of {itemsize} bytes")
