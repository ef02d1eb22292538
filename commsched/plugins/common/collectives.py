"""Collective calls outside of steps: arrays of rank 0, and values that are gathered for one purpose. Shared by plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import commsched

from ...core.errors import ManifestMismatch


def format_spec(item: Sequence[Any] | None) -> str:
    """A variable, ``[name, shape, dtype]``, as text for an error; None: there is none."""
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


def gather_alike(session: commsched.Session, doing: str, value: Any, advice: str) -> list[Any]:
    """Return ``session.gather(value)``, and require that all ranks make this call for the same purpose. Collective.

    Args:
        doing: the purpose of this call, as an error says it: "rank 1 <doing>".
        advice: the end of the error message.

    Raises:
        ManifestMismatch: another rank makes another collective call.
    """
    values = []
    for rank, theirs in enumerate(session.gather({"doing": doing, "value": value})):
        does = theirs.get("doing") if isinstance(theirs, dict) else None
        if does != doing:
            raise ManifestMismatch(f"rank {rank} {does or 'does something else'} while rank {session.rank} {doing}: {advice}")
        values.append(theirs["value"])
    return values
