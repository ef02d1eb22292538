"""All ranks begin alike: what they have is compared, and rank 0's values are sent. Shared by plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import commsched


def first_difference(records: Sequence[Sequence[Any]]) -> tuple[int, Any, Any] | None:
    """The first rank whose list is not rank 0's, and the items that differ there, rank 0's before the other; None stands for
    the end of a list. None: all are equal. ``records`` as ``Session.gather`` gives them."""
    for rank, theirs in enumerate(records):
        for ours, other in zip([*records[0], None], [*theirs, None]):
            if ours != other:
                return rank, ours, other
    return None


def described(item: Sequence[Any] | None) -> str:
    """``[name, shape, dtype]`` of such a list, for an error."""
    return "nothing more" if item is None else f"'{item[0]}' {item[2]}{item[1]}"


def broadcast_arrays(session: commsched.Session, name: str, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Rank 0's values of ``arrays``, which have the same shapes and types on all ranks, bit for bit, in one piece of memory.
    Collective."""
    flat = np.concatenate(
        [np.empty(0, np.uint8), *(np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays)]
    )
    session.broadcast(name, flat.data)
    received, start = [], 0
    for array in arrays:
        received.append(flat[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
        start += array.nbytes
    return received
