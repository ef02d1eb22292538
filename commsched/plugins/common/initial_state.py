"""All ranks begin with equal state: their variables are compared, and rank 0's values are sent. Shared by plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import commsched


def first_difference(records: Sequence[Sequence[Any]]) -> tuple[int, Any, Any] | None:
    """Find the first rank whose list differs from rank 0's.

    Args:
        records: one list per rank, as ``Session.gather`` returns them.

    Returns:
        That rank, rank 0's item and the rank's item at the first difference; an item is None at the end of a list.
        None if all lists are equal.
    """
    for rank, theirs in enumerate(records):
        for ours, other in zip([*records[0], None], [*theirs, None]):
            if ours != other:
                return rank, ours, other
    return None


def described(item: Sequence[Any] | None) -> str:
    """An item ``[name, shape, dtype]`` of such a list as text, for an error."""
    return "nothing more" if item is None else f"'{item[0]}' {item[2]}{item[1]}"


def broadcast_arrays(session: commsched.Session, name: str, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Rank 0's values of ``arrays``, bit for bit. Collective.

    The arrays must have the same shapes and types on all ranks. The results share one piece of memory.
    """
    flat = np.concatenate(
        [np.empty(0, np.uint8), *(np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays)]
    )
    session.broadcast(name, flat.data)
    received, start = [], 0
    for array in arrays:
        received.append(flat[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
        start += array.nbytes
    return received
