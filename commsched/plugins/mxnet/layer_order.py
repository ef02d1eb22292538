"""Measures in the first backward in which order forward uses the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic

import mxnet as mx

from .operation import Operation, push

#: The order of two gradients that are produced within this time means nothing: they belong to one layer or to operations that
#: MXNet runs as one (bulk execution), or they existed before.
_TOGETHER_SECONDS = 1e-3


def measure_order(gradients: Mapping[str, mx.nd.NDArray]) -> list[str]:
    """Return the names of ``gradients`` in forward order, and wait for all gradients.

    Forward uses the parameter first whose gradient backward produces last. Gradients that are produced together keep the order
    in which they are given.

    Raises:
        MXNetError: an operation of this backward failed.
    """
    produced: list[tuple[float, int]] = []

    def note(index: int, operation: Operation) -> None:
        produced.append((monotonic(), index))
        operation.complete()

    names, arrays = list(gradients), list(gradients.values())
    for index in reversed(range(len(arrays))):
        push(partial(note, index), writes=[arrays[index]])
    for array in arrays:
        array.wait_to_read()
    return [names[index] for index in forward_order(produced)]


def forward_order(produced: Sequence[tuple[float, int]]) -> list[int]:
    """Return the indices of gradients in forward order.

    Args:
        produced: the time in seconds and the index of each gradient, in the order of time.
    """
    together: list[list[int]] = []
    before = -1.0
    for at, index in produced:
        if not together or at - before > _TOGETHER_SECONDS:
            together.append([])
        together[-1].append(index)
        before = at
    return [index for indices in reversed(together) for index in sorted(indices)]
